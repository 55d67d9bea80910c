"""Lanes that wait for a handler, and for which type of message each does.

A message whose type no handler takes waits in the lane of its key, and the later messages of the
key wait behind it. A receiver that handles the type must find the lane; one that does not must
leave it alone, or the two would pass it to and fro for as long as a deployment lasts.

Such a lane has no time to wait for, so ``next_attempt_at`` says the type: it is a moment in the
years 5000 to 8999, computed from the type's name (`moment`). No clock comes there, so nothing takes
the lane for due, and the index that finds what is due finds the lanes of some types as well.

If two names had the same moment (1 in 10^17), a receiver would be handed a lane that it cannot
handle, and would put it back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import psycopg
from psycopg.rows import class_row

from saf.setaside.lane import SAME_LANE, Kind

FIRST, END = datetime(5000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""The first moment, which is that of messages without a type, and the first one after the last."""

OF_TYPES = "b.next_attempt_at = ANY (%(moments)s::timestamptz[])"
"""SQL: whether a lane b of saf.backoff waits for a handler of some types."""
OF_ANY_TYPE = f"b.next_attempt_at >= '{FIRST}' AND b.next_attempt_at < '{END}'"
"""SQL: whether a lane b of saf.backoff waits for a handler, of whatever type."""

# The first message of a lane says the type: it is the one that has no handler
BY_TYPE = f"""
SELECT s.name AS subscription, first.message_type, count(*) AS keys,
       sum(waiting.messages)::bigint AS messages, min(b.since) AS since
FROM saf.backoff b
JOIN saf.subscription s USING (subscription_id)
CROSS JOIN LATERAL (
    SELECT message_type FROM saf.parked p WHERE {SAME_LANE} ORDER BY id LIMIT 1) AS first
CROSS JOIN LATERAL (SELECT count(*) AS messages FROM saf.parked p WHERE {SAME_LANE}) AS waiting
WHERE b.kind = '{Kind.KEY}' AND {OF_ANY_TYPE}
GROUP BY 1, 2 ORDER BY 1, 2 NULLS FIRST
"""


@dataclass(frozen=True, kw_only=True)
class Unhandled:
    """The messages of a subscription that wait for a handler of one type."""

    subscription: str
    message_type: str | None
    keys: int
    messages: int
    """With those that wait behind one of this type."""
    since: datetime

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"since": self.since.isoformat()}

    def __str__(self) -> str:
        what = "without a type" if self.message_type is None else f"of type {self.message_type!r}"
        some = f"{self.messages:,} message{'s' * (self.messages != 1)}"
        return f"{some} {what} wait{'s' * (self.messages == 1)} for a handler"


def unhandled(connection: psycopg.Connection[Any]) -> list[Unhandled]:
    """Return what waits for a handler in a broker, by subscription and type. Only reads."""
    with psycopg.Cursor(connection, row_factory=class_row(Unhandled)) as cursor:
        return cursor.execute(BY_TYPE).fetchall()


def moment(message_type: str | None) -> datetime:
    """The moment that stands for a type.

    >>> moment(None).year, moment("OrderPaid") == moment("OrderPaid") < END
    (5000, True)
    """
    if message_type is None:
        return FIRST
    digest = sha256(message_type.encode(errors="surrogatepass")).digest()
    microseconds = (END - FIRST) // timedelta(microseconds=1) - 1
    return FIRST + timedelta(microseconds=1 + int.from_bytes(digest) % microseconds)


def moments(types: Collection[str | None]) -> list[datetime]:
    """The moments that stand for some types."""
    return [moment(one) for one in types]
