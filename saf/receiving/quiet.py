"""Quiet: an idle receiver asks, by one statement, whether anything is new since it found nothing.

To look for something to claim is many questions: for each shard, whether it has rows that its own
cursor does not know, in each slot of the inbox. But a receiver that found nothing a moment ago
needs to know only what has changed since a snapshot that it took before. `ASK` says that, of all
shards at once:

- whether there are rows that are not visible in that snapshot;
- whether a lane of the subscription has become due, or waits for a handler that this receiver has;
- whether somebody has left a batch open, or has died with a shard in hand;
- how many shards this receiver may claim, and their epochs, which tell that owners have changed.

If nothing has changed, there is still nothing to claim. Now and then the receiver looks itself all
the same (`SURE_SECONDS`), for a cursor that a person has set back.

On a server where nobody writes, even that is not asked. As long as no transaction that has written
anything ends, the server's snapshot stays the same, and only time can bring something: a lane that
becomes due.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from saf.database import fetch
from saf.log.shards import ALL_SHARDS, LAST, failed
from saf.receiving.claim import PLAN_ONCE
from saf.receiving.hand import Reader
from saf.receiving.retries import HANDLED, params_of
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED

SURE_SECONDS = 5.0
"""How long a receiver relies on what has not changed, in seconds."""

SNAPSHOT = "SELECT pg_current_snapshot()::text"

SHARDS = f"ARRAY(SELECT s::smallint FROM {ALL_SHARDS} AS s)"
ASK = f"""
SELECT pg_current_snapshot()::text, free.shards, free.epochs,
    EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard IS NOT NULL
              AND b.next_attempt_at < '{BLOCKED}')
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}'),
    free.left_behind
 OR EXISTS (SELECT FROM saf.inbox i
            WHERE i.shard = ANY ({SHARDS}) AND i.txid >= pg_snapshot_xmax(%(seen)s::pg_snapshot))
 OR EXISTS (SELECT FROM saf.inbox i
            WHERE i.shard = ANY ({SHARDS})
              AND i.txid = ANY (ARRAY(SELECT pg_snapshot_xip(%(seen)s::pg_snapshot))))
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


class Quiet:
    """What a receiver knows of the last time that it found nothing."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        """The snapshot, the shards and their epochs when there was nothing."""
        self._until = 0.0
        self._asked: tuple[Any, ...] | None = None
        self._untouched = ""
        """The snapshot before a look that found nothing, if nothing becomes due by itself. One in
        which only `ASK` was asked does not count: a cursor may have been set back before."""
        self._becomes_due = False

    def is_certain(self, raw: psycopg.Connection[Any]) -> bool:
        """Whether nobody has written anything at all since there was nothing; one statement."""
        return self._untouched != "" and fetch(raw, SNAPSHOT) == [(self._untouched,)]

    def lasts(self, raw: psycopg.Connection[Any], reader: Reader) -> bool:
        """Whether there is still nothing. Call it in a transaction of its own.

        Otherwise look, and say so by `nothing` if there is nothing.
        """
        raw.execute(PLAN_ONCE)
        seen, *free = self._known or (None, None, None)
        asked = fetch(raw, ASK, {**params_of(reader), "seen": seen})
        ((snapshot, *now, self._becomes_due, changed),) = asked
        self._asked = (snapshot, *now)
        return not changed and now == free and time.monotonic() < self._until

    def nothing(self) -> None:
        """Note that a look found nothing, neither to claim nor to try alone."""
        # what was asked before that look; nothing, if it was the first
        self._known, self._asked = self._asked, None
        self._untouched = self._known[0] if self._known and not self._becomes_due else ""
        self._until = time.monotonic() + SURE_SECONDS
