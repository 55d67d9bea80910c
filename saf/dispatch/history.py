"""State of endpoints for operators: each endpoint's condition and its last failed attempts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

STATE = """
SELECT state, failures, failing_since, next_probe_at, error, paused_at, paused_by
FROM saf.breaker WHERE subscription_id = %(subscription_id)s
"""
ATTEMPTS = """
SELECT at, message_id, key, status, seconds, outcome, error
FROM saf.attempt WHERE subscription_id = %(subscription_id)s
ORDER BY attempt_id DESC LIMIT %(limit)s
"""


@dataclass(frozen=True, kw_only=True)
class State:
    """Condition of an endpoint, as stored in saf.breaker."""

    state: str = "closed"
    failures: int = 0
    failing_since: datetime | None = None
    next_probe_at: datetime | None = None
    error: str | None = None
    paused_at: datetime | None = None
    paused_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A failed attempt."""

    at: datetime
    message_id: UUID
    key: str | None
    status: int | None
    seconds: float
    outcome: str
    error: str


def state(connection: psycopg.Connection[Any], subscription_id: int) -> State:
    """Return the condition of a subscription's endpoint."""
    with psycopg.Cursor(connection, row_factory=class_row(State)) as cursor:
        found = cursor.execute(STATE, {"subscription_id": subscription_id}).fetchone()
    return found or State()


def attempts(
    connection: psycopg.Connection[Any], subscription_id: int, limit: int
) -> list[Attempt]:
    """Return the last failed attempts, newest first."""
    with psycopg.Cursor(connection, row_factory=class_row(Attempt)) as cursor:
        params = {"subscription_id": subscription_id, "limit": limit}
        return cursor.execute(ATTEMPTS, params).fetchall()
