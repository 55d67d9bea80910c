"""The streams of a round: a driver of Spark in a process of its own, until it is killed.

    python -m tests.crash.streaming FOLDER       (with STREAM_APP, STREAM_MOM and STREAM_OTHER set)

It begins a query anew that has failed, with the same checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from saf.spark import register, session, to_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

MASTER = "local[2]"
LOOK_SECONDS = 0.2
SETTINGS = {
    "spark.python.authenticate.socketTimeout": "60s",
    "spark.sql.streaming.noDataProgressEventInterval": "1000",
}
AT_ONCE = 200
"""How many messages a micro-batch has at most."""


def main() -> None:
    """Stream for ever."""
    folder = Path(sys.argv[1])
    spark = session.start(MASTER, app_name="streams", conf=SETTINGS)
    register(spark)
    begin: dict[str, Callable[[], StreamingQuery]] = {
        "outbox": partial(_to_table, spark, "STREAM_APP", "outbox", folder),
        "inbox": partial(_to_table, spark, "STREAM_MOM", "inbox", folder),
        "copies": partial(_to_outbox, spark, folder),
    }
    running: dict[str, StreamingQuery] = {}
    while True:
        for name, anew in begin.items():
            if name in running and running[name].isActive:
                continue
            if name in running:
                print(name, running[name].exception(), file=sys.stderr, flush=True)
            running[name] = anew()
            # one after the other: Spark waits ten seconds for a Python process to start
            while running[name].isActive and not running[name].recentProgress:
                time.sleep(LOOK_SECONDS)
        time.sleep(LOOK_SECONDS)


def _read(spark: SparkSession, dsn_from: str, log: str, name: str) -> DataFrame:
    return (
        spark.readStream.format("saf")
        .option("dsn_from", dsn_from)
        .option("log", log)
        .option("subscription", name)
        .option("maxRowsPerTrigger", AT_ONCE)
        .schema("id bigint, key string, text string")
        .load()
    )


def _begin(writer: DataStreamWriter, checkpoint: Path) -> StreamingQuery:
    return writer.option("checkpointLocation", str(checkpoint)).start()


def _to_table(spark: SparkSession, dsn_from: str, log: str, folder: Path) -> StreamingQuery:
    """A log into a table of its name."""
    write = _read(spark, dsn_from, log, log).writeStream.foreachBatch(to_delta(str(folder / log)))
    return _begin(write, folder / f"checkpoint-{log}")


def _to_outbox(spark: SparkSession, folder: Path) -> StreamingQuery:
    """All that the application sends, sent once more from another database."""
    read = _read(spark, "STREAM_APP", "outbox", "copies")
    # whoever writes by INSERT may have written an empty key, which a DataFrame may not send
    messages = read.selectExpr("'copies' AS service", "nullif(key, '') AS key", "text AS body")
    write = messages.writeStream.format("saf").option("dsn_from", "STREAM_OTHER")
    return _begin(write, folder / "checkpoint-copies")


if __name__ == "__main__":
    main()
