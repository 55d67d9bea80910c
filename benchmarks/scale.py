"""Many sources: what a cycle costs by their number, and what a giant costs the others.

    python -m benchmarks.scale [PART …]

Parts: ``poll`` (idle databases of one server, connected or in turn), ``tasks`` (databases with a
message each), ``plan`` (the planner alone, simulated up to 10,000 databases), ``giant`` (one with
half a million pending beside nine with little). docs/scale.md says what follows from the figures.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from pyspark.sql import SparkSession

from benchmarks.stage import FILL, READ_AGAIN, Stage, execute, median
from saf.config import Broker, Settings
from saf.config import Forwarder as Options
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.engine.work import Work
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.surveys import plan
from saf.log.cursor import Batch
from saf.routing.matching import Route, Routes
from saf.spark import session
from saf.spark.runner import SparkRunner

SOURCES = (50, 100, 200)
BUSY = (10, 30)
GIANT = 500_000
ROUNDS = 2
SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', 'k', 'x')"

# Small tables: what looks at the figures must not be one of them
THROUGH = "SELECT count(*) FROM saf.cursor WHERE open IS NULL AND done::text <> '1:1:'"
MARKS = """
SELECT count(*), sum(batch), sum(position) FROM saf.watermark WHERE source <> (
    SELECT source FROM saf.watermark GROUP BY source ORDER BY sum(position) DESC LIMIT 1)
