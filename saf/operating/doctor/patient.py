"""What is examined, and what may be found."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
from psycopg import sql

from saf.database import fetch

REACHABLE = "reachable"
LOGIN = "login"
Severity = Literal["ok", "warning", "error"]

SKEW_SECONDS = 5.0
LONG_SECONDS = 300.0
"""The age in seconds from which on a transaction counts as long."""
STUCK_SECONDS = 600.0
"""The age in seconds from which on a message that nobody takes up counts as left lying."""
OLD_SECONDS = 30 * 86400.0
"""How long, in seconds, nothing is said in a dialog before it is reported as forgotten."""
HELD_SECONDS = 10.0
"""The age in seconds from which on a lock on our tables is reported, though nobody waits."""
WAITED_SECONDS = 1.0
"""How long somebody must have waited for a lock to be reported, in seconds."""
MANY_ATTEMPTS = 10
FREE_CONNECTIONS = 10

SHOWN_OF_QUERY = "left(split_part(split_part(a.query, '''', 1), '$', 1), 60)"
"""What is shown of the query of a session ``a``, in SQL: nothing from its first literal on."""


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
    """The limits from which on something is reported."""

    long_seconds: float = LONG_SECONDS
    stuck_seconds: float = STUCK_SECONDS
    old_seconds: float = OLD_SECONDS
    skew_seconds: float = SKEW_SECONDS
    held_seconds: float = HELD_SECONDS
    waited_seconds: float = WAITED_SECONDS
    many_attempts: int = MANY_ATTEMPTS
    free_connections: int = FREE_CONNECTIONS


@dataclass(frozen=True, kw_only=True)
class Patient:
    """One database, connected."""

    name: str
    """What --broker calls it."""
    where: str
    connection: psycopg.Connection[Any]
    limits: Limits
    clock: Callable[[], float] = field(repr=False)

    def ask(self, query: str | sql.Composed, **params: object) -> list[tuple[Any, ...]]:
        """Run a query and return its rows."""
        return fetch(self.connection, query, params)

    def command(self, *words: str) -> str:
        """Return a command of saf as one types it, which acts at this database and nowhere else.

        >>> shop = Patient(name="shop", where="", connection=None, limits=Limits(), clock=None)
        >>> shop.command("subscription", "drop", "a lake")
        "saf subscription drop 'a lake' --broker shop"
        """
        return shlex.join(("saf", *words, "--broker", self.name))


Found = Iterator[tuple[Severity, str, str]]
"""What a check yields: severity, what was found, and the cure."""
Check = Callable[[Patient], Found]
