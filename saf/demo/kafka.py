"""The demo's Kafka broker, started from local jars, and the contents of its topics.

The jars are those of an installed Kafka (``KAFKA_HOME``), or those that ``make kafka`` has fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from saf.demo.proof import Received
from saf.demo.received import free_port, received_of
from saf.destinations.kafka import Kafka
from saf.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from confluent_kafka import Consumer

MISSING = (
    "Kafka's jars are missing on this machine: make kafka, which needs Maven (apt install maven "
    "default-jre-headless), or set KAFKA_HOME"
)
START_SECONDS = 60.0
SMALL = ("-Xmx384m", "-Xms96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
CLUSTER_ID = "c2FmLWRlbW8tY2x1c3Rlcg"
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "num.partitions": "1",
}
"""Settings of a small cluster: one broker, which is its own controller."""
AT_ONCE = 10_000


def jars() -> Path | None:
    """Return the folder of Kafka's jars; None if they are missing."""
    folders = [cache_folder() / "kafka"]
    if home := os.environ.get("KAFKA_HOME"):
        folders.insert(0, Path(home) / "libs")
    return next((one for one in folders if [*one.glob("kafka-clients-*.jar")]), None)


def cache_folder() -> Path:
    """Return the folder for rebuildable files: SAF_CACHE, else ``saf`` in the user's cache."""
    if chosen := os.environ.get("SAF_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saf"


def java(folder: Path, program: str, *arguments: object) -> list[str]:
    """Return the command that runs one of Kafka's programs.

    Raises:
        UsageError: Java or the jars are missing.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin" if home else None)
    libraries = jars()
    if found is None or libraries is None:
        raise UsageError(MISSING)
    quiet = folder / "log4j2.yaml"
    quiet.write_text("Configuration:\n  Loggers:\n    Root:\n      level: error\n")
    log = f"-Dlog4j2.configurationFile={quiet}"
    return [found, *SMALL, log, "-cp", f"{libraries}/*", program, *map(str, arguments)]


def broker(folder: Path, port: int, more: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that starts a broker with the data in its folder, formatted if needed.

    ``more`` are settings; its listeners are added to that of the port.
    """
    control = free_port()
    given = dict(more or {})
    listeners = given.pop("listeners", "")
    protocols = given.pop("listener.security.protocol.map", "")
    here = f"PLAINTEXT://127.0.0.1:{port}"
    settings = {
        **SETTINGS,
        "controller.quorum.voters": f"1@127.0.0.1:{control}",
        "listeners": ",".join(filter(None, [here, f"CONTROLLER://127.0.0.1:{control}", listeners])),
        "advertised.listeners": ",".join(filter(None, [here, listeners])),
        "listener.security.protocol.map": ",".join(
            filter(None, ["PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT", protocols])
        ),
        "log.dirs": str(folder / "data"),
        **given,
    }
    file = folder / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    if not (folder / "data" / "meta.properties").exists():
        command = java(folder, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", file)
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - found on this machine
    return java(folder, "kafka.Kafka", file)


@contextmanager
def serve(folder: Path) -> Iterator[Kafka]:
    """Yield a broker as a destination; its data is in the folder.

    Raises:
        UsageError: this machine has no jars of Kafka.
    """
    try:
        import confluent_kafka  # noqa: F401 - needed below
    except ImportError:
        raise MissingExtra("kafka", "a demo to Kafka") from None
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _stop(folder)
    port = free_port()
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - found on this machine
            broker(folder, port),
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C goes to this process, which then stops the broker
        )
    (folder / "pid").write_text(str(process.pid))
    settings = Kafka(brokers=f"127.0.0.1:{port}", topic="flights.{service}", partitions=4)
    try:
        _wait_for(settings, process)
        yield settings
    finally:
        process.terminate()
        process.wait()


def received(settings: Kafka) -> Iterator[Received]:
    """Yield all messages of all topics, each partition in order, read by the usual client."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({
        "bootstrap.servers": settings.brokers, "group.id": "proof", "enable.auto.commit": False,
        "isolation.level": "read_committed", "enable.partition.eof": True,
    })  # fmt: skip
    try:
        topics = consumer.list_topics(timeout=START_SECONDS).topics
        places = [
            TopicPartition(topic, number, 0)
            for topic in sorted(topics)
            if topic.startswith("flights.")
            for number in topics[topic].partitions
        ]
        for number, place in enumerate(places):
            yield from _of_partition(consumer, place, first=number << 40)
    finally:
        consumer.close()


def _of_partition(consumer: Consumer, place: object, *, first: int) -> Iterator[Received]:
    consumer.assign([place])  # type: ignore[list-item] # a TopicPartition
    number = first
    while True:
        for one in consumer.consume(AT_ONCE, 0.2):
            if one.error() is not None:
                return  # end of the partition
            number += 1
            headers = {str(pair[0]): _text(pair[1]) for pair in one.headers() or ()}
            yield received_of(number, headers, one.value() or b"")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _wait_for(settings: Kafka, process: subprocess.Popen[bytes]) -> None:
    from saf.destinations.kafka.server import open_link

    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            open_link("kafka", settings).close()
        except Exception:
            time.sleep(0.1)
            continue
        return
    raise UsageError("Kafka does not start: its log is in the demo's folder")


def _stop(folder: Path) -> None:
    """Stop a broker that a killed demo has left in this folder."""
    pid_file = folder / "pid"
    if not pid_file.exists():
        return
    pid = pid_file.read_text().strip()
    if str(folder) in _command_of(pid):
        subprocess.run(["kill", pid], check=False)  # noqa: S603, S607
        while str(folder) in _command_of(pid):
            time.sleep(0.05)


def _command_of(pid: str) -> str:
    command: Sequence[str] = ["ps", "-o", "command=", "-p", pid]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603
