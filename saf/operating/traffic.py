"""Traffic: how many messages a broker has sent, stored and set aside since it was asked before.

The figures (`saf.operating.figures`) are states, such as the messages that are pending now. From
two states, nobody can tell how many messages passed in between. `meter` returns a function that
counts them, by service, each time it is asked. It remembers the last snapshot of each connection,
so the first answer over a connection contains no messages.

- *Sent* and *stored*: the messages that the outbox and the inbox have got since, counted like a
  backlog (`saf.log.backlog.written_since`): bounded, and estimated beyond. If nothing was committed
  since, no log is read.
- *Parked* and *dead*: the new rows of both tables, by their numbers. At most `MOST` are read, so
  more count as `MOST`. Messages that wait for their time, or that an operator has sent again, are
  no failures, and are not counted. A number may be committed after a greater one, so each answer
  looks again at the numbers that the answer before has counted. Rows that come and go between two
  answers are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.log.backlog import written_since
from saf.setaside.lane import Kind

MOST = 10_000
"""New rows of a table that are read at most."""

NO_FAILURES = (Kind.RETRY, Kind.REPLAY, Kind.FOUND_RETRY, Kind.FOUND_REPLAY, Kind.LATER, Kind.AHEAD)
"""Lanes of messages that no attempt has failed for."""

# The newest first, so that a bound leaves out the oldest. A message that an operator has returned
# to a receiver has the number of the audit's line in place of a batch (`saf.operating.decide`)
PARKED = """
SELECT parked_id, to_service, kind <> ALL ({no_failures}::text[])
       AND NOT (kind = {key} AND EXISTS (
           SELECT FROM saf.audit a
           WHERE a.audit_id = p.batch AND p.message_id = ANY (a.message_ids)))
FROM saf.parked p
WHERE parked_id > {floor} ORDER BY parked_id DESC LIMIT {most}
"""
DEAD = """
SELECT dead_letter_id, to_service, true FROM saf.dead_letter
WHERE dead_letter_id > {floor} ORDER BY dead_letter_id DESC LIMIT {most}
"""
SNAPSHOT = "SELECT pg_current_snapshot()::text"
LAST = """
SELECT (SELECT coalesce(max(parked_id), 0) FROM saf.parked),
       (SELECT coalesce(max(dead_letter_id), 0) FROM saf.dead_letter)
"""

Counts = Mapping[str, float]
"""Messages by service."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of a broker since the answer before, by service."""

    sent: Counts = field(default_factory=dict)
    stored: Counts = field(default_factory=dict)
    parked: Counts = field(default_factory=dict)
    dead: Counts = field(default_factory=dict)


@dataclass(kw_only=True)
class _Numbers:
    """The numbers of one table that were counted."""

    statement: str
    floor: int
    counted: frozenset[int] = frozenset()

    def new(self, connection: psycopg.Connection[Any]) -> Counter[str]:
        """Count the rows that are new since the last time."""
        query = sql.SQL(self.statement).format(
            floor=sql.Literal(self.floor),
            most=sql.Literal(MOST),
            key=sql.Literal(str(Kind.KEY)),
            no_failures=sql.Literal([str(kind) for kind in NO_FAILURES]),
        )
        rows = fetch(connection, query)
        found = Counter(
            service
            for number, service, is_failure in rows
            if is_failure and number not in self.counted
        )
        # the next answer looks again at the rows since the answer before this one
        self.floor = max(self.counted, default=self.floor)
        self.counted = frozenset(number for number, *_ in rows)
        return found


@dataclass(kw_only=True)
class _Before:
    """State at the last answer."""

    snapshot: str
    parked: _Numbers
    dead: _Numbers


def meter() -> Callable[[psycopg.Connection[Any]], Traffic]:
    """Return the function that asks one broker for its traffic; each connection is one broker's.

    It only reads, and the connection must be in autocommit.
    """
    before: WeakKeyDictionary[psycopg.Connection[Any], _Before] = WeakKeyDictionary()

    def ask(connection: psycopg.Connection[Any]) -> Traffic:
        last = before.get(connection)
        if last is None:
            snapshot, _ = written_since(connection, None)
            ((parked, dead),) = fetch(connection, LAST)
            before[connection] = _Before(
                snapshot=snapshot,
                parked=_Numbers(statement=PARKED, floor=parked),
                dead=_Numbers(statement=DEAD, floor=dead),
            )
            return Traffic()
        if fetch(connection, SNAPSHOT) == [(last.snapshot,)]:
            return Traffic()
        last.snapshot, written = written_since(connection, last.snapshot)
        logs: dict[str, Counter[str]] = {"outbox": Counter(), "inbox": Counter()}
        for name, backlog in written.items():
            for (service, _), part in backlog.by_address.items():
                logs[name][service] += round(part.messages)
        return Traffic(
            sent=logs["outbox"],
            stored=logs["inbox"],
            parked=last.parked.new(connection),
            dead=last.dead.new(connection),
        )

    return ask
