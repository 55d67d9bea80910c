"""A worker of Kafka Connect that writes a topic into a table, by Debezium's JDBC sink.

Each record becomes a row with a text column. The table's key is the record's place in the topic
(topic, partition, offset), and a row that comes again replaces itself, so each record has one row.
The jars come from Maven, once a machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from saf.database import Dsn, fetch
from saf_demo.servers import free_port

POM = Path(__file__).with_name("kafka_connect.pom.xml")
JARS = (
    Path(
        os.environ.get("SAF_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saf"
    )
    / "kafka-connect"
)
MAIN = "org.apache.kafka.connect.cli.ConnectStandalone"
AT_ONCE = 5_000
"""Records that are polled and written at a time; more than the default, which is slower."""
PATIENCE_SECONDS = 300.0
TABLE = "kafka_connect_rows"
LOG4J = "-Dlog4j2.configurationFile={}"
QUIET = """
Configuration:
  Appenders: {Console: {name: out, PatternLayout: {pattern: "%p %c: %m%n"}}}
  Loggers: {Root: {level: WARN, AppenderRef: [{ref: out}]}}
"""


def jars() -> Path:
    """Return the folder with the jars; fetch them if they are missing."""
    if not [*JARS.glob("debezium-connector-jdbc-*.jar")]:
        command = ["mvn", "--quiet", "--batch-mode", "--file", str(POM)]
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
        subprocess.run([*command, *copy, f"-DoutputDirectory={JARS}"], check=True)
    return JARS


def seconds_to_write(brokers: str, topic: str, to: Dsn, folder: Path, rows: int) -> float:
    """Return how long the sink takes for all rows after its first ones have come.

    The start of its JVM does not count. A worker begins at the topic's beginning each time.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with to.connect(role="bench", autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}")
    options = dict(part.split("=", 1) for part in to.conninfo.split())
    worker = {
        "bootstrap.servers": brokers,
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.storage.StringConverter",
        "offset.storage.file.filename": folder / "offsets",
        "listeners": f"http://127.0.0.1:{free_port()}",
        "connector.client.config.override.policy": "All",
    }
    sink = {
        "name": f"sink-{free_port()}",  # a group of its own
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "tasks.max": "1",
        "topics": topic,
        "connection.url": f"jdbc:postgresql://{options.get('host', '127.0.0.1')}:"
        f"{options.get('port', '5432')}/{options['dbname']}?reWriteBatchedInserts=true",
        "connection.username": options["user"],
        "connection.password": options.get("password", ""),
        "collection.name.format": TABLE,
        "schema.evolution": "basic",
        "insert.mode": "upsert",
        "primary.key.mode": "kafka",
        "batch.size": AT_ONCE,
        "consumer.override.max.poll.records": AT_ONCE,
        "consumer.override.auto.offset.reset": "earliest",
        "transforms": "body",
        "transforms.body.type": "org.apache.kafka.connect.transforms.HoistField$Value",
        "transforms.body.field": "body",
    }
    for name, values in (("worker", worker), ("sink", sink)):
        text = "".join(f"{key}={value}\n" for key, value in values.items())
        (folder / f"{name}.properties").write_text(text)
    (folder / "log4j2.yaml").write_text(QUIET)
    command = ["java", "-Xmx1g", LOG4J.format(folder / "log4j2.yaml"), "-cp", f"{jars()}/*", MAIN]
    files = [str(folder / f"{name}.properties") for name in ("worker", "sink")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *files], stdout=log, stderr=log)
    try:
        return _watched(process, folder / "log", to, rows)
    finally:
        process.kill()
        process.wait()


def _watched(process: subprocess.Popen[bytes], log: Path, to: Dsn, rows: int) -> float:
    """Return the seconds from the first rows to the last, extended to all rows."""
    began, first, at_first = time.monotonic(), 0.0, 0
    with to.connect(role="bench", autocommit=True) as connection:
        while time.monotonic() - began < PATIENCE_SECONDS and process.poll() is None:
            ((there,),) = fetch(connection, "SELECT to_regclass(%(t)s)::text", {"t": TABLE})
            count = 0
            if there:
                ((count,),) = fetch(connection, f"SELECT count(*) FROM {TABLE}")
            if count and not first:
                first, at_first = time.monotonic(), count
            if count >= rows > at_first:
                took = time.monotonic() - first
                return took * rows / (rows - at_first)
            time.sleep(0.1)
    raise RuntimeError(f"Kafka Connect has not written {rows} rows: {log.read_text()[-2000:]}")
