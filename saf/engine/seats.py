"""Seats: how many tasks of a source store at a destination at a time.

A destination with a concurrency has that many seats at each source. A task takes a seat before it
stores, and frees the seat afterwards. Only seats up to the concurrency are taken, so a new limit
counts for each task that knows it.

A seat is an advisory lock of the task's session at the source, so nothing is written for it. The
server frees the seat of a process that was killed when the session ends. A task that hangs gives no
sign of life (`saf.engine.pulse`): its session ends after a lease, because a session with a seat may
idle no longer.

A task that has lost its session takes a seat again before it stores the next piece. The piece that
it stores at that moment may be finished beside the seat's next owner, like a statement that a
killed process has begun at a destination: no source can know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from saf.database import fetch

SEAT = """
hashtextextended('saf seat ' || {seat} || ' ' || %(subscription_id)s || ' ' || %(destination)s, 0)
"""
TAKE = f"""
SELECT seat, current_setting('idle_session_timeout'),
       set_config('idle_session_timeout', %(idle)s, false)
FROM generate_series(1, %(concurrency)s::int) AS seat
WHERE pg_try_advisory_lock({SEAT.format(seat="seat")}) LIMIT 1
"""
FREE = f"""
SELECT pg_advisory_unlock({SEAT.format(seat="%(seat)s")}),
       set_config('idle_session_timeout', %(idle)s, false)
"""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A seat that a session has."""

    session: psycopg.Connection[Any]
    subscription_id: int
    destination: str
    number: int
    idle: str
    """The session's bound for idleness before it took the seat."""

    def free(self) -> None:
        """Free the seat."""
        params = {
            "subscription_id": self.subscription_id,
            "destination": self.destination,
            "seat": str(self.number),
            "idle": self.idle,
        }
        self.session.execute(FREE, params)


def take(
    session: psycopg.Connection[Any],
    subscription_id: int,
    destination: str,
    concurrency: int,
    idle_seconds: float,
) -> Seat | None:
    """Take a free seat of a destination until `Seat.free`; None: all seats are taken.

    ``idle_seconds``: how long the session may idle meanwhile.
    """
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "concurrency": concurrency,
        "idle": f"{max(1, round(idle_seconds * 1000))}ms",
    }
    for number, idle, _ in fetch(session, TAKE, params):
        return Seat(
            session=session,
            subscription_id=subscription_id,
            destination=destination,
            number=number,
            idle=idle,
        )
    return None
