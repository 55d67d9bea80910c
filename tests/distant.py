"""A server that is far away: a proxy that holds back what passes, and counts the round trips."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from psycopg.conninfo import make_conninfo

from saf.database import Dsn


class Distance:
    """Between its clients and a server with a unix socket lie so many seconds, there and back."""

    def __init__(self, server: Dsn, seconds: float = 0.0) -> None:
        self.round_trips = 0
        """How often a client has sent something after it had been answered."""
        self._socket = str(Path(server.parts["host"]) / f".s.PGSQL.{server.parts['port']}")
        self._one_way = seconds / 2
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def far(self, dsn: Dsn) -> Dsn:
        """A database of the server, from here."""
        host, port = self._listener.getsockname()
        parts = {**dsn.parts, "host": host, "port": port}
        return Dsn(make_conninfo("", **parts), bounds=dsn.bounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=[client], daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        under_way: SimpleQueue[tuple[float, socket.socket, bytes]] = SimpleQueue()
        server = socket.socket(socket.AF_UNIX)
        answered = True
        with client, server, suppress(OSError):
            server.connect(self._socket)
            threading.Thread(target=_arrive, args=[under_way], daemon=True).start()
            while True:
                for here, there in ((client, server), (server, client)):
                    if here not in select.select([client, server], [], [])[0]:
                        continue
                    data = here.recv(1 << 16)
                    under_way.put((time.monotonic() + self._one_way, there, data))
                    if not data:
                        return
                    self.round_trips += answered and here is client
                    answered = here is server


def _arrive(under_way: SimpleQueue[tuple[float, socket.socket, bytes]]) -> None:
    with suppress(OSError):
        while True:
            due, there, data = under_way.get()
            if not data:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            there.sendall(data)
