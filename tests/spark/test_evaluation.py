"""Classifiers in SQL and transforms beside each other, by a forwarder on a real Spark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from saf.forwarding import broker
from saf.operating import decide
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import parked
from saf.spark import transforms
from tests.on_spark import forward
from tests.pipeline import bodies, connect, let_time_pass
from tests.programs import BIN, ROOT, configuration, run
from tests.tiers import sized

SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)"
MIXED = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT (ARRAY['billing', 'front', 'audit'])[1 + n %% 3], 'k' || n %% 7, convert_to(n::text, 'UTF8')
FROM generate_series(%s::int, %s::int) AS n ORDER BY n
"""
DEEP_ONE = "if(text RLIKE '(a|b)*c', 'x', 'audit')"

Config = Callable[..., Path]


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Config:
    def write(function: str, *, service: str = "billing", more: str = "", **others: Dsn) -> Path:
        path = configuration(
            tmp_path / "saf.toml", {"app": app}, {"mom": mom, **others}, attempts=1
        )
        table = f'[[transforms]]\nservice = "{service}"\nfunction = "tests.transforms:{function}"\n'
        path.write_text(f"{path.read_text()}chunk_rows = 7\n{table}{more}\n")
        return path

    return write


def send(source: psycopg.Connection[Any], service: str, *texts: str) -> None:
    for text in texts:
        source.execute(SEND, [service, "k", text.encode()])


def stored(mom: Dsn) -> list[tuple[str, str, str]]:
    """The service, the key and the text of each message, in the order of their arrival."""
    with connect(mom) as connection:
        query = "SELECT to_service, key, convert_from(body, 'UTF8') FROM saf.inbox ORDER BY id"
        return connection.execute(query).fetchall()


def expected(last: int) -> dict[str, list[tuple[str, str]]]:
    """What arrives of `MIXED` for each key, in its order, if ``number`` is billing's transform."""
    found: dict[str, list[tuple[str, str]]] = {}
    for n in range(1, last + 1):
        one = ("billing", str(n + 1)) if n % 3 == 0 else ("audit", str(n))
        found.setdefault(f"k{n % 7}", []).append(one)
    return found


def by_key(mom: Dsn) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for service, key, text in stored(mom):
        found.setdefault(key, []).append((service, text))
    return found


def dead(source: psycopg.Connection[Any]) -> dict[str, str]:
    return {one.service: one.error or "" for one in DeadLetters().rows(source)}


def waits(source: psycopg.Connection[Any]) -> dict[str, str]:
    return {lane.subject: lane.error for lane in parked(source).shown}


@pytest.mark.parametrize("point", ["mom_commit:2", "mark_commit:3"][: sized(1, 2)])
def test_with_both_each_message_arrives_once_in_the_order_of_its_key_also_after_a_crash(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, point: str
) -> None:
    add_router(source, "front", "sql", "'audit'")
    source.execute(MIXED, [1, 300])
    path = config("number")
    run(
        [BIN / "saf", "forward", "--config", path],
        env={"PYTHONPATH": str(ROOT), "SAF_FAILPOINT": point},
        timeout=180,
    )
    assert 0 < len(bodies(mom)) < 300, "it was killed while it was at it"
    forward(path)
    assert by_key(mom) == expected(300)
    assert dead(source) == {}


