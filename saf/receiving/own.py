"""Own settings: saf's statements run as saf's role, whatever a handler has set.

A handler shares saf's session and transaction. It may take a role (``SET LOCAL ROLE tenant``), or
set search_path or a timeout, and this holds until the transaction ends; without LOCAL, until the
session does. So a receiver asks at the beginning what holds, and restores it after the handlers and
before its own statements, for the session as well. That shares a round trip with a statement that
is sent anyway.

What else a handler sets is its own, such as synchronous_commit. Handlers of one delivery share its
transaction: what one sets holds for those after it too.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch

SETTINGS = ("role", "search_path", "row_security", "statement_timeout", "lock_timeout")
"""The settings that decide whether saf's statements find its tables, and may use them."""

ASK = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SETTINGS)
ALWAYS = {"array_nulls": "on"}
"""How saf's parameters are written."""


def restoring(connection: psycopg.Connection[Any], *, pooled: bool) -> str:
    """Return the statement that restores what holds now; it has no parameters.

    Behind a pooler, the session is not the receiver's, so only the transaction's settings are.
    """
    (found,) = fetch(connection, ASK)
    values = {**dict(zip(SETTINGS, found, strict=True)), **ALWAYS}
    restored = (
        sql.SQL("set_config({}, {}, {})").format(name, value, pooled)
        for name, value in values.items()
    )
    return "SELECT " + sql.SQL(", ").join(restored).as_string(connection)
