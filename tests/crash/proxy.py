"""A proxy in front of a server, that on command loses the answer to a COMMIT.

It may listen as a machine on a network of its own, which can vanish.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from tests.crash.network import Elsewhere

COMMIT = b"COMMIT"


class Proxy:
    """Passes everything on between its address and the server's unix socket."""

    def __init__(self, folder: str, away: Elsewhere | None = None) -> None:
        self.server = f"{folder}/.s.PGSQL.5432"
        self.lost = 0
        """How many answers were lost so far."""
        self._armed = threading.Event()
        self._listener = away.listen() if away else socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer(self, armed: bool = True) -> None:
        """From now on, no COMMIT that reaches the server is answered."""
        if armed:
            self._armed.set()
        else:
            self._armed.clear()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        with client, server, contextlib.suppress(OSError):
            server.connect(self.server)
            while True:
                for one in select.select([client, server], [], [])[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    (server if one is client else client).sendall(data)
                    if one is client and COMMIT in data and self._armed.is_set():
                        server.recv(1 << 16)  # it is done by the time that it says so
                        self.lost += 1
                        return
