"""Transactions that send into one outbox, stay open, and commit in another order, or not at all."""

from __future__ import annotations

from typing import Any

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.stateful.site import Place

SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES ('lake', %s, %s)"
MOST_OPEN = 3


class Senders(RuleBasedStateMachine):
    """What a machine about one outbox knows of those who send into it."""

    def __init__(self, app: Place) -> None:
        super().__init__()
        self.app = app
        self.open: list[tuple[psycopg.Connection[Any], list[Any]]] = []
        """Transactions that have not ended, and what each has sent."""
        self.committed: list[Any] = []

    def begin(self, messages: list[tuple[Any, str, bytes]], *, late: bool) -> None:
        """Send messages, by names with keys and bodies, in a transaction that may end later."""
        connection = self.app.database.connect()
        for _, key, body in messages:
            connection.execute(SEND, (key, body))
        self.open.append((connection, [name for name, _, _ in messages]))
        if not late or len(self.open) > MOST_OPEN:
            self.end(len(self.open) - 1, True)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, MOST_OPEN), commit=st.sampled_from((True, True, False)))
    def decide(self, which: int, commit: bool) -> None:
        """Such a transaction ends."""
        self.end(which % len(self.open), commit)

    def end(self, which: int, commit: bool) -> None:
        """End one of the transactions."""
        connection, names = self.open.pop(which)
        connection.commit() if commit else connection.rollback()
        connection.close()
        if commit:
            self.committed += names

    def commit_all(self) -> None:
        """Let all that is open commit."""
        while self.open:
            self.end(0, True)

    def close(self) -> None:
        """Leave nothing open."""
        while self.open:
            self.open.pop()[0].close()
