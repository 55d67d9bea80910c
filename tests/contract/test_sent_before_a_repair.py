"""What is sent to a restored database before its repair: all of it arrives, each key in its order.

A savepoint has a transaction id of its own, which is not the one that its rows name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
import pytest

from saf.broker.embedded import EmbeddedServer
from saf.database import Dsn
from saf.testing.cycle import Cycle, forwarding_rules
from tests.pipeline import bodies, connect, run, send
from tests.restored import burn_transaction_ids, elsewhere, repair, restore

__all__ = ["elsewhere"]

KEYS = 5
FAR = 20_000
"""So far ahead that the other cluster does not get there."""


@contextmanager
def savepoint(connection: psycopg.Connection[Any]) -> Iterator[None]:
    connection.execute("SAVEPOINT one")
    yield
    connection.execute("RELEASE SAVEPOINT one")


class Application:
    """It numbers what it sends, to each of some keys in turn."""

    def __init__(self) -> None:
        self._numbers = count()
        self.sent: list[str] = []

    def send(self, app: Dsn) -> None:
        """By one transaction each: as it is, in a savepoint, and in a savepoint of a savepoint."""
        for nested in range(3):
            with app.connect(role="test") as connection:
                for key in range(KEYS):
                    self._send(connection, key, nested)

    def _send(self, connection: psycopg.Connection[Any], key: int, nested: int) -> None:
        if nested:
            with savepoint(connection):
                self._send(connection, key, nested - 1)
        else:
            self.sent.append(f"{key} {next(self._numbers)}")
            send(connection, self.sent[-1], key=str(key))

    def by_key(self, messages: list[str]) -> dict[str, list[str]]:
        """The messages of each key, in their order, the first of each."""
        once = dict.fromkeys(messages)
        return {str(key): [m for m in once if m.split()[0] == str(key)] for key in range(KEYS)}


def test_what_a_savepoint_has_sent_between_a_restore_and_the_repair_is_forwarded(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer
) -> None:
    burn_transaction_ids(app, FAR)
    with connect(app) as connection:
        send(connection, "before", key="k")
        run(app, mom=mom)
    copy = restore(app, elsewhere)
    with psycopg.connect(copy.conninfo) as connection:
        with savepoint(connection):
            send(connection, "0", key="k")
        send(connection, "1", key="k")
    repair(copy, mom)
    run(copy, mom=mom)
    assert bodies(mom) == ["before", "0", "1"]


@pytest.mark.parametrize("chunk_rows", [2, 1000])
@pytest.mark.parametrize("quality", ["exactly_once", "at_least_once", "at_most_once"])
def test_what_is_sent_between_a_restore_and_the_repair_follows_what_the_dump_had_pending(
    app: Dsn, mom: Dsn, elsewhere: EmbeddedServer, quality: str, chunk_rows: int
) -> None:
    burn_transaction_ids(app, FAR)
    application = Application()
    application.send(app)
    rules = forwarding_rules(quality, chunk_rows, mom=mom)
    with Cycle(app, rules) as cycle:
        cycle.open()  # the first batch is in hand, so that everything before it is new
        application.send(app)
        copy = restore(app, elsewhere)
    application.send(copy)
    repair(copy, mom)
    application.send(copy)
    with Cycle(copy, rules) as cycle:
        for _ in range(3):
            assert not [one.error for one in cycle.run() if one.error]
    assert application.by_key(bodies(mom)) == application.by_key(application.sent)
