"""In hand: a destination's parked messages that tasks deliver, or an operator decides about.

A task reads parked messages, delivers them, and takes them out of their lanes afterwards. If an
operator discarded or redirected a message in between, it would still arrive. So both lock the lanes
of a destination at the source: tasks together (`share`), an operator alone (`alone`), and each only
as long as needed. A task has the lanes of one destination at a time, for its turn of some seconds;
an operator has them for one transaction. Both wait no longer than their session's bound for locks.

The lock belongs to a session. A task that has lost its session takes the lock again, and checks
again which messages are left (`saf.engine.parked_lanes`). Messages that were on their way to the
destination at that moment may arrive although an operator has decided about them, like any message
whose answer was lost: no source can know.

Messages that operators take out of a forwarder's lanes may have been stored, too. If the
destination has stored them and its answer was lost, its mark passes these messages, and they are in
no lane any more. So the source remembers their lanes, shards and batches (`note`). Otherwise the
source would seem to have been set back; see `saf.destinations.marks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from saf.errors import Unavailable
from saf.setaside.lane import THE_LANE

LANES = """
hashtextextended('saf parked ' || %(subscription_id)s || ' ' || %(destination)s, 0)
"""
SHARE = f"SELECT pg_advisory_lock_shared({LANES})"
LET_GO = f"SELECT pg_advisory_unlock_shared({LANES})"
ALONE = f"SELECT pg_advisory_xact_lock({LANES})"

KEPT_DAYS = 365
"""Days to remember; after a longer absence of a destination, `saf rebase` is needed."""

NOTE = f"""
INSERT INTO saf.taken_out (subscription_id, {THE_LANE}, shard, opened_at)
SELECT DISTINCT subscription_id, {THE_LANE}, shard, opened_at
FROM saf.parked JOIN saf.subscription USING (subscription_id)
WHERE parked_id = ANY (%(parked_ids)s) AND log = 'outbox' AND destination <> ''
  AND opened_at IS NOT NULL
ON CONFLICT DO NOTHING
"""
FORGET = f"DELETE FROM saf.taken_out WHERE taken_out_at < now() - interval '{KEPT_DAYS} days'"


def share(connection: psycopg.Connection[Any], subscription_id: int, destination: str) -> None:
    """Take the lanes of a destination in hand, beside other tasks, until `let_go`."""
    params = {"subscription_id": subscription_id, "destination": destination}
    connection.execute(SHARE, params)


def let_go(connection: psycopg.Connection[Any], subscription_id: int, destination: str) -> None:
    """Release the lanes of a destination."""
    params = {"subscription_id": subscription_id, "destination": destination}
    connection.execute(LET_GO, params)


def alone(connection: psycopg.Connection[Any], lanes: Iterable[tuple[int, str]]) -> None:
    """Take lanes in hand until the transaction ends, each by subscription_id and destination.

    Raises:
        Unavailable: a forwarder has them in hand for longer than the session's bound for locks.
    """
    for subscription_id, destination in sorted(lanes):
        params = {"subscription_id": subscription_id, "destination": destination}
        try:
            connection.execute(ALONE, params)
        except psycopg.errors.LockNotAvailable:
            what = f"destination {destination!r}" if destination else "messages without a route"
            raise Unavailable(
                what, "a forwarder is delivering its parked messages: decide again in a moment"
            ) from None


def note(connection: psycopg.Connection[object], parked_ids: Sequence[int]) -> None:
    """Remember these parked messages' batches. Call it in the transaction that takes them out."""
    connection.execute(FORGET)
    connection.execute(NOTE, {"parked_ids": list(parked_ids)})
