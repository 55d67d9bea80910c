"""A relay in front of a server, for tests that want something to happen on the way."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

Link = Callable[[bytes, bool], bytes | None]
"""What becomes of bytes, and of whether they go to the server; None: the connection is cut."""


class Relay:
    """Passes everything on between an address of its own and a server.

    Args:
        to: the server's port on 127.0.0.1, or the path of its unix socket.
        listener: where clients connect; by default a port of 127.0.0.1.
    """

    def __init__(self, to: int | str, listener: socket.socket | None = None) -> None:
        self._family = socket.AF_UNIX if isinstance(to, str) else socket.AF_INET
        self._to = to if isinstance(to, str) else ("127.0.0.1", to)
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.host: str
        self.port: int
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def link(self) -> Link:
        """What happens on one connection."""
        return lambda data, _: data

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server, link = socket.socket(self._family), self.link()
        with client, server, suppress(OSError):
            server.connect(self._to)
            while True:
                for one in select.select([client, server], [], [])[0]:
                    data = one.recv(1 << 16)
                    passes = link(data, one is client) if data else None
                    if passes is None:
                        return
                    (server if one is client else client).sendall(passes)
