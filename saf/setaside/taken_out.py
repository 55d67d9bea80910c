"""What people took out of lanes of the forwarder: the destination may have stored it all the same.

If it has, and its answer got lost, its mark passes these messages, and no lane has them any more.
So the source remembers of which lanes, shards and batches they were. Without that it would take
itself for one that was set back; see `saf.destinations.marks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from saf.setaside.lane import THE_LANE

KEPT_DAYS = 365
"""A destination that was away for longer is answered by `saf rebase`."""

NOTE = f"""
INSERT INTO saf.taken_out (subscription_id, {THE_LANE}, shard, opened_at)
SELECT DISTINCT subscription_id, {THE_LANE}, shard, opened_at
FROM saf.parked JOIN saf.subscription USING (subscription_id)
WHERE parked_id = ANY (%(parked_ids)s) AND log = 'outbox' AND destination <> ''
  AND opened_at IS NOT NULL
ON CONFLICT DO NOTHING
"""
FORGET = f"DELETE FROM saf.taken_out WHERE taken_out_at < now() - interval '{KEPT_DAYS} days'"


def note(connection: psycopg.Connection[object], parked_ids: Sequence[int]) -> None:
    """Remember these parked messages' batches. Call it in the transaction that takes them out."""
    connection.execute(FORGET)
    connection.execute(NOTE, {"parked_ids": list(parked_ids)})