"""


def settings(brokers: dict[str, Dsn], mom: Dsn, **options: object) -> Settings:
    return Settings.model_construct(
        brokers={name: Broker(dsn=dsn) for name, dsn in brokers.items()},
        destinations={"mom": Postgresql(dsn=mom)},
        forwarder=Options(default_destination="mom", **options),  # type: ignore[arg-type]
    )


def seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def no_spark() -> SparkSession:
    raise RuntimeError("there was something to do")


def poll(stage: Stage) -> None:
    """A cycle that finds nothing, per source: connected to all, and in turn."""
    for count in SOURCES:
        made = stage.tenants(count)
        for name, sessions in (("connected", 1000), ("in_turn", 10)):
            options = settings(made, stage.mom, max_sessions=sessions)
            forwarder = Forwarder(options, SparkRunner(no_spark))
            forwarder.roster.once = False
            first = seconds(forwarder.cycle)
            again = median(seconds(forwarder.cycle) for _ in range(5))
            forwarder.roster.leave()
            stage.note(f"poll_{name}_{count}_first_ms_per_source", 1000 * first / count, "ms")
            stage.note(f"poll_{name}_{count}_ms_per_source", 1000 * again / count, "ms")


def tasks(stage: Stage, spark: SparkSession) -> None:
    """A cycle in which so many sources have one message each."""
    made = stage.tenants(max(BUSY))
    for count in BUSY:
        some = dict(list(made.items())[:count])
        forwarder = Forwarder(settings(some, stage.mom), SparkRunner(lambda: spark))
        forwarder.roster.once = False
        taken = []
        for _ in range(ROUNDS + 1):
            for dsn in some.values():
                execute(dsn, SEND)
            taken.append(seconds(forwarder.cycle))
        forwarder.roster.leave()
        stage.note(f"cycle_{count}_busy_seconds", median(taken[1:]), "s")
        stage.note(f"cycle_{count}_busy_ms_per_source", 1000 * median(taken[1:]) / count, "ms")


def plan_alone(stage: Stage) -> None:
    """The planner and what Spark is sent, for 10,000 sources; nothing is connected."""
    for count in (100, 1_000, 10_000):
        work = [_work(number) for number in range(count)]
        taken = seconds(lambda work=work: plan(work, 400, limits={}, last_turn={}))  # type: ignore[misc]
        stage.note(f"plan_{count}_ms", 1000 * taken, "ms")
        sent = pickle.dumps([pickle.dumps(item) for item in work])
        stage.note(f"plan_{count}_sent_megabytes", len(sent) / 1e6, "MB")
        taken = seconds(lambda sent=sent: pickle.loads(sent))  # type: ignore[misc]  # noqa: S301
        stage.note(f"plan_{count}_unpickle_ms_per_task", 1000 * taken, "ms")


def _work(number: int) -> Work:
    batch = Batch(
        log="outbox",
        subscription_id=1,
        owner=UUID(int=number),
        number=7,
        done="1000:1000:",
        open="1200:1200:",
        position=0,
        route_version=1,
        opened_at=datetime(2026, 1, 1, tzinfo=UTC),
        epochs=tuple((shard, 3) for shard in range(64)),
    )
    return Work(
        broker=f"tenants/tenant_{number}",
        source=UUID(int=number),
        dsn=Dsn(
            f"host=db{number % 100}.example.com dbname=tenant_{number} "
            "user=saf_forwarder password=x"
        ),
        batch=batch,
        routes=Routes(routes=(Route(destination="mom"),)),
        much=number % 100 == 0,
    )


def giant(stage: Stage, spark: SparkSession) -> None:
    """The giant's throughput beside tenants, over alone; and how long a tenant's message takes."""
    stage.fill(GIANT)
    tenants = stage.tenants(9)
    for dsn in tenants.values():
        execute(dsn, "TRUNCATE saf.outbox", READ_AGAIN)
    both = {"app": stage.app, **tenants}
    for _ in range(2):  # until the JVM has compiled what is hot
        stage.rewind()
        Forwarder(settings(both, stage.mom), SparkRunner(lambda: spark)).drain()
    beside, in_loop, waits = [], [], []
    only = settings({"app": stage.app}, stage.mom, tasks=2)
    for _ in range(ROUNDS):
        stage.rewind()
        alone = _drain(spark, only, GIANT)
        for dsn in tenants.values():
            with dsn.connect(role="bench") as connection:
                connection.execute(FILL, [200, 100])
        stage.rewind()
        beside.append(alone / _drain(spark, settings(both, stage.mom), GIANT + 900))
        stage.rewind()
        undisturbed, _ = _in_loop(stage, spark, settings(both, stage.mom), {})
        stage.rewind()
        taken, waited = _in_loop(stage, spark, settings(both, stage.mom), tenants)
        in_loop.append(undisturbed / taken)
        waits += waited
    stage.note("giant_beside_nine_ratio", median(beside), "of alone")
    stage.note("giant_in_loop_ratio", median(in_loop), "of undisturbed", ">= 0.95")
    stage.note("small_wait_p50_seconds", median(waits), "s")
    stage.note("small_wait_max_seconds", max(waits), "s")


def _drain(spark: SparkSession, chosen: Settings, expected: int) -> float:
    started = time.monotonic()
    summary = Forwarder(chosen, SparkRunner(lambda: spark)).drain()
    if summary.forwarded != expected or summary.problems:
        raise RuntimeError(f"expected {expected}: {summary}")
    return time.monotonic() - started


def _in_loop(
    stage: Stage, spark: SparkSession, chosen: Settings, tenants: dict[str, Dsn]
) -> tuple[float, list[float]]:
    """Seconds for the giant; and beside it, for a message of a tenant every second."""
    forwarder = Forwarder(chosen, SparkRunner(lambda: spark))
    thread = threading.Thread(target=forwarder.loop, args=[lambda _: None])
    started = time.monotonic()
    thread.start()
    waits = []
    time.sleep(1)
    with (
        stage.mom.connect(role="bench", autocommit=True) as mom,
        stage.app.connect(role="bench", autocommit=True) as app,
    ):
        for number, dsn in enumerate(tenants.values(), 1):
            if app.execute(THROUGH).fetchone() == (64,):
                break
            with dsn.connect(role="bench", autocommit=True) as tenant:
                before = mom.execute(MARKS).fetchone()
                tenant.execute(SEND)
            sent = time.monotonic()
            while mom.execute(MARKS).fetchone() == before:
                time.sleep(0.02)
            waits.append(time.monotonic() - sent)
            time.sleep(max(0.0, started + 1 + number - time.monotonic()))
        while app.execute(THROUGH).fetchone() != (64,):
            time.sleep(0.05)
        taken = time.monotonic() - started
    forwarder.stop()
    thread.join()
    return taken, waits


PARTS = {"poll": poll, "plan": plan_alone}
ON_SPARK = {"tasks": tasks, "giant": giant}


def main(chosen: list[str]) -> None:
    """Run the chosen parts, or all."""
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        stage.server.stop()
        stage.server.settings |= {"max_connections": 500}
        stage.server.start()
        try:
            for part in chosen or ["poll", "plan", "tasks", "giant"]:
                stage.console.print(f"{part} …")
                if part in PARTS:
                    PARTS[part](stage)
                else:
                    spark = session.start(session.with_room("local[2]"), app_name="saf bench")
                    ON_SPARK[part](stage, spark)
                    spark.stop()
        finally:
            stage.server.stop()
    for result in stage.results:
        print(f"{result['name']}: {result['value']} {result['unit']}")


if __name__ == "__main__":
    main(sys.argv[1:])
