"""Dropped: messages that a subscription took without handing them out, counted by reason.

Nobody misses these messages, so they are not kept. A row of saf.dropped counts the messages of a
shard, in the transaction that drops them, and names the last one; the log has that message until it
is purged. A counting process has the shard in hand, or is the only one with this reason, so no
process waits for another's count.

A message that an operator must decide about is not dropped, and becomes a dead letter instead.
`bury_unrouted` does this for messages that have expired while they waited for a route, so that they
were sent nowhere. They become dead letters immediately, whether or not a route exists by now. A
message that is parked for a destination may already be stored there, with the answer lost. So the
destination is asked about it first, when its lane is released (`saf.engine.releasing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.columns import COLUMNS
from saf.log.cursor import Batch
from saf.setaside.lane import Kind


class Reason(StrEnum):
    """Why nobody misses a message."""

    REPEAT = "repeat"
    """This end of the dialog has received it before."""
    ENDED = "ended"
    """Its dialog has ended or failed, at either end."""
    OVERTAKEN = "overtaken"
    """Its sender has sent an Error later, which was received instead."""
    EXPIRED = "expired"
    """The lifetime of its dialog is over."""
    OUTDATED = "outdated"
    """It is a timer, or an Error of the lifetime, that its dialog no longer waits for."""
    INCOMPLETE = "incomplete"
    """It is a fragment of a body whose rest did not come before its dialog was over.

    The purge or a cleanup drops it. Fragments have no ids, so the dialog's id is named.
    """
    LEFT_OUT = "left_out"
    """A forwarder's transform has left it out: counted once for each destination."""


# Adds to an existing count
ADD = """
ON CONFLICT (subscription_id, shard, reason) DO UPDATE SET
    messages = d.messages + excluded.messages, last_message_id = excluded.last_message_id,
    last_at = now()
"""

COUNT = f"""
INSERT INTO saf.dropped AS d (subscription_id, shard, reason, messages, last_message_id)
SELECT %(subscription_id)s, shard, reason, messages, message_id
FROM unnest(%(shards)s::smallint[], %(reasons)s::text[], %(messages)s::bigint[],
            %(message_ids)s::uuid[]) AS w (shard, reason, messages, message_id)
ORDER BY shard, reason
{ADD}
"""

COUNTED = """
SELECT coalesce(sum(messages), 0)::bigint FROM saf.dropped
WHERE subscription_id = %(subscription_id)s AND reason = %(reason)s
"""

LIST = """
SELECT s.name AS subscription, reason, sum(messages)::bigint AS messages, max(last_at) AS last_at,
       (array_agg(last_message_id ORDER BY last_at DESC))[1] AS last_message_id
FROM saf.dropped JOIN saf.subscription s USING (subscription_id)
GROUP BY 1, 2 ORDER BY 1, 2
"""

EXPIRED = "expires_at has passed"
"""The error of a dead letter that has expired."""

AT_ONCE = 10_000
"""Messages that become dead letters in one transaction."""

# Expired by the time at which the batch was opened, as for the batch's own messages. Messages that
# the batch itself has parked stay until its position has passed them, and so do messages that an
# operator is deciding about.
BURY = f"""
WITH gone AS (
    DELETE FROM saf.parked WHERE parked_id IN (
        SELECT parked_id FROM saf.parked
        WHERE subscription_id = %(subscription_id)s AND kind = '{Kind.ROUTE}'
          AND expires_at <= %(opened_at)s AND shard = ANY (%(shards)s)
          AND (id <= %(position)s OR opened_at IS DISTINCT FROM %(opened_at)s)
        ORDER BY expires_at LIMIT {AT_ONCE} FOR UPDATE SKIP LOCKED)
    RETURNING *
)
INSERT INTO saf.dead_letter
    (subscription_id, destination, shard, id, reason, error, {", ".join(COLUMNS)})
SELECT subscription_id, destination, shard, id, 'expired', %(error)s, {", ".join(COLUMNS)}
FROM gone ORDER BY parked_id
"""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Messages that a subscription has dropped for one reason, since counting began."""

    subscription: str
    reason: str
    messages: int
    last_at: datetime
    last_message_id: UUID

    def as_dict(self) -> dict[str, Any]:
        """Return the count as a dict for JSON."""
        last = {"last_at": self.last_at.isoformat(), "last_message_id": str(self.last_message_id)}
        return asdict(self) | last


def count(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    messages: Sequence[tuple[int, Reason, UUID]],
) -> None:
    """Count messages, each with a shard in hand, a reason and its id. Call it in a transaction."""
    counts: dict[tuple[int, Reason], tuple[int, UUID]] = {}
    for shard, reason, message_id in messages:
        before, _ = counts.get((shard, reason), (0, message_id))
        counts[shard, reason] = (before + 1, message_id)
    add(connection, subscription_id, counts)


def add(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    counts: Mapping[tuple[int, Reason], tuple[int, UUID]],
) -> None:
    """Add the number of dropped messages, and the last one's id, by shard and reason."""
    if counts:
        shards, reasons = zip(*counts, strict=True)
        messages, message_ids = zip(*counts.values(), strict=True)
        params = {
            "subscription_id": subscription_id,
            "shards": list(shards),
            "reasons": list(reasons),
            "messages": list(messages),
            "message_ids": list(message_ids),
        }
        connection.execute(COUNT, params)


def dropped(connection: psycopg.Connection[Any]) -> list[Dropped]:
    """Return each subscription's dropped messages, by reason."""
    with psycopg.Cursor(connection, row_factory=class_row(Dropped)) as cursor:
        return cursor.execute(LIST).fetchall()


def bury_unrouted(connection: psycopg.Connection[Any], batch: Batch) -> int:
    """Make dead letters of messages in a batch's shards that expired without a route; count them.

    If the result is `AT_ONCE`, there may be more. Call it in a transaction.
    """
    params = {
        "subscription_id": batch.subscription_id,
        "opened_at": batch.opened_at,
        "shards": batch.shards,
        "position": batch.position,
        "error": EXPIRED,
    }
    return connection.execute(BURY, params).rowcount
