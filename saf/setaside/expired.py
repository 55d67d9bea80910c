"""Messages that have expired while they waited for a route, so that they were sent nowhere.

They become dead letters immediately, whether or not a route exists by now. A message that is parked
for a destination may already be stored there, with the answer lost. So the destination is asked
about it first, when its lane is released (`saf.engine.releasing`).
"""

from __future__ import annotations

from typing import Any

import psycopg

from saf.columns import COLUMNS
from saf.log.cursor import Batch
from saf.setaside.lane import Kind

EXPIRED = "expires_at has passed"
"""The error of such a dead letter."""

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
