"""Held messages: those that are due later, which the forwarder moves to the outbox.

An application holds, cancels and reschedules messages by the functions of the schema
(migrations/baseline/held.sql). Any forwarder of a broker moves due messages, even if it owns no
shards: one call of saf.move_held, in a transaction of its own, moves one chunk. If the answer of a
commit gets lost, the messages are in the outbox, and the next call does not find them.

Messages are due by the database's clock. A message that a sender changes at this moment is found by
a later call. A message that no rule of `saf sender` allows any more, or that the outbox rejects,
stays held, with the reason in the column ``refused``; it is not found again until that is NULL.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from saf.database import fetch
from saf.log.cursor import RELAXED

MOST = 1000
"""Messages that one transaction moves, or names that one transaction forgets."""
MOVING_SECONDS = 2.0
"""Time for which a visit moves messages before it forwards them, in seconds."""

DUE_IN = """
(SELECT extract(epoch FROM min(due) - clock_timestamp())::float FROM saf.held
 WHERE due IS NOT NULL AND refused IS NULL)
"""
"""SQL: seconds until the next message is due; NULL if none is held."""

# The commit does not wait for the disk: if a crash loses it, the messages are still held. The batch
# that forwards them is opened durably.
MOVE = f"SELECT saf.move_held(%(most)s) FROM {RELAXED}"
FORGET = "SELECT saf.forget_names(%(most)s)"


def move(connection: psycopg.Connection[Any], seconds: float = MOVING_SECONDS) -> tuple[int, bool]:
    """Move messages that are due, in chunks, for up to ``seconds``.

    The connection is in autocommit.

    Returns:
        How many messages were found, and whether more may be due.
    """
    found, until = 0, time.monotonic() + seconds
    while True:
        ((chunk,),) = fetch(connection, MOVE, {"most": MOST})
        found += int(chunk)
        if chunk < MOST:
            return found, False
        if time.monotonic() > until:
            return found, True


def forget(connection: psycopg.Connection[Any]) -> int:
    """Forget names that may be used again, in chunks; return how many.

    The connection is in autocommit.
    """
    forgotten = 0
    while True:
        ((chunk,),) = fetch(connection, FORGET, {"most": MOST})
        forgotten += int(chunk)
        if chunk < MOST:
            return forgotten
