"""Many sources in one run: fair to all, each failing alone, within the limits of connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from saf.broker.embedded import EmbeddedServer
from saf.config import Settings, load
from saf.database import Dsn
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.summary import Summary
from saf.spark.runner import SparkRunner
from tests import on_spark
from tests.pipeline import Cycle, bodies, connect, forwarding_rules
from tests.programs import configuration, received, send
from tests.waits import until

GIANT = 1_000_000
NewBroker = Callable[[str], Dsn]


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return on_spark.spark()


def settings(
    folder: Path, brokers: Mapping[str, Dsn], mom: Dsn, more: str = "", **options: object
) -> Settings:
    file = configuration(folder / "saf.toml", brokers, {"mom": mom}, **options)
    file.write_text(more + file.read_text())
    return load(file)


def drained(spark: SparkSession, chosen: Settings) -> Summary:
    return Forwarder(chosen, SparkRunner(lambda: spark)).drain()


def test_each_item_of_work_is_a_task_of_its_own(
    spark: SparkSession, app: Dsn, mom: Dsn, new_broker: NewBroker
) -> None:
    """What fails in one, or takes long, holds up nobody else's."""
    work = []
    for dsn in (app, new_broker("two"), new_broker("three")):
        send(dsn, 3)
        with Cycle(dsn, forwarding_rules(mom=mom)) as cycle:
            work += cycle.open()
    runner = SparkRunner(lambda: spark)
    runner.start(work)
    runner.run(work, forwarding_rules(mom=mom), "of its own")
    (job,) = spark.sparkContext.statusTracker().getJobIdsForGroup("of its own")
    info = spark.sparkContext.statusTracker().getJobInfo(job)
    assert info is not None
    (stage,) = map(spark.sparkContext.statusTracker().getStageInfo, info.stageIds)
    assert stage is not None
    assert stage.numTasks == len(work) == 3


@contextmanager
def looping(spark: SparkSession, chosen: Settings) -> Iterator[list[Summary]]:
    """A forwarder in a loop; its summaries."""
    forwarder = Forwarder(chosen, SparkRunner(lambda: spark))
    summaries: list[Summary] = []
    thread = threading.Thread(target=forwarder.loop, args=[summaries.append])
    thread.start()
    try:
        yield summaries
    finally:
        forwarder.stop()
        thread.join()


