"""Due messages of a source, which move into its outbox: held ones, and those of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from saf.database import fetch
from saf.schedules import running
from saf.sending import held

DUE_IN = f"least({held.DUE_IN}, {running.DUE_IN})"
"""SQL: seconds until something is due; NULL if nothing will be."""

REFUSED = "(SELECT count(*) FROM saf.held WHERE refused IS NOT NULL)"
BEFORE = f"SELECT clock_timestamp(), {REFUSED}"
# What is left of a deep backlog is not counted
AFTER = f"""
SELECT {REFUSED}, CASE WHEN %(more)s THEN 0 ELSE
       (SELECT count(*) FROM saf.held WHERE due <= %(moment)s AND refused IS NULL) END
"""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What became of due messages and runs."""

    found: int
    """Messages and runs that were found."""
    more: bool
    """Whether more may be due."""
    refused: int
    """Held messages that were refused."""
    locked: int
    """Held messages that were due and stay, because other sessions have locked them."""


def due_in(connection: psycopg.Connection[Any]) -> float | None:
    """Return the seconds until something is due; None if nothing will be."""
    ((seconds,),) = fetch(connection, f"SELECT {DUE_IN}")
    return None if seconds is None else float(seconds)


def move(connection: psycopg.Connection[Any]) -> Moved:
    """Move due messages and runs into the outbox, each kind for a limited time.

    The connection is in autocommit.
    """
    ((moment, before),) = fetch(connection, BEFORE)
    messages, more_messages = held.move(connection)
    runs, more_runs = running.run(connection)
    params = {"moment": moment, "more": more_messages}
    ((refused, locked),) = fetch(connection, AFTER, params)
    return Moved(
        found=messages + runs,
        more=more_messages or more_runs,
        refused=max(0, refused - before),
        locked=locked,
    )
