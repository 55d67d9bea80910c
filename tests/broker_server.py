"""A broker behind a URL for a test: a real server in a process of its own, killed for real."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from saf.database import Dsn
from saf.destinations.https import Https
from saf_demo.servers import free_port
from tests import processes
from tests.killable import Restartable
from tests.waits import until

SECRET = "whsec_" + "c2Vj" * 8
OTHER_SECRET = "whsec_" + "b2xk" * 8


@dataclass(kw_only=True)
class BrokerServer(Restartable):
    """One server; the database has what it holds."""

    dsn: Dsn
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `saf.webhooks.broker` is given besides."""
    certificate: tuple[Path, Path] | None = None
    port: int = field(default_factory=free_port)
    process: BaseProcess | None = None

    def at(self, port: int = 0, **more: Any) -> Https:
        """The server, or a port before it, as a destination."""
        scheme, host = ("https", "localhost") if self.certificate else ("http", "127.0.0.1")
        given = {"secret": SecretStr(SECRET), **more}
        return Https(server=f"{scheme}://{host}:{port or self.port}/saf", **given)

    def start(self, failpoint: str = "") -> None:
        """Start it, and wait until it answers."""
        self.process = processes.start(
            serve, self.dsn, self.port, dict(self.options), self.certificate, failpoint=failpoint
        )
        until(self.answers, seconds=60)

    def answers(self) -> bool:
        """Whether somebody listens."""
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def died(self) -> bool:
        """Whether it has died, for instance at its fail point."""
        assert self.process is not None
        return self.process.exitcode is not None

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


@contextmanager
def broker_server(dsn: Dsn, **given: Any) -> Iterator[BrokerServer]:
    """A server before a database."""
    server = BrokerServer(dsn=dsn, **given)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def serve(
    dsn: Dsn, port: int, options: Mapping[str, Any], certificate: Sequence[Path] | None
) -> None:
    """Serve until killed; a program for `tests.processes`."""
    import uvicorn

    import saf.webhooks

    secrets = [OTHER_SECRET, SECRET]
    app = saf.webhooks.broker(dsn, **{"secrets": secrets, **options})
    file, key = certificate or (None, None)
    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="error", access_log=False,
        ssl_certfile=file, ssl_keyfile=key,
    )  # fmt: skip
