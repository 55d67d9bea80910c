"""What is examined, and what may be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg import sql

from saf.database import fetch

REACHABLE = "reachable"
Severity = Literal["ok", "warning", "error"]

SKEW_SECONDS = 5.0
LONG_SECONDS = 300.0
"""From what age on a transaction is long."""
STUCK_SECONDS = 600.0
"""From what age on a message that nobody has taken up is left lying."""
HELD_SECONDS = 10.0
"""From what age on a lock on one of our tables is worth a word, though nobody waits for it now."""
WAITED_SECONDS = 1.0
"""From what age on somebody who waits for a lock is held up."""
MANY_ATTEMPTS = 10
FREE_CONNECTIONS = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found."""

    check: str
    where: str
    severity: Severity
    what: str = ""
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From when on something is worth a word."""

    long_seconds: float = LONG_SECONDS
    stuck_seconds: float = STUCK_SECONDS
    skew_seconds: float = SKEW_SECONDS
    held_seconds: float = HELD_SECONDS
    waited_seconds: float = WAITED_SECONDS
    many_attempts: int = MANY_ATTEMPTS
    free_connections: int = FREE_CONNECTIONS


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One database, connected."""

    where: str
    connection: psycopg.Connection[Any]
    limits: Limits
    clock: Callable[[], float] = field(repr=False)

    def ask(self, query: str | sql.Composed, **params: object) -> list[tuple[Any, ...]]:
        """The answer, as tuples."""
        return fetch(self.connection, query, params)


Found = Iterator[tuple[Severity, str, str]]
"""Severity, what, cure."""
Check = Callable[[Patient], Found]
