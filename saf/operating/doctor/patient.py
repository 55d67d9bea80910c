"""The examined database, and the form of findings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.database.dsn import grant_command, owners_command, place_of

REACHABLE = "reachable"
LOGIN = "login"
Severity = Literal["ok", "warning", "error"]

SKEW_SECONDS = 5.0
LONG_SECONDS = 300.0
"""Age of a transaction, in seconds, above which it counts as long."""
STUCK_SECONDS = 600.0
"""Age of an unread message, in seconds, above which it counts as left lying."""
OLD_SECONDS = 30 * 86400.0
"""Silence in an open dialog, in seconds, after which it is reported as forgotten."""
HELD_SECONDS = 10.0
"""Age of a lock on saf's tables, in seconds, above which it is reported even without waiters."""
WAITED_SECONDS = 1.0
"""Minimum wait for a lock, in seconds, for a report."""
OVERDUE_SECONDS = 300.0
"""Time, in seconds, after which a held message that is due and was not moved is reported."""
MANY_ATTEMPTS = 10
FREE_CONNECTIONS = 10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check."""

    check: str
    where: str
    severity: Severity
    what: str = ""
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits above which checks report."""

    long_seconds: float = LONG_SECONDS
    stuck_seconds: float = STUCK_SECONDS
    old_seconds: float = OLD_SECONDS
    skew_seconds: float = SKEW_SECONDS
    held_seconds: float = HELD_SECONDS
    waited_seconds: float = WAITED_SECONDS
    overdue_seconds: float = OVERDUE_SECONDS
    many_attempts: int = MANY_ATTEMPTS
    free_connections: int = FREE_CONNECTIONS


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One database, connected."""

    name: str
    """The database's name for --broker."""
    where: str
    connection: psycopg.Connection[Any]
    limits: Limits
    clock: Callable[[], float] = field(repr=False)

    def ask(self, query: str | sql.Composed, **params: object) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        return fetch(self.connection, query, params)

    def command(self, *words: str) -> str:
        """Return a command of saf, as typed in a shell, that acts at this database only.

        >>> shop = Patient(name="shop", where="", connection=None, limits=Limits(), clock=None)
        >>> shop.command("subscription", "drop", "a lake")
        "saf subscription drop 'a lake' --broker shop"
        """
        return shlex.join(("saf", *words, "--broker", self.name))

    def grant(self, duty: str) -> str:
        """Return the command by which the schema's owner gives this login the rights of a duty."""
        return grant_command(duty, self.connection.info.user, place_of(self.connection))

    def owners(self, *words: str) -> str:
        """Return a command of saf, as typed in a shell, for the schema's owner."""
        return owners_command(*words, place=place_of(self.connection))


Found = Iterator[tuple[Severity, str, str]]
"""The results of a check: severity, problem and cure."""
Check = Callable[[Patient], Found]
