"""The demo's RabbitMQ server, if it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from saf.demo.received import free_port
from saf.errors import UsageError

PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Path in Debian's package; the script on PATH switches to another user."""
START_SECONDS = 120.0
SETTINGS = """\
listeners.tcp.1 = 127.0.0.1:{queues}
stream.listeners.tcp.1 = 127.0.0.1:{streams}
stream.advertised_host = 127.0.0.1
stream.advertised_port = {streams}
log.console = false
"""
COOKIE = "saf-demo"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Local ports of a server."""

    streams: int
    queues: int


@contextmanager
def serve(folder: Path) -> Iterator[Ports]:
    """Start a server; its data is in the folder.

    Raises:
        UsageError: this machine has no rabbitmq-server.
    """
    mapper = shutil.which("epmd")
    if not PROGRAM.exists() or mapper is None:
        raise UsageError("rabbitmq-server is missing on this machine: apt install rabbitmq-server")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _stop(folder)
    ports, node = Ports(streams=free_port(), queues=free_port()), str(free_port())
    (folder / "rabbitmq.conf").write_text(
        SETTINGS.format(queues=ports.queues, streams=ports.streams)
    )
    (folder / "enabled_plugins").write_text("[rabbitmq_stream].\n")
    mapped = str(free_port())
    env = {
        **os.environ,
        "HOME": str(folder),
        "ERL_EPMD_PORT": mapped,
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "saf-demo@localhost",
        "RABBITMQ_DIST_PORT": node,
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-setcookie {COOKIE}",
    }
    with (folder / "output").open("ab") as log:
        epmd = subprocess.Popen(  # noqa: S603 - found on this machine
            [mapper, "-port", mapped, "-address", "127.0.0.1"],
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C goes to this process, which then stops the server
        )
        process = subprocess.Popen(  # noqa: S603 - found on this machine
            [PROGRAM], env=env, stdout=log, stderr=log, process_group=0
        )
    try:
        wait_for(ports.streams, process)
        yield ports
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        epmd.terminate()
        epmd.wait()


def wait_for(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server listens on the port.

    Raises:
        UsageError: the server does not start.
    """
    deadline = time.monotonic() + START_SECONDS
    while (process is None or process.poll() is None) and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise UsageError("rabbitmq-server does not start: its log is in the demo's folder")


def _stop(folder: Path) -> None:
    """Stop a server that a killed demo has left in this folder."""
    pid_file = folder / "pid"
    if not pid_file.exists():
        return
    command = Path("/proc") / pid_file.read_text().strip() / "cmdline"

    def runs() -> bool:
        with suppress(OSError):
            return str(folder).encode() in command.read_bytes()
        return False

    if runs():
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
    while runs():
        time.sleep(0.1)
