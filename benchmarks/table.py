"""An outbox as a table and as a stream of Spark, beside Spark's JDBC source and ADBC alone.

    python -m benchmarks.table

All three read the same messages with all of their columns, by TCP on one machine, with two tasks
or processes. Spark's noop sink takes each row and keeps none. The floor is Arrow in memory: one
process for each core, each with a half of the ids, without Spark, order or a common snapshot.

A stream brings them into files of Parquet, and into a Delta table, in micro-batches of a bounded
size. A job sends as many messages of the same size, in two partitions.

The driver of JDBC comes from Maven Central by ``mvn``, and is kept where Maven keeps it.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from psycopg.conninfo import make_conninfo

from benchmarks.stage import Stage, execute, median
from saf.columns import COLUMNS
from saf.database import Dsn
from saf.spark import register, session, to_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MESSAGES = 1_000_000
ROUNDS = 3
PARTS = 2
ADDRESS = "127.0.0.77"
"""An address of the loopback that no other server has."""
DRIVER = "org.postgresql:postgresql:42.7.7"
AT_ONCE = 250_000
"""The messages of a micro-batch."""
SENT, BODY = 1_000_000, 200
"""How many messages a job sends, and how many bytes the body of each has."""

READ = "SELECT id, shard, {columns} FROM saf.outbox WHERE id >= {first} AND id < {end}"


def driver() -> Path:
    """The driver's file; fetched unless it is there."""
    group, name, version = DRIVER.split(":")
    folder = Path.home() / ".m2" / "repository" / Path(*group.split(".")) / name / version
    file = folder / f"{name}-{version}.jar"
    if not file.exists():
        get = ["mvn", "-q", "-B", "dependency:get", f"-Dartifact={DRIVER}", "-Dtransitive=false"]
        subprocess.run(get, check=True)
    return file


def by_network(stage: Stage) -> Dsn:
    """Let the server listen; JDBC knows no sockets of files."""
    with (stage.server.data_dir / "pg_hba.conf").open("a") as file:
        file.write("\nhost all all 127.0.0.0/8 trust\n")
    execute(stage.app, f"ALTER SYSTEM SET listen_addresses = '{ADDRESS}'")
    stage.server.stop()
    stage.server.start()
    return Dsn(make_conninfo(stage.app.conninfo, host=ADDRESS))


def arrow(given: tuple[str, int, int]) -> int:
    """Read some ids into Arrow, in a process of its own; return how many there were."""
    import adbc_driver_postgresql.dbapi as adbc

    dsn, first, end = given
    query = READ.format(columns=", ".join(COLUMNS), first=first, end=end)
    with adbc.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return int(cursor.fetch_arrow_table().num_rows)


def taken(table: DataFrame) -> None:
    """Let Spark read all of a table."""
    table.write.format("noop").mode("overwrite").save()


