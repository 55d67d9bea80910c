"""Polling: which step a receiver takes next, and whether a search can find anything new.

`Search` is one search for messages, in steps: take messages, try one that failed before, or wait.
`Quiet` asks, by one statement, whether anything has changed since a search found nothing, and so
avoids most searches of an idle receiver.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any

import psycopg

from saf.database import fetch
from saf.log.read import since_shown
from saf.log.shards import ALL_SHARDS, LAST, failed
from saf.receiving.claim import PLAN_ONCE
from saf.receiving.delivery import Delivery
from saf.receiving.hand import Reader
from saf.receiving.retries import HANDLED, params_of
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED

SURE_SECONDS = 5.0
"""Time for which a receiver relies on an unchanged answer, in seconds."""

SNAPSHOT = "SELECT pg_current_snapshot()::text"

SHARDS = f"ARRAY(SELECT s::smallint FROM {ALL_SHARDS} AS s)"
ARRIVED = since_shown(columns="", shards=f"= ANY ({SHARDS})", done="%(seen)s::pg_snapshot")
ASK_WAITING = f"""
SELECT pg_current_snapshot()::text, free.shards, free.epochs,
    EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard IS NOT NULL
              AND b.next_attempt_at < '{BLOCKED}')
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}'),
    free.left_behind
 OR EXISTS ({ARRIVED})
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard IS NOT NULL
              AND b.next_attempt_at <= now())
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}' AND b.next_attempt_at <= now())
 OR EXISTS ({HANDLED})
FROM (
    SELECT count(*) AS shards, coalesce(sum(epoch), 0) AS epochs,
           coalesce(bool_or(open IS NOT NULL OR allowance IS NOT NULL OR {failed("touched")}),
                    false) AS left_behind
    FROM {ALL_SHARDS} AS s (shard) CROSS JOIN LATERAL (
        SELECT *, xmax AS touched FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (%(subscription_id)s, s.shard, {LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1
    ) AS c
    WHERE c.subscription_id = %(subscription_id)s AND c.shard = s.shard
      AND owner IS NOT DISTINCT FROM %(owner)s
) AS free
"""


class Step(Enum):
    """What a receiver does next."""

    TAKE = "take the next messages"
    TRY = "try a message alone that failed before"
    WAIT = "wait for messages"


class Search:
    """Which step comes next in the search for the messages of one delivery.

    Half of the searches begin with messages that failed before, so neither kind delays the other. A
    search that has found nothing to try does not try again before it has waited.

    >>> search = Search(tries_first=False)
    >>> search.tries(troubled=True), search.step.name
    (False, 'TAKE')
    >>> search.took(None, more=False, troubled=True); search.step.name
    'TRY'
    >>> search.tried(found=False); search.step.name, search.tries(troubled=True)
    ('TAKE', False)
    >>> search.took(None, more=False, troubled=True); search.step.name
    'WAIT'
    >>> search.waited(); search.tries(troubled=True), search.step.name
    (True, 'TRY')
    """

    def __init__(self, *, tries_first: bool) -> None:
        self.step = Step.TAKE
        self._tries_first = tries_first
        self._fruitless = False

    def tries(self, *, troubled: bool) -> bool:
        """Return whether to try a message instead of taking any. ``troubled``: some have failed."""
        tries = troubled and self._tries_first and not self._fruitless
        self.step = Step.TRY if tries else Step.TAKE
        return tries

    def took(self, delivery: Delivery[Any] | None, *, more: bool, troubled: bool) -> None:
        """Note what was taken. ``more``: the same shards may have more messages."""
        if delivery is not None or more:  # an empty delivery: all of its messages were set aside
            self.step = Step.TAKE
        elif troubled and not self._fruitless:
            self._tries_first, self.step = True, Step.TRY
        else:
            self.step = Step.WAIT

    def tried(self, *, found: bool) -> None:
        """Note whether there was a message to try."""
        self._fruitless, self.step = not found, Step.TAKE

    def waited(self) -> None:
        """Note that messages may have arrived."""
        self._fruitless, self.step = False, Step.TAKE

    def failed(self) -> None:
        """Note that a step was rolled back: the next one looks for messages to try."""
        self._tries_first, self.step = True, Step.TAKE


class Quiet:
    """A receiver's knowledge since it last found nothing.

    A search for messages to claim asks many questions: for each shard, whether it has rows unknown
    to its own cursor, in each slot of the inbox. But a receiver that found nothing a moment ago
    needs only the changes since an earlier snapshot. `ASK_WAITING` returns them for all shards
    together:

    - whether rows exist that are not visible in that snapshot;
    - whether a lane of the subscription has become due, or waits for a handler that this receiver
      has;
    - whether a receiver has left a batch open, or has died with a shard in hand;
    - how many shards this receiver may claim, and the sum of their epochs, which shows that owners
      have changed.

    If nothing has changed, there is still nothing to claim. From time to time the receiver searches
    all the same (`SURE_SECONDS`), because an operator may have set a cursor back.

    On a server without writes, even `ASK_WAITING` is skipped. While no transaction that has written
    ends, the server's snapshot stays the same, and only the passage of time can bring work: a lane
    that becomes due.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        """Snapshot, shard count and epochs when nothing was found."""
        self._until = 0.0
        self._asked: tuple[Any, ...] | None = None
        self._untouched = ""
        """Snapshot before a search that found nothing, if time alone makes nothing due. A snapshot
        followed by `ASK_WAITING` only does not count: a cursor may have been set back before it."""
        self._becomes_due = False

    def is_certain(self, raw: psycopg.Connection[Any]) -> bool:
        """Return whether nothing at all was written since nothing was found; one statement."""
        return self._untouched != "" and fetch(raw, SNAPSHOT) == [(self._untouched,)]

    def lasts(self, raw: psycopg.Connection[Any], reader: Reader) -> bool:
        """Return whether there is still nothing. Call it in a transaction of its own.

        If not, search, and call `nothing` if the search finds nothing.
        """
        raw.execute(PLAN_ONCE)
        seen, *free = self._known or (None, None, None)
        rows = fetch(raw, ASK_WAITING, {**params_of(reader), "seen": seen})
        ((snapshot, *now, self._becomes_due, changed),) = rows
        self._asked = (snapshot, *now)
        return not changed and now == free and time.monotonic() < self._until

    def nothing(self) -> None:
        """Note that a search found nothing, neither to claim nor to try alone."""
        # the answer before that search; none before the first
        self._known, self._asked = self._asked, None
        self._untouched = self._known[0] if self._known and not self._becomes_due else ""
        self._until = time.monotonic() + SURE_SECONDS
