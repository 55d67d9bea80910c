"""The demo's Redis server, if it is installed, and the contents of its streams."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from saf.demo.proof import Received
from saf.demo.received import free_port, received_of
from saf.destinations.redis import Redis
from saf.errors import MissingExtra, UsageError

PROGRAM = "redis-server"
DURABLE = {"appendonly": "yes", "appendfsync": "always", "save": "", "bind": "127.0.0.1"}
START_SECONDS = 30.0
AT_ONCE = 5_000


@contextmanager
def serve(folder: Path) -> Iterator[Redis]:
    """Yield a server as a destination; its data is in the folder.

    Raises:
        UsageError: this machine has no redis-server.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise UsageError(f"{PROGRAM} is missing on this machine: apt install redis-server")
    try:
        import redis
    except ImportError:
        raise MissingExtra("redis", "a demo to Redis") from None
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / "port"
    if port_file.exists():
        _stop(redis.Redis(port=int(port_file.read_text())), folder)
    port = free_port()
    port_file.write_text(str(port))
    given = {**DURABLE, "port": str(port), "dir": str(folder)}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - found on this machine
            [program, *(part for name, value in given.items() for part in (f"--{name}", value))],
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C goes to this process, which then stops the server
        )
    try:
        _wait_for(redis.Redis(port=port), process)
        yield Redis(server=f"redis://127.0.0.1:{port}/0")
    finally:
        process.terminate()
        process.wait()


def received(settings: Redis) -> Iterator[Received]:
    """Yield all messages of all streams, each stream in order, read by the usual client."""
    import redis

    ((host, port),) = settings.address.hosts
    with redis.Redis(host=host, port=port) as client:
        number = 0
        for key in client.scan_iter(match=f"{{{settings.hash_tag}}}:*"):
            first = "-"
            while entries := client.xrange(key, first, count=AT_ONCE):
                for _, fields in entries:
                    number += 1
                    body = fields.pop(b"body")
                    headers = {name.decode(): value.decode() for name, value in fields.items()}
                    yield received_of(number, headers, body)
                first = f"({entries[-1][0].decode()}"


def _wait_for(client: Any, process: subprocess.Popen[bytes]) -> None:
    import redis
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    errors = (redis.ConnectionError, redis.BusyLoadingError)
    retry = Retry(ConstantBackoff(0.05), int(START_SECONDS / 0.05), supported_errors=errors)

    def ask() -> None:
        if process.poll() is not None:
            raise UsageError(f"{PROGRAM} does not start: its log is in the demo's folder")
        client.ping()

    retry.call_with_retry(ask, lambda _: None)


def _stop(client: Any, folder: Path) -> None:
    """Stop a server that a killed demo has left in this folder."""
    import redis

    with suppress(redis.RedisError):
        if client.config_get("dir")["dir"] == str(folder):
            client.shutdown(nosave=True)
