"""Streams into a Delta table by Spark itself, whose driver and workers die on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.serializers import CloudPickleSerializer

import saf.spark
from saf.database import Dsn
from saf.errors import ConfigurationError
from tests.object_store import ObjectStore
from tests.pipeline import connect
from tests.programs import configuration
from tests.spark.tables import session
from tests.spark_workers import workers
from tests.waits import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = "id bigint, key string, headers map<string,string>, created_at timestamp, text string"
SEND = """
INSERT INTO saf.outbox (to_service, key, headers, body)
SELECT 'lake', n %% 10, '{"n": 1}', convert_to(n || repeat('x', %(size)s::int), 'UTF8')
FROM generate_series(%(first)s::int, %(last)s::int) AS n
"""
ONCE = "count(*), count(DISTINCT id), min(id), max(id), count(headers['n'])"


@pytest.fixture
def config(app: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})


def send(dsn: Dsn, first: int, last: int, size: int = 0) -> None:
    with connect(dsn) as connection:
        connection.execute(SEND, {"first": first, "last": last, "size": size})


def read(config: Path, **options: object) -> DataFrame:
    reader = session().readStream.format("saf").schema(COLUMNS)
    given = {"broker": "app", "log": "outbox", "config": config, "subscription": "lake"}
    for name, value in {**given, **options}.items():
        reader = reader.option(name, str(value))
    return reader.load()


def test_options_with_secrets_never_go_into_a_plan_of_spark_connect() -> None:
    pickled: Any = CloudPickleSerializer
    secret = saf.spark.to_delta("s3://lake/outbox", storage_options={"secret": "hunter2"})
    for sent in (secret, lambda: secret):
        with pytest.raises(ConfigurationError, match="no storage_options over") as caught:
            pickled().dumps(sent)
        assert "hunter2" not in str(caught.value)
    elsewhere: Any = object()  # a DataFrame that is none of a classic session
    with pytest.raises(ConfigurationError, match="in the environment of the server"):
        secret(elsewhere, 0)
    assert pickled().dumps(saf.spark.to_delta("s3://lake/outbox"))


def start(messages: DataFrame, folder: Path, checkpoint: str = "checkpoint", to: Any = None) -> Any:
    writer = messages.writeStream.foreachBatch(to or saf.spark.to_delta(str(folder / "lake")))
    writer = writer.option("checkpointLocation", str(folder / checkpoint))
    return writer.trigger(availableNow=True).start()


def in_the_lake(folder: Path) -> Any:
    lake = DeltaTable(folder / "lake").to_pyarrow_dataset()
    (found,) = duckdb.from_arrow(lake).aggregate(ONCE).fetchall()
    return found


@pytest.mark.full
def test_a_micro_batch_that_comes_again_is_not_in_the_table_twice(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    send(app, 1, 100)
    append = saf.spark.to_delta(str(tmp_path / "lake"), partition_by=["key"])
    dying = [1]

    def dies_once(batch: DataFrame, number: int) -> None:
        append(batch, number)
        if number in dying:  # after the commit, and before Spark notes that it is complete
            dying.remove(number)
            raise RuntimeError("the driver is gone")

    query = start(read(config, maxRowsPerTrigger=40), tmp_path, to=dies_once)
    with pytest.raises(Exception, match="the driver is gone"):
        query.awaitTermination(240)
    assert in_the_lake(tmp_path)[:2] == (80, 80)
    send(app, 101, 110)
    start(read(config, maxRowsPerTrigger=40), tmp_path, to=dies_once).awaitTermination(240)
    assert in_the_lake(tmp_path) == (110, 110, 1, 110, 110)

    # a new checkpoint begins with micro-batch 0 again, which is not the old one's
    send(app, 111, 115)
    start(read(config), tmp_path, "another", to=append).awaitTermination(240)
    assert in_the_lake(tmp_path) == (115, 115, 1, 115, 115)


@pytest.mark.full
def test_python_workers_that_are_killed_in_mid_stream_cost_another_attempt_and_no_message(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    number = 20_000
    send(app, 1, number, size=1_000)  # more than fits between the reader and the next worker
    here = tmp_path / "here"

    def held_up_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not here.exists():
            here.touch()
            time.sleep(240)
        yield from batches

    query = start(read(config).mapInArrow(held_up_once, COLUMNS), tmp_path)
    until(lambda: here.exists() or not query.isActive, seconds=240)
    victims = workers(os.getpid())
    assert victims, "nobody reads"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    query.awaitTermination(240)
    assert not query.isActive
    assert in_the_lake(tmp_path) == (number, number, 1, number, number)


@pytest.mark.full
def test_a_stream_appends_to_a_table_in_an_object_store(
    app: Dsn, config: Path, tmp_path: Path, objects: ObjectStore
) -> None:
    where = f"s3://{objects.bucket()}/lake"
    append = saf.spark.to_delta(where, storage_options=objects.options)
    for first in (1, 11):
        send(app, first, first + 9)
        start(read(config), tmp_path, to=append).awaitTermination(240)
    table = DeltaTable(where, storage_options=objects.options).to_pyarrow_table()
    assert sorted(table["id"].to_pylist()) == [*range(1, 21)]
