"""A relay in front of a server of any kind, that on command loses the answers to a request."""

from __future__ import annotations

import socket

from tests.relay import Link, Relay


class Lossy(Relay):
    """Passes everything on, until it is to lose answers."""

    def __init__(self, to: int | str, listener: socket.socket | None = None) -> None:
        self.lost = 0
        """How many connections were cut instead of an answer."""
        self._request = b""
        super().__init__(to, listener)

    def lose_answers_to(self, request: bytes) -> None:
        """From now on, whoever sends a request with these bytes gets no answer; empty: all do."""
        self._request = request

    def link(self) -> Link:
        """Cut the connection at the answer, which the server gives once it is done."""
        cut = False

        def passes(data: bytes, to_server: bool) -> bytes | None:
            nonlocal cut
            if to_server:
                cut = cut or bool(self._request and self._request in data)
                return data
            if cut:
                self.lost += 1
                return None
            return self.answer(data)

        return passes

    def answer(self, data: bytes) -> bytes:
        """What a client gets of what the server says."""
        return data
