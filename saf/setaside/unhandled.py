"""Lanes that wait for a handler, and the type of message that needs it.

A message whose type no handler takes waits in the lane of its key, and the later messages of the
key wait behind it. A receiver that handles the type must find the lane; a receiver that does not
must leave it alone, or the two would pass it to and fro for as long as a deployment lasts.

Such a lane ``awaits_handler``, and its ``message_type`` is that of its first message. It has no due
time, so it is never taken as due. An index finds the lanes of a type; searching for a type that no
lane waits for costs the same, however many lanes wait.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from saf.setaside.lane import SAME_LANE

FOR_ALL = "awaits_handler = false, message_type = NULL"
"""SQL: the columns of a lane of saf.backoff that any receiver may take, once it is due."""

BY_TYPE = f"""
SELECT s.name AS subscription, b.message_type, count(*) AS keys,
       sum(waiting.messages)::bigint AS messages, min(b.since) AS since
FROM saf.backoff b
JOIN saf.subscription s USING (subscription_id)
CROSS JOIN LATERAL (SELECT count(*) AS messages FROM saf.parked p WHERE {SAME_LANE}) AS waiting
WHERE b.awaits_handler
GROUP BY 1, 2 ORDER BY 1, 2 NULLS FIRST
"""

IMPOSSIBLE = re.compile("[\0\ud800-\udfff]")
"""Characters that PostgreSQL's text cannot contain."""


@dataclass(frozen=True, kw_only=True)
class Unhandled:
    """The messages of a subscription that wait for a handler of one type."""

    subscription: str
    message_type: str | None
    keys: int
    messages: int
    """Messages of this type, and those that wait behind them."""
    since: datetime

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict for JSON."""
        return asdict(self) | {"since": self.since.isoformat()}

    def __str__(self) -> str:
        what = "without a type" if self.message_type is None else f"of type {self.message_type!r}"
        count = f"{self.messages:,} message{'s' * (self.messages != 1)}"
        return f"{count} {what} wait{'s' * (self.messages == 1)} for a handler"


def unhandled(connection: psycopg.Connection[Any]) -> list[Unhandled]:
    """Return messages that wait for a handler in a broker, by subscription and type. Only reads."""
    with psycopg.Cursor(connection, row_factory=class_row(Unhandled)) as cursor:
        return cursor.execute(BY_TYPE).fetchall()


def awaited(shards: str) -> str:
    """Return SQL for some lanes in shards that wait for a handler of ``types``; NULL: of any type.

    ORDER BY the index makes the planner use it. If most lanes wait for one type, the planner
    assumes this of every type, and would scan the table, hoping to meet a lane early.
    """
    condition = f"""b.subscription_id = %(subscription_id)s AND b.awaits_handler
          AND b.shard = ANY ({shards})"""
    return f"""(SELECT b.shard, b.subject FROM unnest(%(types)s::text[]) AS t (message_type)
     CROSS JOIN LATERAL (
        SELECT b.shard, b.subject FROM saf.backoff b
        WHERE {condition}
          AND hashtextextended(b.message_type, 0) = hashtextextended(t.message_type, 0)
          AND b.message_type = t.message_type
        ORDER BY b.since LIMIT 100) AS b)
    UNION ALL
    (SELECT b.shard, b.subject FROM saf.backoff b
     WHERE {condition}
          AND %(types)s::text[] IS NULL
     ORDER BY hashtextextended(b.message_type, 0), b.since LIMIT 100)"""


def possible(types: Collection[str | None]) -> list[str]:
    """Return the types that a message in a database can have.

    >>> possible(["OrderPaid", "a\\0b", "\\udc80", None])
    ['OrderPaid']
    """
    return [item for item in types if item is not None and not IMPOSSIBLE.search(item)]
