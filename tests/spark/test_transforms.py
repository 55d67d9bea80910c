"""Transforms by a forwarder on a real Spark: what becomes of messages on their way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import psycopg
import pytest

from saf.database import Dsn
from saf.forwarding import broker
from saf.routing.routers import add_router
from saf.routing.routes import add_route, add_topic
from saf.setaside.dropped import dropped
from saf.setaside.waiting import parked
from saf.spark import evaluation, plans, transforms
from saf.spark.transforms import SEEN
from tests import on_spark
from tests.destinations import NOWHERE
from tests.on_spark import forward
from tests.pipeline import bodies, connect, let_time_pass
from tests.programs import BIN, ROOT, configuration, last_json, run, saf
from tests.tiers import sized

SEND = """
INSERT INTO saf.outbox (to_service, key, headers, body) VALUES (%s, %s, '{"a": 1}', %s)
RETURNING message_id
"""
REFUSE = "ALTER TABLE saf.inbox ADD CONSTRAINT nothing CHECK (body = '')"
ALLOW = "ALTER TABLE saf.inbox DROP CONSTRAINT nothing"

Config = Callable[..., Path]


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Config:
    def write(*functions: str, service: str = "billing", **more: Dsn) -> Path:
        path = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom, **more}, attempts=1)
        for function in functions:
            table = f'[[transforms]]\nservice = "{service}"\nfunction = "{function}"\n'
            path.write_text(f"{path.read_text()}\n{table}")
        return path

    return write


def send(source: psycopg.Connection[Any], *texts: str, service: str = "billing") -> list[UUID]:
    found = []
    for text in texts:
        row = source.execute(SEND, [service, "k", text.encode()]).fetchone()
        assert row is not None
        found.append(row[0])
    return found


def stored(mom: Dsn, columns: str) -> list[Any]:
    with connect(mom) as connection:
        return connection.execute(f"SELECT {columns} FROM saf.inbox ORDER BY id").fetchall()


def dead(source: psycopg.Connection[Any]) -> list[tuple[bytes, str]]:
    rows = source.execute("SELECT body, error FROM saf.dead_letter ORDER BY id").fetchall()
    return [(bytes(body), error) for body, error in rows]


def kept(source: psycopg.Connection[Any]) -> int:
    row = source.execute("SELECT count(*) FROM saf.kept_result").fetchone()
    assert row is not None
    return int(row[0])


def made_of(source: psycopg.Connection[Any]) -> list[str]:
    """The bodies that are kept, in the order of the messages."""
    rows = source.execute("SELECT convert_from(body, 'UTF8') FROM saf.kept_result ORDER BY id")
    return [body for (body,) in rows]


def purge(config: Path) -> int:
    """How many kept results a purge has removed."""
    done = saf("purge", "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    (of_app,) = json.loads(done.stdout)["brokers"]
    return int(of_app["kept_results"])


def waits(source: psycopg.Connection[Any]) -> dict[str, str]:
    """For each lane that waits, by the service that it is about, why."""
    return {lane.subject: lane.error for lane in parked(source).shown}


@pytest.mark.full
def test_a_masked_body_is_all_that_arrives_and_the_rest_stays_as_it_was(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    (card,) = send(source, '{"card":"4111222233334444"}')
    (other,) = send(source, '{"card":"4111222233334444"}', service="audit")
    forward(config("tests.transforms:masked"))
    assert stored(mom, "message_id, to_service, key, headers, convert_from(body, 'UTF8')") == [
        (card, "billing", "k", {"a": 1}, '{"card":"4111…"}'),
        (other, "audit", "k", {"a": 1}, '{"card":"4111222233334444"}'),
    ]


@pytest.mark.full
def test_a_join_with_a_table_enriches_and_may_give_key_and_headers(
    source: psycopg.Connection[Any],
    mom: Dsn,
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spark = on_spark.spark()
    table = spark.createDataFrame([("c1", "Ada"), ("c2", "Grace")], "customer string, name string")
    table.write.parquet(str(tmp_path / "customers"))
    monkeypatch.setenv("CUSTOMERS", str(tmp_path / "customers"))
    send(source, '{"customer":"c2"}', '{"customer":"c1"}', '{"customer":"c3"}')
    forward(config("tests.transforms:enriched"))
    assert stored(mom, "key, headers, convert_from(body, 'UTF8')::jsonb") == [
        ("c2", {"from": "a join"}, {"customer": "c2", "name": "Grace"}),
        ("c1", {"from": "a join"}, {"customer": "c1", "name": "Ada"}),
        ("c3", {"from": "a join"}, {"customer": "c3"}),
    ]


@pytest.mark.full
def test_what_a_transform_leaves_out_is_counted_and_not_sent_again(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    send(source, *map(str, range(10)))
    send(source, "all", "of them", service="audit")
    path = config("tests.transforms:even")
    said = forward(path)
    assert bodies(mom) == ["0", "2", "4", "6", "8", "all", "of them"]
    assert (said["forwarded"], said["left_out"], said["dead"]) == (7, 5, 0)
    path.write_text(path.read_text().replace(":even", ":nothing"))
    send(source, "11", "12")
    assert forward(path)["left_out"] == 2
    assert (forward(path)["left_out"], len(bodies(mom))) == (0, 7)
    (counted,) = dropped(source)
    assert (counted.subscription, counted.reason, counted.messages) == ("forwarder", "left_out", 7)
    (compared,) = last_json(saf("reconcile", "--config", path, "--json").stdout)["brokers"]
    assert (compared["lost"], compared["left_out"]) == (7, 7)
    shown = saf("reconcile", "--config", path).stdout
    assert "lost includes 7 messages left out by transforms so far\n" in shown


@pytest.mark.full
def test_parts_of_a_message_are_in_their_order_with_ids_that_follow_from_its_own(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    sent = send(source, "a\nb\nc", "d", "e\nf")
    path = config("tests.transforms:split")
    path.write_text(path.read_text().replace("attempts = 1", "attempts = 1\nchunk_rows = 2"))
    forward(path)
    assert stored(mom, "message_id, convert_from(body, 'UTF8')") == [
        (sent[0], "a"),
        (uuid5(sent[0], "1"), "b"),
        (uuid5(sent[0], "2"), "c"),
        (sent[1], "d"),
        (sent[2], "e"),
        (uuid5(sent[2], "1"), "f"),
    ]


@pytest.mark.full
def test_a_batch_that_is_read_again_after_a_crash_gives_the_same_once(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    """The driver dies between two chunks' commits, with splits on both sides."""
    sent = send(source, *(f"{n}\n{n}" for n in range(40)))
    path = config("tests.transforms:split")
    path.write_text(path.read_text().replace("attempts = 1", "attempts = 1\nchunk_rows = 7"))
    run(
        [BIN / "saf", "forward", "--config", path],
        env={"PYTHONPATH": str(ROOT), "SAF_FAILPOINT": "mom_commit:2"},
        timeout=180,
    )
    assert 0 < len(bodies(mom)) < 80
    forward(path)
    assert stored(mom, "message_id") == [(id_,) for one in sent for id_ in (one, uuid5(one, "1"))]


