"""Own settings: saf's statements run as saf's role, whatever a handler has set.

A handler shares saf's session and transaction. It may take a role (``SET LOCAL ROLE tenant``), or
set search_path or a timeout. The setting lasts until the transaction ends; without LOCAL, until the
session ends. So a receiver reads the settings at the beginning, and restores them after the
handlers and before its own statements, for the session as well. The restore shares a round trip
with a statement that is sent anyway.

Other settings, such as synchronous_commit, belong to the handlers. Handlers of one delivery share
its transaction: a setting made by one applies to the later ones too.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch

SETTINGS = ("role", "search_path", "row_security", "statement_timeout", "lock_timeout")
"""Settings that decide whether saf's statements find its tables and may use them."""

ASK = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SETTINGS)
ALWAYS = {"array_nulls": "on"}
"""Setting that saf's parameters depend on."""


def restoring(connection: psycopg.Connection[Any], *, pooled: bool) -> str:
    """Return the statement that restores the current settings; it has no parameters.

    Behind a pooler, the session is not the receiver's, so only the transaction's settings are
    restored.
    """
    (found,) = fetch(connection, ASK)
    values = {**dict(zip(SETTINGS, found, strict=True)), **ALWAYS}
    restored = (
        sql.SQL("set_config({}, {}, {})").format(name, value, pooled)
        for name, value in values.items()
    )
    return "SELECT " + sql.SQL(", ").join(restored).as_string(connection)
