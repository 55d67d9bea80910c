"""Rates: how many messages a time, counted over all processes by one row of the database.

The row (saf.allotment) has the time from which the next message is free. A process takes a *share*
of permits for the messages that follow: one statement moves that time on by what they take at the
rate, and the process waits until the first of them is free (`take`). Nothing is written per
message. Unused permits are given back (`give_back`); those of a process that is killed are lost, so
a share is small: `SHARE_SECONDS` of the rate, or one message.

Nobody reserves permits further ahead than `AHEAD_SECONDS`. So after the database's clock was set
back, a time further ahead counts as now, and nobody waits for the old time to come. Of a quiet
time, at most `SAVED_SECONDS` of the rate are saved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.database import fetch
from saf.log.cursor import RELAXED

SHARE_SECONDS = 0.05
"""Part of the rate that a process takes at a time, in seconds."""

AHEAD_SECONDS = 1.0
"""How far ahead of the clock permits may be reserved, in seconds."""

SAVED_SECONDS = 0.1
"""How much of a quiet time's permits may be used later, in seconds of the rate."""

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
FORM = re.compile(r"(\d{1,7})/(s|min|h)")

_FREE = """
CASE WHEN a.next_free_at > clock_timestamp() + make_interval(secs => %(farthest)s)
     THEN clock_timestamp()
     ELSE greatest(a.next_free_at, clock_timestamp() - make_interval(secs => %(saved)s)) END
"""
# The commit does not wait for the disk: a crash that loses it lets a share through twice
TAKE = f"""
INSERT INTO saf.allotment AS a (subscription_id, destination, next_free_at)
SELECT %(subscription_id)s, %(destination)s, clock_timestamp() + make_interval(secs => %(takes)s)
FROM {RELAXED}
ON CONFLICT (subscription_id, destination) DO UPDATE
SET next_free_at = {_FREE} + make_interval(secs => %(takes)s)
WHERE {_FREE} <= clock_timestamp() + make_interval(secs => %(ahead)s)
RETURNING extract(epoch FROM a.next_free_at - clock_timestamp())::float8 - %(takes)s
"""
NEXT = """
SELECT extract(epoch FROM next_free_at - clock_timestamp())::float8 FROM saf.allotment
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
"""
GIVE_BACK = f"""
UPDATE saf.allotment SET next_free_at = next_free_at - make_interval(secs => %(takes)s)
FROM {RELAXED} WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
"""


def per_second(text: str) -> float:
    """Return the messages per second that a rate allows.

    >>> per_second("100/s"), per_second("30/min")
    (100.0, 0.5)

    Raises:
        ValueError: the text is not a rate, or the rate is 0.
    """
    found = FORM.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise ValueError(f"{text!r} is not a rate such as '100/s', '30/min' or '500/h'")
    return int(found[1]) / UNITS[found[2]]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a process got when it asked for permits."""

    permits: int
    """Messages that it may take; 0 if it has to ask again."""
    wait_seconds: float
    """Time until it may take the first of them, or until it should ask again."""


def share(rate: float) -> int:
    """Return the number of permits that a process takes at a time.

    >>> share(100.0), share(1 / 60), share(100_000.0)
    (5, 1, 5000)
    """
    return max(1, int(rate * SHARE_SECONDS))


def take(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    rate: float,
    most: int,
    destination: str = "",
) -> Share:
    """Take a share of a subscription's permits, ``rate`` a second; at most ``most`` permits.

    With ``destination``, they are those of a destination of the forwarder.

    Call it in a transaction of its own, or outside of any: others wait for its end.
    """
    permits = min(share(rate), most)
    takes = permits / rate
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "takes": takes,
        "ahead": AHEAD_SECONDS,
        "farthest": AHEAD_SECONDS + takes,
        "saved": SAVED_SECONDS,
    }
    taken = fetch(connection, TAKE, params)
    if taken:
        return Share(permits=permits, wait_seconds=max(0.0, taken[0][0]))
    ahead = fetch(connection, NEXT, params)
    return Share(permits=0, wait_seconds=max(0.0, ahead[0][0] - AHEAD_SECONDS if ahead else 0.0))


def give_back(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    rate: float,
    permits: int,
    destination: str = "",
) -> None:
    """Give back unused permits. Call it like `take`."""
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "takes": permits / rate,
    }
    connection.execute(GIVE_BACK, params)