@pytest.mark.parametrize(
    "point", ["mom_commit:4", "transformed:2", "mom_commit", "mark_commit:2"][: sized(1, 4)]
)
def test_what_is_not_deterministic_is_the_same_everywhere_although_a_batch_is_read_again(
    source: psycopg.Connection[Any], mom: Dsn, other: Dsn, config: Config, point: str
) -> None:
    """Workers die between the writing of results and the storing at either of two destinations."""
    add_topic(source, "billing")
    add_route(source, "mom", service="billing")
    add_route(source, "other", service="billing")
    send(source, *map(str, range(40)))
    path = config("tests.transforms:coin", other=other)
    by_chance(path, chunk_rows=7)
    done = run(
        [BIN / "saf", "forward", "--config", path],
        env={"PYTHONPATH": str(ROOT), "SAF_FAILPOINT": point},
        timeout=180,
    )
    assert done.returncode != 0, "its workers were killed"
    before = bodies(mom)
    assert kept(source) > 0
    forward(path)
    columns = "message_id, key, convert_from(body, 'UTF8')"
    assert stored(mom, columns) == stored(other, columns)
    assert bodies(mom)[: len(before)] == before
    assert 0 < len(bodies(mom)) < 40
    assert kept(source) == 0, "its batch is closed"


def test_what_is_not_deterministic_is_the_same_when_a_destination_is_back(
    source: psycopg.Connection[Any], app: Dsn, mom: Dsn, other: Dsn, config: Config
) -> None:
    add_topic(source, "billing")
    add_route(source, "mom", service="billing")
    add_route(source, "other", service="billing")
    path = config("tests.transforms:coin", other=other)
    by_chance(path)
    up = path.read_text()
    down = f'dsn = "{Dsn(f"{other} port=1 connect_timeout=2")}"'
    path.write_text(up.replace(f'dsn = "{other.conninfo}"', down))
    send(source, *map(str, range(20)))
    forward(path, 75)
    assert kept(source) == 20
    assert 0 < len(bodies(mom)) < 20
    path.write_text(up)
    let_time_pass(app)
    forward(path)
    assert bodies(other) == bodies(mom)
    assert kept(source) == 0, "a purge has removed it"