@pytest.mark.full
def test_what_raises_for_a_message_makes_a_dead_letter_of_it_and_nothing_else(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    """An expression beside a function that works, and the reverse."""
    add_router(source, "front", "sql", "if(CAST(text AS INT) > 0, 'audit', NULL)")
    send(source, "front", "1", "seven", "2")
    send(source, "billing", "10", "eleven", "12")
    said = forward(config("number"))
    assert sorted(bodies(mom)) == ["1", "11", "13", "2"]
    assert (said["dead"], said["parked"]) == (2, 0)
    assert "its expression raises an error: [CAST_INVALID_INPUT]" in dead(source)["front"]
    assert "'seven'" in dead(source)["front"]
    assert "transform of 'billing': its function raises" in dead(source)["billing"]


@pytest.mark.full
def test_a_transform_that_fails_parks_its_service_and_what_sql_routes_goes_on(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    add_router(source, "front", "sql", "'audit'")
    send(source, "front", "1", "2")
    send(source, "billing", "3")
    said = forward(config("raises"))
    assert (bodies(mom), said["parked"], said["dead"]) == (["1", "2"], 1, 0)
    assert "no such table" in waits(source)["billing"]


def test_of_an_expression_that_spark_dies_of_only_its_routers_messages_wait(
    source: psycopg.Connection[Any], app: Dsn, mom: Dsn, config: Config
) -> None:
    add_router(source, "front", "sql", "'audit'")
    add_router(source, "deep", "sql", DEEP_ONE)
    path = config("number")
    send(source, "deep", "ab" * 100_000)
    send(source, "front", "1")
    send(source, "billing", "2")
    forward(path)
    assert sorted(bodies(mom)) == ["1", "3"]
    ((service, error),) = waits(source).items()
    assert service == "deep"
    assert "StackOverflowError" in error

    add_router(source, "deep", "sql", "'audit'")
    let_time_pass(app)
    forward(path)
    assert len(bodies(mom)) == 3
    assert (waits(source), dead(source)) == ({}, {})


@pytest.mark.full
def test_messages_of_both_kinds_that_have_waited_go_on_in_order(
    source: psycopg.Connection[Any],
    app: Dsn,
    mom: Dsn,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a function and an expression that are mended, and for a destination that is back."""
    add_router(source, "front", "sql", "get_json_objekt(text, '$')")
    path = config("told")
    source.execute(MIXED, [1, 60])
    assert forward(path)["parked"] == 40
    source.execute(MIXED, [61, 120])
    forward(path)
    add_router(source, "front", "sql", "'audit'")
    let_time_pass(app)
    up = path.read_text()
    down = f'dsn = "{Dsn(f"{mom} port=1 connect_timeout=2")}"'
    path.write_text(up.replace(f'dsn = "{mom.conninfo}"', down))
    forward(path, 75)
    monkeypatch.setenv("TOLD", "yes")
    path.write_text(up)
    source.execute(MIXED, [121, 180])
    for _ in range(3):
        let_time_pass(app)
        forward(path)
    by_key = [(key, int(text) - (service == "billing")) for service, key, text in stored(mom)]
    assert sorted(n for _, n in by_key) == [*range(1, 181)]
    for sent_to in range(3):
        for key in range(7):
            arrived = [n for of, n in by_key if of == f"k{key}" and n % 3 == sent_to]
            assert arrived == sorted(arrived), "nothing for the same service has overtaken it"
    assert (waits(source), dead(source)) == ({}, {})


@pytest.mark.full
def test_what_the_transform_of_a_router_in_sql_has_made_is_kept_whatever_is_drawn_again(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    """The driver dies after the results are written, and after some are stored."""
    add_router(source, "front", "sql", "if(CAST(text AS INT) % 2 = 0, 'even', 'odd')")
    send(source, "front", *map(str, range(40)))
    send(source, "audit", "as it is")
    path = config("coin", service="front", more="deterministic = false")
    run(
        [BIN / "saf", "forward", "--config", path],
        env={"PYTHONPATH": str(ROOT), "SAF_FAILPOINT": "mom_commit:3"},
        timeout=180,
    )
    before = stored(mom)
    forward(path)
    assert stored(mom)[: len(before)] == before
    assert {service for service, _, _ in stored(mom)} == {"even", "odd", "audit"}
    assert 0 < len(stored(mom)) < 41
    assert source.execute("SELECT count(*) FROM saf.kept_result").fetchone() == (0,)


@pytest.mark.full
def test_a_dead_letter_of_either_kind_is_evaluated_again_when_it_is_retried(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    add_router(source, "front", "sql", "if(text = 'x', raise_error('told to'), 'audit')")
    send(source, "front", "x")
    send(source, "billing", "no number", "1")
    path = config("number")
    assert forward(path)["dead"] == 2
    add_router(source, "front", "sql", "'audit'")
    path.write_text(path.read_text().replace(":number", ":masked"))
    decide.retry(source, DeadLetters(), "both are mended")
    forward(path)
    assert sorted(bodies(mom)) == ["2", "no number", "x"]
    assert dead(source) == {}


@pytest.mark.full
def test_a_deep_backlog_with_both_is_evaluated_some_at_a_time_in_order(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "DEEP", 1)
    monkeypatch.setattr(broker, "LITTLE", 0)
    monkeypatch.setattr(broker, "SAMPLE", 64)
    monkeypatch.setattr(transforms, "AT_ONCE", 30)
    add_router(source, "front", "sql", "'audit'")
    source.execute(MIXED, [1, 120])
    path = config("number")
    path.write_text(path.read_text().replace("chunk_rows = 7", "chunk_rows = 7\ntasks = 1"))
    assert forward(path)["cycles"] > 2
    assert by_key(mom) == expected(120)


@pytest.mark.full
def test_routers_of_all_kinds_follow_each_other_beside_a_transform(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    add_route(source, "mom", service="c")
    add_router(source, "a", "sql", "'b'")
    add_router(source, "b", "python", "tests.classifiers:by_text")
    add_router(source, "second", "sql", "concat('c', substring(text, 7))")
    send(source, "a", "second", "c")
    send(source, "billing", "1")
    forward(config("number"))
    assert stored(mom) == [("c", "k", "second"), ("c", "k", "c"), ("billing", "k", "2")]
