"""The stream of ``saf demo --lake``: a driver in a process of its own.

    python -m saf.spark.lake_demo FOLDER AT_ONCE       (with SAF_DSN set)

Stream the outbox into the table FOLDER/flights, AT_ONCE messages at a time, until standard input
closes, because the parent process closed it or died.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path

from saf.errors import SafError
from saf.spark import register, session, to_delta

MASTER = "local[2]"
LOOK_SECONDS = 0.5
COLUMNS = (
    "id bigint, message_id string, from_service string, to_service string, key string, "
    "message_type string, headers string, body binary, created_at timestamp"
)


def main() -> None:
    """Stream until standard input ends."""
    folder, at_once = Path(sys.argv[1]).absolute(), sys.argv[2]
    spark = session.start(MASTER, app_name="saf demo --lake")
    from pyspark.sql import functions as f

    register(spark)
    messages = (
        spark.readStream.format("saf")
        .option("dsn_from", "SAF_DSN")
        .option("log", "outbox")
        .option("subscription", "lake")
        .option("maxRowsPerTrigger", at_once)
        .schema(COLUMNS)
        .load()
        .withColumn("delay", f.get_json_object(f.col("body").cast("string"), "$.dep_delay"))
        .withColumn("delay", f.col("delay").cast("bigint"))
    )
    query = (
        messages.writeStream.foreachBatch(to_delta(str(folder / "flights")))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    while query.isActive and not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        pass
    failed = query.exception()
    query.stop()
    spark.stop()
    if failed is not None:
        raise SafError(f"the stream has failed: {session.first_line(failed)}")


if __name__ == "__main__":
    main()
