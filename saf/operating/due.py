"""Due: the number of lanes that a retry would try now, and the number that would keep waiting.

Some lanes wait for events that an operator's "now" cannot hasten: the time of each message, an
earlier message of the dialog, a receiver that handles the type, or an operator's decision about a
dead letter of the same key. `saf.setaside.waiting.retry_now` leaves them as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from saf.database import fetch
from saf.setaside.waiting import ANY, TRIED, Lanes, parked

# Lanes of messages that wait for an earlier message of a dialog have no row here
COUNT = f"SELECT count(*) FROM saf.backoff WHERE {TRIED}"


@dataclass(frozen=True, kw_only=True)
class Due:
    """Numbers of lanes of a broker that a retry would affect."""

    tried: int
    others: int
    """Lanes that match, but would keep waiting."""


def due(connection: psycopg.Connection[Any], lanes: Lanes = ANY) -> Due:
    """Return how many of the lanes would be tried now. Reads only."""
    ((tried,),) = fetch(connection, COUNT, asdict(lanes))
    every = parked(connection, 1, lanes=lanes, most=1).lanes
    return Due(tried=tried, others=max(0, every - tried))
