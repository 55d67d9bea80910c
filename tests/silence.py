"""A proxy in front of a server, behind which on command the machine vanishes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self

from psycopg.conninfo import make_conninfo

from saf.database import Dsn


class Silence:
    """Passes everything on between 127.0.0.1 and a server's unix socket, until it is silent.

    Then it passes nothing on, in neither direction, and ends no connection either: as when a
    machine has lost its network, or its power.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._to = f"{dsn.parts['host']}/.s.PGSQL.{dsn.parts['port']}"
        self._silent = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        there = {"host": "127.0.0.1", "port": self._listener.getsockname()[1]}
        self.dsn = Dsn(make_conninfo(dsn.conninfo, **there), dsn.bounds)
        """The same database, through here."""
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def fall(self) -> None:
        """From now on, nothing is heard of either side."""
        self._silent.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._open += [client, server]
                server.connect(self._to)
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for one in select.select([client, server], [], [])[0]:
                    if self._silent.is_set():
                        return
                    data = one.recv(1 << 16)
                    if not data:
                        for end in (client, server):
                            end.close()
                        return
                    (server if one is client else client).sendall(data)
