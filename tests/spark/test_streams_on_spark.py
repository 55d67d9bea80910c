"""Streams by Spark itself, into a table of files that keeps what each micro-batch has written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.spark import java
from tests import short_lived
from tests.pipeline import connect
from tests.programs import INSTALLED, configuration, environment
from tests.spark.tables import session
from tests.tiers import sized
from tests.waits import until

COLUMNS = "id bigint, key string, text string"

SEND = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'lake', n %% 10, convert_to(%(what)s || ' ' || n, 'UTF8')
FROM generate_series(1, %(number)s::int) AS n
"""

PROGRAM = """
import sys, time
import saf.spark
from pyspark.sql import SparkSession
folder, at_once, master, trigger = sys.argv[1:]
spark = (
    SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").getOrCreate()
)
saf.spark.register(spark)
query = (
    spark.readStream.format("saf").option("broker", "app").option("log", "outbox")
    .option("config", f"{folder}/saf.toml").option("subscription", "lake")
    .option("maxRowsPerTrigger", at_once).schema("id bigint, key string, text string").load()
    .writeStream.format("parquet").option("path", f"{folder}/lake")
    .option("checkpointLocation", f"{folder}/checkpoint")
    .trigger(**{trigger: True if trigger == "availableNow" else "0 seconds"}).start()
)
query.awaitTermination()
"""


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


def fill(dsn: Dsn, what: str, number: int) -> None:
    with connect(dsn) as connection:
        connection.execute(SEND, {"what": what, "number": number})


def stream(config: Path, **options: object) -> Any:
    """A run for all that is there."""
    reader = session().readStream.format("saf").schema(COLUMNS)
    given = {"broker": "app", "log": "outbox", "config": config, "subscription": "lake"}
    for name, value in {**given, **options}.items():
        reader = reader.option(name, str(value))
    query = (
        reader.load()
        .writeStream.format("parquet")
        .option("path", str(config.parent / "lake"))
        .option("checkpointLocation", str(config.parent / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)
    assert not query.isActive
    return query


def in_the_lake(folder: Path) -> Counter[str]:
    rows = session().read.parquet(str(folder / "lake")).collect()
    assert len({row.id for row in rows}) == len(rows)
    return Counter(row.text for row in rows)


def sent(what: str, number: int) -> Counter[str]:
    return Counter(f"{what} {n}" for n in range(1, number + 1))


def test_runs_for_what_is_there_bring_each_message_once_and_commit_it(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    fill(app, "first", 100)
    query = stream(config, maxRowsPerTrigger=60)
    assert [one.numInputRows for one in query.recentProgress] == [60, 40, 0]
    fill(app, "second", 50)
    with app.connect(role="test") as late:
        late.execute(SEND, {"what": "late", "number": 3})
        stream(config)
        late.commit()
    stream(config)
    assert in_the_lake(tmp_path) == sent("first", 100) + sent("second", 50) + sent("late", 3)
    with connect(app) as connection:
        assert fetch(
            connection,
            "SELECT count(*) FROM saf.outbox o, saf.subscription s JOIN saf.cursor c USING "
            "(subscription_id) WHERE s.stream AND c.shard = o.shard AND "
            "NOT pg_visible_in_snapshot(o.txid, c.done)",
        ) == [(0,)]


def test_what_is_wrong_is_said_in_one_sentence(app: Dsn, config: Path) -> None:
    fill(app, "first", 10)
    for options, said in (
        ({"subscription": ""}, "a stream has the option subscription"),
        ({"maxRowsPerTrigger": "none"}, "the option maxRowsPerTrigger is a number from 1 on"),
        ({"start": "latest"}, "the option start is beginning or now"),
        ({"subscription": "forwarder"}, "'forwarder' of the outbox is not a stream's"),
    ):
        with pytest.raises(Exception, match=said):
            stream(config, **options)
    with pytest.raises(Exception, match="the option subscription is only for streams"):
        session().read.format("saf").options(
            broker="app", log="outbox", config=str(config), subscription="lake"
        ).load().count()


def driver(folder: Path, at_once: int, master: str, trigger: str) -> subprocess.Popen[bytes]:
    with (folder / "stderr").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(at_once), master, trigger],
            env=environment(
                **short_lived.defaults(folder / "spark"),
                **java.find().environment(),
                PATH=INSTALLED,
                PYSPARK_PYTHON=sys.executable,
            ),
            cwd=folder,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )


def executors(driver: int) -> list[psutil.Process]:
    """The JVMs of a driver's executors."""
    found = []
    for child in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):  # one that has just ended
            if any(word.endswith("CoarseGrainedExecutorBackend") for word in child.cmdline()):
                found.append(child)
    return found


def complete(folder: Path, batches: int) -> bool:
    """Whether so many micro-batches are complete, by the checkpoint."""
    return (folder / "checkpoint" / "commits" / str(batches)).exists()


def kill_after(batches: int, folder: Path) -> None:
    """Run a driver, and kill it and its JVM once so many micro-batches are complete."""
    program = driver(folder, 150, "local[2]", "processingTime")
    try:
        until(lambda: complete(folder, batches) or program.poll() is not None, seconds=240)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert program.returncode == -signal.SIGKILL


@pytest.mark.full
def test_a_driver_that_is_killed_again_and_again_loses_and_repeats_nothing(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    number = 3000
    fill(app, "first", number)
    everything = sent("first", number)
    for batches in range(1, sized(2, 4)):
        kill_after(batches, tmp_path)
        fill(app, f"killed {batches}", 20)
        everything += sent(f"killed {batches}", 20)
    stream(config)
    assert in_the_lake(tmp_path) == everything


@pytest.mark.full
def test_an_executor_that_is_killed_in_mid_stream_costs_another_attempt_and_no_message(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    # a cluster of one worker on this machine, which starts another executor in its place
    number = 3000
    fill(app, "first", number)
    program = driver(config.parent, 500, "local-cluster[1,2,1024]", "availableNow")
    try:
        until(lambda: complete(tmp_path, 0) or program.poll() is not None, seconds=240)
        running = executors(program.pid)
        assert running, (tmp_path / "stderr").read_text()
        for one in running:
            one.kill()
        assert not complete(tmp_path, number // 500 - 1), "the stream was over before"
        assert program.wait(240) == 0, (tmp_path / "stderr").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert in_the_lake(tmp_path) == sent("first", number)


@pytest.mark.full
def test_a_database_that_crashes_in_mid_stream_ends_the_query_and_costs_no_message(
    own_server: EmbeddedServer, mom: Dsn, tmp_path: Path
) -> None:
    app = own_server.create_database("app")
    migrate(app)
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    number = 3000
    fill(app, "first", number)
    program = driver(tmp_path, 300, "local[2]", "processingTime")
    try:
        until(lambda: complete(tmp_path, 1) or program.poll() is not None, seconds=240)
        own_server.stop_immediately()
        assert program.wait(240) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert "is unavailable" in (tmp_path / "stderr").read_text()
    own_server.start()
    fill(app, "second", 20)
    stream(config)
    assert in_the_lake(tmp_path) == sent("first", number) + sent("second", 20)
