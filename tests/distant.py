"""A server that is far away: a proxy that holds back what passes, and counts the round trips."""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from tests.processes import CONTEXT


class Distance:
    """Between its clients and a server with a unix socket lie so many seconds, there and back.

    It is a process of its own, whose sockets nobody takes for those of its clients.
    """

    def __init__(self, server: Dsn, seconds: float = 0.0) -> None:
        path = str(Path(server.parts["host"]) / f".s.PGSQL.{server.parts['port']}")
        self._round_trips = CONTEXT.Value("q", 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._process = CONTEXT.Process(
            target=_serve, args=(self._listener, path, seconds / 2, self._round_trips), daemon=True
        )

    @property
    def round_trips(self) -> int:
        """How often a client has sent something after it had been answered."""
        return int(self._round_trips.value)

    def far(self, dsn: Dsn) -> Dsn:
        """A database of the server, from here."""
        host, port = self._listener.getsockname()
        parts = {**dsn.parts, "host": host, "port": port}
        return Dsn(make_conninfo("", **parts), bounds=dsn.bounds)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._listener.close()


def _serve(listener: socket.socket, path: str, one_way: float, round_trips: Any) -> None:
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arguments = (client, path, one_way, round_trips)
        threading.Thread(target=_pass_on, args=arguments, daemon=True).start()


def _pass_on(client: socket.socket, path: str, one_way: float, round_trips: Any) -> None:
    under_way: SimpleQueue[tuple[float, socket.socket, bytes]] = SimpleQueue()
    answered = True
    with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
        server.connect(path)
        threading.Thread(target=_arrive, args=[under_way], daemon=True).start()
        while True:
            ready = select.select([client, server], [], [])[0]
            for here, there in ((client, server), (server, client)):
                if here not in ready:
                    continue
                data = here.recv(1 << 16)
                under_way.put((time.monotonic() + one_way, there, data))
                if not data:
                    return
                if answered and here is client:
                    with round_trips.get_lock():
                        round_trips.value += 1
                answered = here is server


def _arrive(under_way: SimpleQueue[tuple[float, socket.socket, bytes]]) -> None:
    with suppress(OSError):
        while True:
            due, there, data = under_way.get()
            if not data:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            there.sendall(data)
