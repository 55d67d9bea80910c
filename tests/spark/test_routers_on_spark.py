"""Routers by ``saf forward`` on a real Spark: classifiers in SQL, Arrow and Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from saf.database import Dsn
from saf.operating import decide
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.setaside.selection import DeadLetters
from saf.setaside.waiting import parked
from tests.on_spark import forward
from tests.pipeline import connect, let_time_pass
from tests.programs import BIN, ROOT, configuration, run
from tests.routing import broker_id

pytestmark = pytest.mark.full

FILL = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'departures', 'k' || n %% 100,
       convert_to(json_build_object('n', n, 'origin', (ARRAY['EWR','JFK','LGA'])[1 + n %% 3])::text,
                  'UTF8')
FROM generate_series(%s::int, %s::int) AS n ORDER BY n
"""
AIRPORTS = ("ewr", "jfk", "lga")


@pytest.fixture
def stores(new_broker: Callable[[str], Dsn]) -> dict[str, Dsn]:
    return {name: new_broker(name) for name in AIRPORTS}


@pytest.fixture
def source(source: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """With a route for each airport."""
    for name in AIRPORTS:
        add_route(source, name, service=name.upper())
    return source


@pytest.fixture
def config(app: Dsn, stores: dict[str, Dsn], tmp_path: Path) -> Path:
    path = configuration(tmp_path / "saf.toml", {"app": app}, stores)
    lines = [one for one in path.read_text().splitlines() if "default_destination" not in one]
    path.write_text("\n".join([*lines, 'master = "local[2]"', "chunk_rows = 300", "attempts = 1"]))
    return path


def start(config: Path, code: int = 0, **env: str) -> dict[str, Any]:
    """What a run in a process of its own says of itself."""
    done = run(
        [BIN / "saf", "forward", "--config", config, "--json"],
        env={"PYTHONPATH": str(ROOT), **env},
        timeout=180,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout else {}


def stored(dsn: Dsn, columns: str = "body") -> list[Any]:
    with connect(dsn) as connection:
        rows = connection.execute(f"SELECT {columns} FROM saf.inbox ORDER BY id").fetchall()
    return [bytes(row[0]).decode() if columns == "body" else row for row in rows]


def numbers(dsn: Dsn) -> list[int]:
    return [json.loads(body)["n"] for body in stored(dsn)]


def in_order(some: list[int]) -> bool:
    of_keys = [[n for n in some if n % 100 == key] for key in range(100)]
    return all(of_key == sorted(of_key) for of_key in of_keys)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("sql", "get_json_object(text, '$.origin')"),
        ("python", "tests.classifiers:by_origin"),
    ],
)
def test_each_flight_arrives_at_its_airport_once_in_order_also_after_a_crash(
    source: psycopg.Connection[Any],
    stores: dict[str, Dsn],
    config: Path,
    kind: str,
    says: str,
) -> None:
    add_router(source, "departures", kind, says)
    source.execute(FILL, [1, 3000])
    run(
        [BIN / "saf", "forward", "--config", config],
        env={"PYTHONPATH": str(ROOT), "SAF_FAILPOINT": "mom_commit:2"},
    )
    source.execute("DELETE FROM saf.router")
    forward(config)
    for place, name in enumerate(AIRPORTS):
        assert sorted(numbers(stores[name])) == [n for n in range(1, 3001) if n % 3 == place]
        assert in_order(numbers(stores[name]))
        assert set(stored(stores[name], "to_service")) == {(name.upper(),)}


def test_an_expression_may_fail_for_one_message_and_look_at_all_columns(
    source: psycopg.Connection[Any], stores: dict[str, Dsn], config: Path
) -> None:
    raises = "CASE WHEN text = 'fail' THEN raise_error('told to fail') ELSE upper(text) END"
    add_router(source, "departures", "sql", raises)
    by_header = (
        "named_struct('service', get_json_object(headers, '$.airport'), 'broker', to_broker, "
        "'key', concat(key, '-', year(created_at)))"
    )
    add_router(source, "arrivals", "sql", by_header)
    brokers = {name.upper(): broker_id(dsn) for name, dsn in stores.items()}
    for text in ("ewr", "fail", "jfk", "nowhere", "lga"):
        source.execute(
            "INSERT INTO saf.outbox (to_service, body) VALUES ('departures', %s)", [text.encode()]
        )
    for airport in ("EWR", None, "JFK"):
        source.execute(
            "INSERT INTO saf.outbox (to_service, to_broker, key, headers, body, created_at) "
            "VALUES ('arrivals', %s, 'k', %s, 'x', '2031-01-01 12:00Z')",
            [brokers[airport or "LGA"], json.dumps({"airport": airport})],
        )
    forward(config)
    everything = "to_service, to_broker, key"
    arrived = [(name, brokers[name], "k-2031") for name in ("EWR", "JFK")]
    assert stored(stores["ewr"], everything) == [("EWR", None, None), arrived[0]]
    assert stored(stores["jfk"], everything) == [("JFK", None, None), arrived[1]]
    assert len(stored(stores["lga"])) == 1
    errors = [(one.service, one.reason, one.error) for one in DeadLetters().rows(source)]
    assert errors == [
        (
            "departures",
            "unresolved",
            "router 'departures': its expression raises an error: "
            "[USER_RAISED_EXCEPTION] told to fail SQLSTATE: P0001",
        ),
        (
            "departures",
            "unresolved",
            "router 'departures': it names 'NOWHERE', which no route leads to",
        ),
        ("arrivals", "unresolved", "router 'arrivals': its classifier returns no service"),
    ]


