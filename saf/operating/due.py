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
from saf.setaside.waiting import ANY, TRIED, Lanes, parked

# Lanes of messages that are ahead of others have no row here
COUNT = f"SELECT count(*) FROM saf.backoff WHERE {TRIED}"


@dataclass(frozen=True, kw_only=True)
class Due:
    """How many lanes of a broker a word would be about."""

    tried: int
    others: int
    """Those that match, and would go on waiting."""


def due(connection: psycopg.Connection[Any], lanes: Lanes = ANY) -> Due:
    """Return how many of the lanes would be tried now. Only reads."""
    ((tried,),) = fetch(connection, COUNT, asdict(lanes))
    every = parked(connection, 1, lanes=lanes, most=1).lanes
    return Due(tried=tried, others=max(0, every - tried))
