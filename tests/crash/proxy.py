"""A relay in front of a database server, that on command loses the answers to COMMIT.

It may listen as a machine on a network of its own, which can vanish.
"""

from __future__ import annotations

from tests.crash.network import Elsewhere
from tests.lossy import Lossy

COMMIT = b"COMMIT"


class Proxy(Lossy):
    """Passes everything on between its address and the server's unix socket."""

    def __init__(self, folder: str, away: Elsewhere | None = None) -> None:
        super().__init__(f"{folder}/.s.PGSQL.5432", away.listen() if away else None)

    def lose_answer(self, armed: bool = True) -> None:
        """From now on, no COMMIT that reaches the server is answered."""
        self.lose_answers_to(COMMIT if armed else b"")
