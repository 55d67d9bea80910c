"""Stretches: looking through an outbox for messages that few rows are, for a given time.

The outbox is read in the order of transactions, a stretch of them by each statement: one at first,
and up to four times as many each time, as long as there is time for it. So a page whose messages
lie close together costs little, one whose messages are rare says how far it came, and neither
depends on how long the log is. What one transaction has written is in one stretch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

GROWTH = 4
LEAST_SECONDS = 1e-4
"""What the quickest statement is taken to need."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a look has found, and how far it came."""

    rows: list[Row]
    place: str | None = None
    """The transaction to go on with; None if there is no other one, or the page is full."""
    before: datetime | None = None
    """About when that was sent."""


def look(
    following: Callable[[str], tuple[str, datetime] | None],
    within: Callable[[str, str, int], list[Row]],
    *,
    txid: str,
    limit: int,
    seconds: float,
) -> Looked:
    """Look for a page of messages; at least at one stretch.

    Args:
        following: returns the first transaction from one on that has messages, and when the first
            of these was created.
        within: returns messages of the transactions from one to another, of which the last is left
            out, and so many at most.
        txid: the transaction to begin with.
        limit: how many messages a page has.
        seconds: after so long, no other stretch begins.
    """
    until = time.monotonic() + seconds
    rows: list[Row] = []
    width = 0
    while (found := following(txid)) is not None:
        txid, sent_at = found
        now = time.monotonic()
        if width and now >= until:
            return Looked(rows=rows, place=txid, before=sent_at)
        width = width or 1
        after = str(int(txid) + width)
        rows += within(txid, after, limit - len(rows))
        if len(rows) == limit:
            break
        done = time.monotonic()
        txid, width = after, wider(width, done - now, until - done)
    return Looked(rows=rows)


def wider(width: int, took: float, left: float) -> int:
    """Return how many transactions the next stretch has, by what the last one took.

    >>> wider(16, took=0.001, left=0.08), wider(1000, took=0.02, left=0.03), wider(8, 0.5, -0.1)
    (64, 1500, 1)
    """
    in_time = int(width * left / max(took, LEAST_SECONDS))
    return max(1, min(GROWTH * width, in_time))
