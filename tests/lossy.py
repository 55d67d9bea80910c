"""A proxy in front of a server of any kind, that on command loses the answers to a request."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Self


class Lossy:
    """Passes everything on between a port of its own and the server's."""

    def __init__(self, port: int) -> None:
        self.lost = 0
        """How many connections were cut instead of an answer."""
        self._server = port
        self._request = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def lose_answers_to(self, request: bytes) -> None:
        """From now on, whoever sends a request with these bytes gets no answer; empty: all do."""
        self._request = request

    def _answer(self, data: bytes) -> bytes:
        """What a client gets of what the server says."""
        return data

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket()
        cut = False
        with client, server, contextlib.suppress(OSError):
            server.connect(("127.0.0.1", self._server))
            while True:
                for one in select.select([client, server], [], [])[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    if one is server and cut:
                        self.lost += 1
                        return
                    if one is client:
                        server.sendall(data)
                    else:
                        client.sendall(self._answer(data))
                    if one is client and self._request and self._request in data:
                        cut = True
