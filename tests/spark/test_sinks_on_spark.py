"""DataFrames and streams that are sent into an outbox, while tasks and epochs are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from saf.database import Dsn, fetch
from tests.pipeline import connect
from tests.programs import configuration
from tests.spark.tables import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SEND = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT 'orders', n %% 5, convert_to(n::text, 'UTF8') FROM generate_series(1, %(number)s::int) AS n
"""


@pytest.fixture
def config(app: Dsn, other: Dsn, mom: Dsn, tmp_path: Path) -> Path:
    return configuration(tmp_path / "saf.toml", {"app": app, "other": other}, {"mom": mom})


def scores(number: int, partitions: int = 4) -> DataFrame:
    """What a job has worked out."""
    return (
        session()
        .range(0, number, 1, partitions)
        .selectExpr(
            "'billing' AS service", "CAST(id % 7 AS string) AS key", "CAST(id AS string) AS body"
        )
    )


def write(what: DataFrame, config: Path, broker: str = "app", **options: object) -> None:
    writer = what.write.format("saf").mode("append").option("broker", broker)
    for name, value in {"config": config, **options}.items():
        writer = writer.option(name, str(value))
    writer.save()


def sent(dsn: Dsn) -> list[int]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT body FROM saf.outbox ORDER BY id")
    return [int(bytes(body)) for (body,) in rows]


def left(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        ((count,),) = fetch(connection, "SELECT count(*) FROM saf.staged")
    return int(count)


def test_a_job_whose_tasks_are_tried_again_sends_each_message_once_and_in_order(
    app: Dsn, config: Path
) -> None:
    def fails_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A task that fails at its end the first time, when its rows are staged."""
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("to be tried again")

    what = scores(1000)
    write(what.mapInArrow(fails_once, what.schema), config)
    assert (sent(app), left(app)) == ([*range(1000)], 0)


def test_a_job_that_is_run_again_sends_nothing_more_and_one_that_fails_sends_nothing(
    app: Dsn, config: Path
) -> None:
    for _ in range(2):
        write(scores(10), config, txnAppId="scoring", txnVersion=7)
    assert sent(app) == [*range(10)]
    bad = scores(10).selectExpr("service", "IF(body = '9', '', key) AS key", "body")
    with pytest.raises(Exception, match=r"messages\[\d\]\.key: is empty"):
        write(bad, config)
    assert (sent(app), left(app)) == ([*range(10)], 0)


def test_what_cannot_be_sent_is_said_in_one_sentence(config: Path) -> None:
    for what, options, said in (
        (scores(1).drop("body"), {}, "a message needs the column 'body'"),
        (scores(1).withColumnRenamed("key", "kee"), {}, "a message has no 'kee', did you mean"),
        (
            scores(1).selectExpr("service", "7 AS body"),
            {},
            "is a binary or a string, and not a int",
        ),
        (scores(1), {"log": "inbox"}, "what is sent goes into an outbox"),
        (scores(1), {"txnAppId": "a"}, "txnAppId and txnVersion go together"),
        (scores(1), {"subscription": "a"}, "the option subscription is one of streams"),
        (scores(1), {"broker": "app,other"}, "goes into one outbox"),
    ):
        with pytest.raises(Exception, match=said):
            write(what, config, **{"broker": "app", **options})
    with pytest.raises(Exception, match="an outbox is append-only"):
        scores(1).write.format("saf").mode("overwrite").options(
            broker="app", config=str(config)
        ).save()


def pipe(config: Path, checkpoint: Path) -> Any:
    """A stream from one outbox to another, for all that is there."""
    read = session().readStream.format("saf").option("log", "outbox").option("broker", "app")
    read = read.option("config", str(config)).option("subscription", "pipe")
    what = read.option("maxRowsPerTrigger", 60).load()
    query = (
        what.selectExpr("'billing' AS service", "key", "body")
        .writeStream.format("saf")
        .option("broker", "other")
        .option("config", str(config))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)
    return query


def test_an_epoch_that_spark_does_not_know_to_be_complete_is_not_sent_twice(
    app: Dsn, other: Dsn, config: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with connect(app) as connection:
        connection.execute(SEND, {"number": 100})
    pipe(config, checkpoint)
    commits = sorted(checkpoint.glob("commits/[0-9]*"), key=lambda file: int(file.name))
    commits[-1].unlink()  # as if Spark had been killed between the two commits
    with connect(app) as connection:
        connection.execute(SEND, {"number": 10})
    pipe(config, checkpoint)
    assert sorted(sent(other)) == sorted([*range(1, 101), *range(1, 11)])
    for key in range(5):
        mine = [body for body in sent(other)[:100] if body % 5 == key]
        assert mine == sorted(mine)
    assert left(other) == 0
