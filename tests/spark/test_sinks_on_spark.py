"""DataFrames and streams that are sent into an outbox, while tasks and epochs are tried again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark import TaskContext

from saf.database import Dsn, fetch
from tests.pipeline import connect
from tests.programs import configuration
from tests.spark.tables import session
from tests.tiers import sized

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MANY = sized(100_000, 10_000_000)
IN_ORDER = """
SELECT count(*), sum(number)::bigint, count(*) FILTER (WHERE number <= before)
FROM (SELECT number, lag(number) OVER (PARTITION BY key ORDER BY id) AS before
      FROM (SELECT id, key, convert_from(body, 'UTF8')::bigint AS number FROM saf.outbox) AS sent
     ) AS each
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


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_scores_in_their_millions_arrive_in_the_order_of_each_key(app: Dsn, config: Path) -> None:
    many = session().range(0, MANY, 1, 4)
    key, body = "CAST(id % 1000 AS string) AS key", "CAST(id AS string) AS body"
    write(many.selectExpr("'billing' AS service", key, body), config)
    with connect(app) as connection:
        found = fetch(connection, IN_ORDER)
    assert (found, left(app)) == ([(MANY, MANY * (MANY - 1) // 2, 0)], 0)


@pytest.mark.full
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
        (
            scores(1).withColumnRenamed("key", "kee"),
            {},
            "a message has no 'kee' .did you mean 'key'",
        ),
        (
            scores(1).selectExpr("service", "7 AS body"),
            {},
            "is a binary or a string, and not a int",
        ),
        (scores(1).select("service", "body", "body"), {}, "there are two columns 'body'"),
        (scores(1), {"log": "inbox"}, "sent messages go into an outbox"),
        (scores(1), {"txnAppId": "a"}, "txnAppId and txnVersion go together"),
        (scores(1), {"subscription": "a"}, "the option subscription is only for streams"),
        (scores(1), {"broker": "app,other"}, "go into one outbox"),
    ):
        with pytest.raises(Exception, match=said):
            write(what, config, **{"broker": "app", **options})
    with pytest.raises(Exception, match="an outbox is append-only"):
        scores(1).write.format("saf").mode("overwrite").options(
            broker="app", config=str(config)
        ).save()


def pipe(config: Path, folder: Path) -> None:
    """A stream of the files of a folder into an outbox, one at a time, for all that is there."""
    lines = session().readStream.option("maxFilesPerTrigger", 1).text(str(folder / "files"))
    query = (
        lines.selectExpr(
            "'billing' AS service", "CAST(value % 5 AS string) AS key", "value AS body"
        )
        .writeStream.format("saf")
        .option("broker", "app")
        .option("config", str(config))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(240)


@pytest.mark.full
def test_an_epoch_that_spark_does_not_know_to_be_complete_is_not_sent_twice(
    app: Dsn, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    for name in ("a", "b"):
        first = 100 * (name == "b")
        lines = "".join(f"{number}\n" for number in range(first, first + 100))
        (tmp_path / "files" / name).write_text(lines)
    pipe(config, tmp_path)
    assert sorted(sent(app)) == [*range(200)]
    for file in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        file.unlink()  # as if Spark had been killed between the two commits
    for file in (tmp_path / "checkpoint" / "commits").glob(".1*"):
        file.unlink()
    (tmp_path / "files" / "c").write_text("200\n")
    pipe(config, tmp_path)
    assert sorted(sent(app)) == [*range(201)]
    assert left(app) == 0