@contextmanager
def most_connections(server: EmbeddedServer) -> Iterator[Counter[tuple[str, str]]]:
    """By (database, application): how many connections there were at once; "" is all of them."""
    most: Counter[tuple[str, str]] = Counter()
    done = threading.Event()

    def watch() -> None:
        with server.dsn("postgres").connect(role="test", autocommit=True) as connection:
            while not done.wait(0.01):
                rows = connection.execute(
                    "SELECT datname, application_name, count(*) FROM pg_stat_activity "
                    "WHERE application_name LIKE 'saf %' GROUP BY 1, 2"
                ).fetchall()
                for database, application, count in rows:
                    key = (database, application.removeprefix("saf "))
                    most[key] = max(most[key], count)
                for where in {database for database, _, _ in rows}:
                    at_once = sum(count for database, _, count in rows if database == where)
                    most[where, ""] = max(most[where, ""], at_once)
                total = sum(count for _, application, count in rows if application == "saf forward")
                most["", "forward"] = max(most["", "forward"], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def arrived(mom: Dsn, what: str) -> int:
    with connect(mom) as connection:
        row = connection.execute(
            "SELECT count(*) FROM saf.inbox WHERE starts_with(convert_from(body, 'UTF8'), %s)",
            [what],
        ).fetchone()
    assert row is not None
    return int(row[0])


def _has_arrived(mom: Dsn, what: str, count: int) -> bool:
    return arrived(mom, what) == count


def in_order(mom: Dsn, what: str) -> bool:
    """Whether the messages of each key have arrived once and in their order."""
    by_key: dict[str, list[int]] = {}
    for key, body in received(mom):
        if body.startswith(what):
            by_key.setdefault(key, []).append(int(body.split()[1]))
    return all(numbers == sorted(set(numbers)) and len(numbers) for numbers in by_key.values())


@pytest.mark.full
def test_in_one_run_nobody_waits_for_a_giant(
    new_broker: NewBroker, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    brokers = {"giant": new_broker("giant")} | {f"t{n}": new_broker("tenant") for n in range(9)}
    send(brokers["giant"], GIANT, "giant")
    for name in [name for name in brokers if name != "giant"]:
        send(brokers[name], 100, name)
    summary = drained(spark, settings(tmp_path, brokers, mom, turn_seconds=0.2))
    assert (summary.forwarded, summary.exit_code) == (GIANT + 900, 0)
    arrival = [body.split()[0] for body in bodies(mom)]
    first_half = arrival[: GIANT // 2]
    assert Counter(first_half)["giant"] < len(first_half), "tenants are among the first"
    assert sum(first_half.count(f"t{n}") for n in range(9)) == 900
    assert in_order(mom, "giant")


@pytest.mark.full
@pytest.mark.full
def test_in_a_loop_what_comes_later_does_not_wait_for_a_giant_either(
    new_broker: NewBroker, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    brokers = {"giant": new_broker("giant"), "small": new_broker("tenant")}
    send(brokers["giant"], GIANT, "giant")
    chosen = settings(
        tmp_path, brokers, mom, turn_seconds=0.2, chunk_rows=2000, interval_seconds=0.1
    )
    with looping(spark, chosen) as summaries:
        until(lambda: arrived(mom, "giant") > 0)
        send(brokers["small"], 20, "small")
        until(lambda: arrived(mom, "small") == 20)
        so_far = arrived(mom, "giant")
        until(lambda: arrived(mom, "giant") == GIANT)
    assert so_far < GIANT, "the giant was still at it"
    assert in_order(mom, "giant")
    assert in_order(mom, "small")
    assert not any(summary.problems or summary.dropped for summary in summaries)
    with connect(brokers["giant"]) as connection:
        assert connection.execute("SELECT count(*) FROM saf.member").fetchone() == (0,)


@pytest.mark.full
def test_a_giant_that_nobody_waits_for_is_not_interrupted(
    new_broker: NewBroker, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    brokers = {"giant": new_broker("giant"), "small": new_broker("tenant")}
    send(brokers["giant"], GIANT // 2, "giant")
    summary = drained(spark, settings(tmp_path, brokers, mom, turn_seconds=0.1))
    assert summary.forwarded == GIANT // 2
    assert summary.cycles == 1


@pytest.mark.full
def test_each_broken_source_is_named_with_its_cure_and_the_others_go_on(
    new_broker: NewBroker, new_database: NewBroker, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    well = {f"well{n}": new_broker("well") for n in range(3)}
    for number, dsn in enumerate(well.values()):
        send(dsn, 10_000, f"well{number}")
    broken = {
        "gone": Dsn("host=/nonexistent dbname=x"),
        "refused": Dsn(f"{mom.conninfo} user=nobody_knows"),
    }
    chosen = settings(tmp_path, broken | well, mom, chunk_rows=1000, turn_seconds=0.1)
    summary = drained(spark, chosen)
    kinds = {"gone": "Unavailable", "refused": "Refused"}
    assert {p["broker"]: p["kind"] for p in summary.problems} == kinds
    assert summary.exit_code == 2
    assert summary.forwarded == len(bodies(mom)) == 30_000
    bare = {"bare": new_database("bare")}
    summary = drained(spark, settings(tmp_path, bare | well, mom))
    ((problem),) = summary.problems
    assert problem["kind"] == "SchemaMissing"
    assert "run `saf migrate --dsn" in problem["error"]
    assert summary.exit_code == 2


@pytest.mark.full
def test_sources_that_hang_are_waited_for_together_and_hold_up_nobody(
    new_broker: NewBroker, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    well = new_broker("well")
    send(well, 100, "well")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1]
        dead = Dsn(f"host=127.0.0.1 port={port} dbname=x connect_timeout=10")
        brokers = {f"dead{n}": dead for n in range(20)} | {"well": well}
        chosen = settings(tmp_path, brokers, mom)
        started = time.monotonic()
        came: list[float] = []

        def watch() -> None:
            until(lambda: arrived(mom, "well") == 100)
            came.append(time.monotonic() - started)

        watching = threading.Thread(target=watch)
        watching.start()
        summary = drained(spark, chosen)
        seconds = time.monotonic() - started
        watching.join()
    assert len(summary.problems) == 20
    assert summary.exit_code == 75
    assert came[0] < 10, "before the first of them had given up"
    assert seconds < 3 * 10


@pytest.mark.full
def test_a_fleet_is_followed_by_a_running_loop(
    new_broker: NewBroker, app: Dsn, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    first, second = new_broker("tenant"), new_broker("tenant")
    with connect(app) as connection:
        connection.execute("CREATE TABLE tenant (name text, dsn text)")
        connection.execute("INSERT INTO tenant VALUES ('first', %s)", [first.conninfo])
        connection.execute("INSERT INTO tenant VALUES ('bad', 'nonsense')")
    file = tmp_path / "saf.toml"
    file.write_text(
        f"[fleets.tenants]\ndsn = {json.dumps(app.conninfo)}\n"
        'query = "SELECT name, dsn FROM tenant"\nrefresh_seconds = 0.2\n'
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        '[forwarder]\ndefault_destination = "mom"\ninterval_seconds = 0.1\n'
    )
    with looping(spark, load(file)) as summaries:
        send(first, 10, "first")
        until(lambda: arrived(mom, "first") == 10)
        with connect(app) as connection:
            connection.execute("INSERT INTO tenant VALUES ('second', %s)", [second.conninfo])
        send(second, 10, "second")
        until(lambda: arrived(mom, "second") == 10)
        with connect(app) as connection:
            connection.execute("DELETE FROM tenant WHERE name = 'first'")
        with connect(first) as connection:
            members = "SELECT count(*) = 0 FROM saf.member"
            until(lambda: connection.execute(members).fetchone() == (True,))
    problems = [problem for summary in summaries for problem in summary.problems]
    assert {problem["broker"] for problem in problems} == {"tenants"}
    assert "row 2" in problems[0]["error"]


@pytest.mark.full
def test_a_source_and_a_destination_have_no_more_connections_than_they_may(
    new_broker: NewBroker, server: EmbeddedServer, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    limited, free = new_broker("limited"), new_broker("free")
    for name, dsn in (("limited", limited), ("free", free)):
        send(dsn, 12_000, name)
    chosen = settings(tmp_path, {"limited": limited, "free": free}, mom, max_connections=4, tasks=4)
    with most_connections(server) as most:
        summary = drained(spark, chosen)
    assert summary.forwarded == 24_000
    assert most.pop((mom.database, "deliver")) == 2  # as many as Spark has slots
    assert {role for _, role in most} >= {"forward", "read", "mark"}
    assert most[limited.database, ""] <= 4

    for name, dsn in (("limited", limited), ("free", free)):
        send(dsn, 12_000, name)
    file = tmp_path / "saf.toml"
    text = file.read_text().replace("[forwarder]", "max_connections = 1\n[forwarder]")
    file.write_text(text)
    with most_connections(server) as most:
        assert drained(spark, load(file)).forwarded == 24_000
    assert most[mom.database, "deliver"] == 1


@pytest.mark.full
def test_a_loop_stays_connected_where_connections_are_not_counted(
    app: Dsn, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    for limit, kept in ((None, True), (4, False)):
        seen: set[int] = set()
        options: dict[str, Any] = {} if limit is None else {"max_connections": limit}
        chosen = settings(tmp_path, {"app": app}, mom, interval_seconds=0.1, **options)
        with looping(spark, chosen), connect(app) as connection:
            for number in range(4):
                what = f"{kept} {number}."
                send(app, 10, what)
                until(partial(_has_arrived, mom, what, 10))
                time.sleep(0.5)  # a task ends, and keeps, after its messages have arrived
                rows = connection.execute(
                    "SELECT pid FROM pg_stat_activity WHERE application_name = 'saf mark' "
                    "AND datname = %s",
                    [app.database],
                ).fetchall()
                seen |= {pid for (pid,) in rows}
        assert (1 <= len(seen) <= 2) if kept else not seen, "at most one for each worker"
        with connect(app) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE application_name = 'saf mark' AND datname = %s",
                [app.database],
            )


@pytest.mark.full
def test_more_sources_than_sessions_are_visited_in_turn_and_all_are_drained(
    new_broker: NewBroker, server: EmbeddedServer, mom: Dsn, tmp_path: Path, spark: SparkSession
) -> None:
    brokers = {f"t{n}": new_broker("tenant") for n in range(9)}
    for name in list(brokers)[:7]:
        send(brokers[name], 50, name)
    chosen = settings(tmp_path, brokers, mom, max_sessions=3)
    with most_connections(server) as most:
        summary = drained(spark, chosen)
    assert (summary.forwarded, summary.exit_code) == (350, 0)
    assert len(bodies(mom)) == 350
    # a session that was closed is still there for a moment
    assert 1 <= most["", "forward"] <= 2 * 3
    for name in list(brokers)[7:]:
        with connect(brokers[name]) as connection:
            row = connection.execute("SELECT max(epoch) FROM saf.cursor").fetchone()
            assert row == (0,), "who has nothing to forward is not written to"
