"""Due: how many lanes would be tried at once, if somebody said so, and how many wait all the same.

Some lanes wait for what nobody can hasten by saying "now": for the time of each message, for an
earlier message of their dialog, for a receiver that handles their type, or for a person's decision
about a dead letter of the same key. `saf.setaside.waiting.retry_now` leaves them as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from saf.database import fetch
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED
from saf.setaside.waiting import ANY, Lanes, parked

# Lanes of messages that are ahead of others have no row here. Dead letters are read once for all
# keys that wait for a decision.
TRIED = f"""
SELECT count(*) FROM saf.backoff b
WHERE kind <> '{Kind.LATER}' AND NOT awaits_handler
  AND (kind <> '{Kind.KEY}' OR next_attempt_at < '{BLOCKED}' OR (subscription_id, subject) NOT IN (
      SELECT subscription_id, coalesce(key, message_id::text) FROM saf.dead_letter))
  AND (%(destination)s::text IS NULL OR destination = %(destination)s)
  AND (%(lane)s::text IS NULL OR kind = %(lane)s)
  AND (%(subject)s::text IS NULL OR subject = %(subject)s)
  AND (%(subscription)s::text IS NULL OR subscription_id IN (
      SELECT subscription_id FROM saf.subscription WHERE name = %(subscription)s))
"""


@dataclass(frozen=True, kw_only=True)
class Due:
    """How many lanes of a broker a word would be about."""

    tried: int
    others: int
    """Those that match, and would go on waiting."""


def due(connection: psycopg.Connection[Any], lanes: Lanes = ANY) -> Due:
    """Return how many of the lanes would be tried now. Only reads."""
    ((tried,),) = fetch(connection, TRIED, asdict(lanes))
    every = parked(connection, 1, lanes=lanes, most=1).lanes
    return Due(tried=tried, others=max(0, every - tried))
