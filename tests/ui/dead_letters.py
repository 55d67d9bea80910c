"""Many dead letters at once, and how many are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from saf.database import Dsn
from saf.setaside.selection import DeadLetters
from tests.pipeline import connect

LETTER = """
INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error, to_service,
                             key, body)
SELECT subscription_id, 'mom', 0, n, 'rejected', 'no', 'billing', 'k', ''
FROM saf.subscription, generate_series(1, %s) AS n WHERE log = 'outbox' AND name = 'forwarder'
"""
SECOND_CHUNK = """
SELECT FROM saf.dead_letter
WHERE dead_letter_id = (SELECT min(dead_letter_id) + 1500 FROM saf.dead_letter) FOR UPDATE
"""


def many(app: Dsn, count: int = 2500) -> None:
    """Let so many messages be dead letters; decisions are made by chunks of 1,000."""
    with connect(app) as connection:
        connection.execute(LETTER, [count])


def letters(app: Dsn) -> int:
    """How many dead letters there are."""
    with connect(app) as connection:
        return DeadLetters().count(connection, 1_000_000).messages


@contextmanager
def second_chunk_held(app: Dsn) -> Iterator[None]:
    """Let a decision about all wait for a row of its second chunk until the block ends."""
    with connect(app) as holder:
        holder.execute("BEGIN")
        holder.execute(SECOND_CHUNK)
        yield