def run(stage: Stage, spark: SparkSession, dsn: Dsn, config: Path) -> None:
    """Notes the rates, and the two ratios."""
    register(spark)
    parts = dsn.parts
    url = f"jdbc:postgresql://{parts['host']}:{parts['port']}/{parts['dbname']}"
    halves = [
        (dsn.conninfo, one * MESSAGES // PARTS + 1, (one + 1) * MESSAGES // PARTS + 1)
        for one in range(PARTS)
    ]

    def saf() -> None:
        reader = spark.read.format("saf").option("broker", "app").option("config", str(config))
        taken(reader.option("log", "outbox").option("partitions", PARTS).load())

    def jdbc() -> None:
        columns = ", ".join(("id", "shard", *COLUMNS))
        reader = spark.read.format("jdbc").option("url", url).option("user", parts["user"])
        reader = reader.option("driver", "org.postgresql.Driver").option("fetchsize", 10_000)
        reader = reader.option("partitionColumn", "id").option("numPartitions", PARTS)
        reader = reader.option("lowerBound", 1).option("upperBound", MESSAGES + 1)
        taken(reader.option("dbtable", f"(SELECT {columns} FROM saf.outbox) AS o").load())

    with multiprocessing.get_context("spawn").Pool(PARTS) as pool:

        def adbc() -> None:
            if sum(pool.map(arrow, halves, chunksize=1)) != MESSAGES:
                raise RuntimeError("ADBC has lost messages")

        ways = {"saf": saf, "jdbc": jdbc, "adbc": adbc}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
                started = time.monotonic()
                way()
                if number:  # the first time, the JVM compiles and the processes import
                    seconds[name].append(time.monotonic() - started)
    for name, values in seconds.items():
        stage.note(f"table_{name}_messages_per_second", MESSAGES / median(values), "1/s")
    of = {name: median(values) for name, values in seconds.items()}
    stage.note("table_of_adbc", of["adbc"] / of["saf"], "of ADBC to Arrow alone", ">= 0.6")
    stage.note("table_to_jdbc", of["jdbc"] / of["saf"], "times as fast as JDBC", ">= 3")


def stream(stage: Stage, spark: SparkSession, config: Path) -> None:
    """Notes the rates of streams, whose every run has a subscription of its own."""
    register(spark)
    seconds: dict[str, list[float]] = {"parquet": [], "delta": []}
    for number in range(ROUNDS + 1):
        for kind, values in seconds.items():
            folder = config.parent / f"{kind} {number}"
            reader = spark.readStream.format("saf").option("broker", "app").option("log", "outbox")
            reader = reader.option("config", str(config)).option("subscription", folder.name)
            reader = reader.option("partitions", PARTS).option("maxRowsPerTrigger", AT_ONCE)
            table = str(folder / "messages")
            started = time.monotonic()
            writer = reader.load().writeStream.trigger(availableNow=True)
            writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
            if kind == "delta":
                writer = writer.foreachBatch(to_delta(table))
            else:
                writer = writer.format(kind).option("path", table)
            writer.start().awaitTermination()
            if number:
                values.append(time.monotonic() - started)
            if kind == "delta":
                there = DeltaTable(table).to_pyarrow_dataset().count_rows()
            else:
                there = spark.read.parquet(table).count()
            if there != MESSAGES:
                raise RuntimeError(f"the stream into {kind} has lost messages, or doubled some")
            shutil.rmtree(folder)
    for kind, values in seconds.items():
        floor = ">= 100,000" if kind == "delta" else ""
        rate = MESSAGES / median(values)
        stage.note(f"stream_to_{kind}_messages_per_second", rate, "1/s", floor)


def send(stage: Stage, spark: SparkSession, config: Path) -> None:
    """Notes the rate of a job that sends, whose rows cost Spark next to nothing."""
    register(spark)
    messages = spark.range(0, SENT, 1, PARTS).selectExpr(
        "'billing' AS service",
        "CAST(id % 10000 AS string) AS key",
        f"CAST(rpad(CAST(id AS string), {BODY}, 'x') AS binary) AS body",
    )
    seconds = []
    for number in range(ROUNDS + 1):
        started = time.monotonic()
        messages.write.format("saf").option("broker", "app").option("config", str(config)).mode(
            "append"
        ).save()
        if number:
            seconds.append(time.monotonic() - started)
    stage.note("sink_messages_per_second", SENT / median(seconds), "1/s", ">= 80,000")


def main() -> None:
    """Run it all, and write the results."""
    jar = driver()
    with tempfile.TemporaryDirectory(prefix="saf-bench-") as folder:
        Path(folder).chmod(0o755)
        stage = Stage(Path(folder))
        try:
            dsn = by_network(stage)
            stage.app = dsn
            stage.fill(MESSAGES)
            config = stage.settings_file(Path(folder) / "saf.toml")
            spark = session.start(f"local[{PARTS}]", conf={"spark.driver.extraClassPath": str(jar)})
            try:
                run(stage, spark, dsn, config)
                stream(stage, spark, config)
                send(stage, spark, config)
            finally:
                spark.stop()
        finally:
            stage.server.stop()
        stage.report()


if __name__ == "__main__":
    main()
