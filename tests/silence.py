"""A relay in front of a server, behind which on command the machine vanishes; and a mute one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from tests.relay import Link, Relay


class Silence(Relay):
    """Passes everything on between 127.0.0.1 and a server's unix socket, until it is silent.

    Then it passes nothing on, in neither direction, and ends no connection either: as when a
    machine has lost its network, or its power.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._silent, self._over = threading.Event(), threading.Event()
        super().__init__(f"{dsn.parts['host']}/.s.PGSQL.{dsn.parts['port']}")
        there = make_conninfo(dsn.conninfo, host=self.host, port=self.port)
        self.dsn = Dsn(there, dsn.bounds)
        """The same database, through here."""

    def fall(self) -> None:
        """From now on, nothing is heard of either side."""
        self._silent.set()

    def link(self) -> Link:
        """Keep what comes, once it is silent."""

        def passes(data: bytes, _: bool) -> bytes | None:
            if self._silent.is_set():
                self._over.wait()
                return None
            return data

        return passes

    def close(self) -> None:
        """Take no more connections, and end those on which it was silent."""
        super().close()
        self._over.set()


@contextmanager
def silent_host() -> Iterator[int]:
    """Give the port of a host that takes hundreds of connections, and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:
        yield int(listening.getsockname()[1])


@contextmanager
def mute() -> Iterator[Dsn]:
    """A database at such a host."""
    with silent_host() as port:
        yield Dsn(f"host=127.0.0.1 port={port} dbname=mute")
