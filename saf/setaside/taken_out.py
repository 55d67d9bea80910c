"""Messages that operators took out of a forwarder's lanes, though they may have been stored.

If the destination has stored them and its answer was lost, its mark passes these messages, and they
are in no lane any more. So the source remembers their lanes, shards and batches. Otherwise the
source would seem to have been set back; see `saf.destinations.marks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from saf.setaside.lane import THE_LANE

KEPT_DAYS = 365
"""After a longer absence of a destination, `saf rebase` is needed."""

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