def test_routers_of_all_kinds_follow_each_other(
    source: psycopg.Connection[Any], stores: dict[str, Dsn], config: Path
) -> None:
    add_router(source, "a", "sql", "'b'")
    add_router(source, "b", "python", "tests.classifiers:by_text")
    add_router(source, "c", "sql", "CASE WHEN key = 'loop' THEN 'a' ELSE 'EWR' END")
    for key in ("x", "loop"):
        source.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('a', %s, 'c')", [key]
        )
    forward(config)
    assert stored(stores["ewr"], "to_service, key") == [("EWR", "x")]
    (letter,) = DeadLetters().rows(source)
    assert letter.error == "router 'a': a loop of routers: a -> b -> c -> a"


def test_an_expression_that_spark_does_not_understand_makes_its_messages_wait(
    app: Dsn, source: psycopg.Connection[Any], stores: dict[str, Dsn], config: Path
) -> None:
    add_router(source, "departures", "sql", "get_json_objekt(text, '$.origin')")
    add_router(source, "windows", "sql", "cast(row_number() OVER (ORDER BY key) AS STRING)")
    source.execute(FILL, [1, 300])
    send = "INSERT INTO saf.outbox (to_service, body) VALUES (%s, %s)"
    source.execute(send, ["windows", b"x"])
    source.execute(send, ["EWR", b'{"n": 0}'])
    said = forward(config)
    assert numbers(stores["ewr"]) == [0]
    waits = {lane["lane"]: lane["error"] for lane in said["waiting"]}
    assert "get_json_objekt" in waits["route for service 'departures'"]
    assert (
        "WindowExpression, which does not look at one row" in waits["route for service 'windows'"]
    )

    add_router(source, "departures", "sql", "json:origin")
    add_router(source, "windows", "sql", "'JFK'")
    source.execute(FILL, [301, 600])
    let_time_pass(app)
    forward(config)
    assert parked(source).lanes == 0
    for place, name in enumerate(AIRPORTS):
        flights = [n for n in (json.loads(b)["n"] for b in stored(stores[name]) if b != "x") if n]
        assert sorted(flights) == [n for n in range(1, 601) if n % 3 == place]
        assert in_order(flights)


def test_a_dead_letter_that_is_retried_is_asked_about_again(
    source: psycopg.Connection[Any], stores: dict[str, Dsn], config: Path
) -> None:
    add_router(source, "departures", "sql", "text", once_per="key")
    source.execute(
        "INSERT INTO saf.outbox (to_service, key, body) VALUES ('departures', 'k', 'SFO')"
    )
    forward(config)
    assert len(DeadLetters().rows(source)) == 1
    add_route(source, "ewr", service="SFO")
    decide.retry(source, DeadLetters(), "there is a route now")
    forward(config)
    assert stored(stores["ewr"], "to_service, key") == [("SFO", "k")]
    assert DeadLetters().rows(source) == []


def test_a_module_that_only_the_driver_has_ends_the_run_by_name_and_loses_nothing(
    source: psycopg.Connection[Any], stores: dict[str, Dsn], config: Path, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text(
        "import sys\n"
        "if 'pyspark.daemon' in sys.modules: raise ImportError('this is an executor')\n"
        "def classify(message): return 'EWR'\n"
    )
    add_router(source, "departures", "python", "only_here:classify")
    source.execute(FILL, [1, 10])
    said = start(config, 2, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert "only_here:classify" in str(said["problems"])
    assert DeadLetters().rows(source) == []
    (tmp_path / "only_here.py").write_text("def classify(message): return 'EWR'\n")
    start(config, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert len(numbers(stores["ewr"])) == 10
