"""Stretches: a time-limited search through an outbox for messages that few rows match.

The outbox is read in the order of transactions, a stretch of them per statement: one at first, and
up to four times as many each time, as long as time is left. So a page of messages that lie close
together costs little, a page of rare messages reports how far the search came, and neither depends
on the length of the log. All rows of a transaction are in one stretch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

GROWTH = 4
LEAST_SECONDS = 1e-4
"""Assumed minimum duration of a statement."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The result of a search, and where it stopped."""

    rows: list[Row]
    place: str | None = None
    """The transaction to continue with; None after the last one, or if the page is full."""
    before: datetime | None = None
    """About when that transaction's messages were sent."""


def look(
    following: Callable[[str], tuple[str, datetime] | None],
    within: Callable[[str, str, int], list[Row]],
    *,
    txid: str,
    limit: int,
    seconds: float,
) -> Looked:
    """Search for a page of messages, in at least one stretch.

    Args:
        following: Returns the first transaction, at or after the given one, that has messages, and
            when the first of these was created.
        within: Returns the messages of the transactions from the first one up to, but not
            including, the second one; at most the given number.
        txid: The transaction to begin with.
        limit: Maximum number of messages.
        seconds: Time after which no new stretch begins.
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
    """Return the size of the next stretch, in transactions, from the duration of the last one.

    >>> wider(16, took=0.001, left=0.08), wider(1000, took=0.02, left=0.03), wider(8, 0.5, -0.1)
    (64, 1500, 1)
    """
    in_time = int(width * left / max(took, LEAST_SECONDS))
    return max(1, min(GROWTH * width, in_time))