def test_a_dead_letter_is_retried_with_what_was_kept_of_it_which_goes_when_the_dead_letter_has_gone(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    path = config("tests.transforms:drawn")
    by_chance(path)
    with connect(mom) as store:
        store.execute(REFUSE)
        sent = send(source, "1", "2", "3", "4")
        forward(path)
        assert [body for body, _ in dead(source)] == [b"1", b"2", b"3", b"4"], "as they were sent"
        made = made_of(source)
        forward(path)
        purge(path)
        assert (len(made), made_of(source)) == (4, made)
        ((first,),) = source.execute("SELECT min(dead_letter_id) FROM saf.dead_letter").fetchall()
        assert (
            saf(
                "dead", "discard", str(first), "--yes", "--broker", "app", "--config", path
            ).returncode
            == 0
        )
        assert purge(path) == 1
        assert made_of(source) == made[1:]
        store.execute(ALLOW)
    assert saf("dead", "retry", "--all", "--config", path).returncode == 0
    assert purge(path) == 0, "it is parked now"
    forward(path)
    assert (
        stored(mom, "message_id, convert_from(body, 'UTF8')") == [*zip(sent, made, strict=True)][1:]
    )
    assert (dead(source), kept(source)) == ([], 0)


def by_chance(path: Path, chunk_rows: int = 1000) -> None:
    text = path.read_text().replace("attempts = 1", f"attempts = 1\nchunk_rows = {chunk_rows}")
    path.write_text(f"{text}deterministic = false\n")


@pytest.mark.full
def test_a_message_that_a_transform_fails_on_is_a_dead_letter_and_its_neighbours_go_on(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    send(source, "1", "2", "no number", "4")
    said = forward(config("tests.transforms:number"))
    assert (bodies(mom), said["dead"], said["parked"]) == (["2", "3", "5"], 1, 0)
    ((body, error),) = dead(source)
    assert body == b"no number"
    assert "transform of 'billing': its function raises" in error
    assert "CAST_INVALID_INPUT" in error


@pytest.mark.full
def test_several_messages_of_one_have_numbers_or_it_is_a_dead_letter(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    send(source, "a\nb", "c")
    forward(config("tests.transforms:unnumbered"))
    assert bodies(mom) == ["c"]
    ((body, error),) = dead(source)
    assert body == b"a\nb"
    assert "in a column part" in error


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("raises", "raises ValueError: no such table"),
        ("no_id", "gives no column id, only body"),
        ("two_ids", "is ambiguous"),
        ("drawn", "a random number"),
        ("dated", "asks for the time"),
        ("nowhere", "cannot load"),
    ],
)
def test_where_the_function_itself_is_at_fault_its_service_waits_and_others_go_on(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, function: str, why: str
) -> None:
    send(source, "1")
    send(source, "2", service="audit")
    said = forward(config(f"tests.transforms:{function}"))
    assert (bodies(mom), said["parked"], said["dead"]) == (["2"], 1, 0)
    ((service, error),) = waits(source).items()
    assert service == "billing"
    assert why in error


@pytest.mark.full
def test_what_has_waited_for_its_transform_goes_on_in_order_when_that_is_mended(
    source: psycopg.Connection[Any],
    app: Dsn,
    mom: Dsn,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = config("tests.transforms:told")
    send(source, "1", "no number", "2")
    assert forward(path)["parked"] == 3
    send(source, "3")
    forward(path)
    assert bodies(mom) == []
    monkeypatch.setenv("TOLD", "yes")
    let_time_pass(app)
    send(source, "4")
    forward(path)
    let_time_pass(app)
    forward(path)
    assert bodies(mom) == ["2", "3", "4", "5"]
    assert [body for body, _ in dead(source)] == [b"no number"]


@pytest.mark.full
def test_a_function_that_fails_for_many_messages_parks_its_service(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "MOST", 1)
    send(source, "1", "two", "three")
    said = forward(config("tests.transforms:number"))
    assert (bodies(mom), said["parked"], said["dead"]) == ([], 3, 0)
    assert "fails for more than 1 messages" in waits(source)["billing"]


@pytest.mark.full
def test_parked_messages_are_transformed_when_their_destination_is_back(
    source: psycopg.Connection[Any], app: Dsn, mom: Dsn, other: Dsn, config: Config
) -> None:
    add_route(source, "mom", service="billing")
    add_route(source, "other", service="audit")
    down = Dsn(f"{mom} port=1 connect_timeout=2")
    path = config("tests.transforms:split", other=other)
    up = path.read_text()
    path.write_text(up.replace(f'dsn = "{mom.conninfo}"', f'dsn = "{down}"'))
    assert path.read_text() != up
    send(source, "a\nb")
    send(source, "c", service="audit")
    forward(path, 75)
    assert (bodies(mom), bodies(other)) == ([], ["c"])
    path.write_text(up)
    let_time_pass(app)
    send(source, "d\ne")
    forward(path)
    assert bodies(mom) == ["a", "b", "d", "e"]
    assert waits(source) == {}


ROUTERS = [
    ("python", "tests.transforms:to_audit"),
    ("sql", "if(split(text, '\n')[0] = 'else', 'else', 'audit')"),
]


@pytest.mark.full
@pytest.mark.parametrize("says", [("python", "tests.classifiers:to_billing"), ("sql", "'billing'")])
def test_what_comes_by_a_router_to_a_service_with_a_transform_waits_and_is_not_sent_as_it_is(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, says: tuple[str, str]
) -> None:
    add_router(source, "front", *says)
    send(source, "1", service="front")
    send(source, "2")
    forward(config("tests.transforms:even"))
    assert bodies(mom) == ["2"]
    why = "router 'front' leads to 'billing', whose messages are transformed"
    assert why in waits(source)["front"]


@pytest.mark.full
@pytest.mark.parametrize("says", ROUTERS)
def test_what_is_sent_to_a_router_with_a_transform_is_classified_as_sent_and_arrives_transformed(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, says: tuple[str, str]
) -> None:
    add_router(source, "front", *says)
    (sent,) = send(source, "audit\nb", service="front")
    send(source, "c\nd", service="audit")
    forward(config("tests.transforms:split", service="front"))
    assert stored(mom, "message_id, to_service, convert_from(body, 'UTF8')")[:2] == [
        (sent, "audit", "audit"),
        (uuid5(sent, "1"), "audit", "b"),
    ]
    assert bodies(mom)[2:] == ["c\nd"]
    assert kept(source) == 0


@pytest.mark.full
@pytest.mark.parametrize("says", ROUTERS)
@pytest.mark.parametrize("purged", [False, True])
def test_what_a_router_has_led_on_and_is_parked_is_transformed_also_after_the_outbox_lost_it(
    source: psycopg.Connection[Any],
    app: Dsn,
    mom: Dsn,
    config: Config,
    *,
    says: tuple[str, str],
    purged: bool,
) -> None:
    add_router(source, "front", *says)
    add_route(source, "mom", service="audit")
    add_route(source, "other", service="else")
    path = config("tests.transforms:split", service="front", other=NOWHERE)
    up = path.read_text()
    without = up.replace('"front"', '"nobody"')
    down = f'dsn = "{Dsn(f"{mom} port=1 connect_timeout=2")}"'
    path.write_text((up if purged else without).replace(f'dsn = "{mom.conninfo}"', down))
    send(source, "audit\nb", service="front")
    forward(path, 75)
    if purged:
        source.execute("TRUNCATE saf.outbox")
    let_time_pass(app)
    path.write_text(up)
    forward(path)
    assert bodies(mom) == ["audit", "b"]
    assert kept(source) == 0, "a purge has removed it"


@pytest.mark.full
@pytest.mark.parametrize("says", ROUTERS)
def test_what_has_waited_for_the_transform_of_its_router_is_led_on_when_that_is_mended(
    source: psycopg.Connection[Any],
    app: Dsn,
    mom: Dsn,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    says: tuple[str, str],
) -> None:
    add_router(source, "front", *says)
    path = config("tests.transforms:told", service="front")
    send(source, "1", "no number", "2", service="front")
    assert forward(path)["parked"] == 3
    assert "not told yet" in waits(source)["front"]
    monkeypatch.setenv("TOLD", "yes")
    let_time_pass(app)
    forward(path)
    assert bodies(mom) == ["2", "3"]
    assert [body for body, _ in dead(source)] == [b"no number"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("function", "columns", "ordered"),
    [
        ("masked", {"id", "body"}, True),
        ("split", {"id", "body"}, True),
        ("told_of", {"id", "message_type", "headers", "body"}, True),
        ("in_twos", {"id", "key", "body"}, False),
        ("turned", {"id", "key", "body"}, False),
    ],
)
def test_no_more_columns_are_read_than_a_function_needs_and_what_loses_the_order_is_sorted(
    source: psycopg.Connection[Any],
    mom: Dsn,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    function: str,
    columns: set[str],
    ordered: bool,
) -> None:
    seen: list[tuple[frozenset[str], bool]] = []

    def asked(frame: Any) -> frozenset[str] | None:
        read = plans.columns_read(frame)
        seen.append((frozenset(SEEN) if read is None else read | {"id"}, plans.keeps_order(frame)))
        return read

    monkeypatch.setattr(transforms, "columns_read", asked)
    for n in range(30):
        send(source, str(n))
    path = config(f"tests.transforms:{function}")
    path.write_text(path.read_text().replace("attempts = 1", "attempts = 1\nchunk_rows = 7"))
    forward(path)
    assert {one for one, _ in seen} == {frozenset(columns)}
    assert {one for _, one in seen} == {ordered}
    how = {"told_of": "1 {}", "in_twos": "k{}"}.get(function, "{}")
    assert bodies(mom) == [how.format(n) for n in range(30)]


@pytest.mark.full
def test_a_deep_backlog_is_transformed_some_at_a_time_in_order(
    source: psycopg.Connection[Any], mom: Dsn, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "DEEP", 1)
    monkeypatch.setattr(broker, "LITTLE", 0)
    monkeypatch.setattr(broker, "SAMPLE", 64)
    monkeypatch.setattr(transforms, "AT_ONCE", 6)
    for n in range(20):
        send(source, str(n), service="audit" if n % 5 == 0 else "billing")
    path = config("tests.transforms:even")
    path.write_text(path.read_text().replace("attempts = 1", "attempts = 1\ntasks = 1"))
    said = forward(path)
    expected = [str(n) for n in range(20) if n % 5 == 0 or n % 2 == 0]
    assert (bodies(mom), said["left_out"]) == (expected, 20 - len(expected))
    assert said["cycles"] > 2


@pytest.mark.full
def test_each_destination_of_a_topic_gets_what_the_transform_made(
    source: psycopg.Connection[Any], mom: Dsn, other: Dsn, config: Config
) -> None:
    add_topic(source, "billing")
    add_route(source, "mom", service="billing")
    add_route(source, "other", service="billing")
    send(source, "1", "2", "4")
    said = forward(config("tests.transforms:even", other=other))
    assert (bodies(mom), bodies(other), said["left_out"]) == (["2", "4"], ["2", "4"], 2)


@pytest.mark.full
def test_without_a_spark_of_its_own_a_forwarder_lets_such_messages_wait(
    source: psycopg.Connection[Any], mom: Dsn, config: Config
) -> None:
    from saf.config import load
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import InProcess

    send(source, "1")
    send(source, "2", service="audit")
    Forwarder(load(config("tests.transforms:even")), InProcess()).drain()
    assert bodies(mom) == ["2"]
    assert "its transform needs a Spark" in waits(source)["billing"]
