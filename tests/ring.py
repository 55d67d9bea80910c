"""The ring of a log's slots, turned by hand."""

from __future__ import annotations

from typing import Any

import psycopg

from saf.log.ring import SLOT_ROWS


def leave_slot(connection: psycopg.Connection[Any], log: str = "outbox") -> None:
    """Let the next id be the first one of the next slot. Nobody else draws meanwhile."""
    ((last,),) = connection.execute(f"SELECT last_value FROM saf.{log}_id_seq").fetchall()
    first = (last // SLOT_ROWS + 1) * SLOT_ROWS
    connection.execute("SELECT setval(%s, %s, false)", [f"saf.{log}_id_seq", first])


def in_slot(connection: psycopg.Connection[Any], slot: str) -> list[str]:
    """The bodies in a slot, or in a whole log, by id."""
    rows = connection.execute(f"SELECT body FROM saf.{slot} ORDER BY id").fetchall()
    return [bytes(body).decode() for (body,) in rows]
