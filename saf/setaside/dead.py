"""Dead letters: messages set aside for an operator.

They are written in the transaction that moves the position past them. `saf.setaside.selection`
lists them, and operators' decisions about them are in `saf.operating.decide`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from saf.columns import COLUMNS
from saf.database import fetch, queries
from saf.limits import WHY_NOT
from saf.message import ALTERED, MAX_BODY, UNKNOWN_KEY, UNSIGNED

REASONS = (
    *("rejected", "expired", "over_size", "unavailable", "failed", "unresolved", "no_dialog"),
    *(UNSIGNED, UNKNOWN_KEY, ALTERED, "undecodable"),
)
BECAUSE: Mapping[str, str] = MappingProxyType(
    {
        "rejected": "rejected by the destination",
        "over_size": "too large",
        "unavailable": "sent at most once, without an answer",
        "failed": "handler failed",
        "unresolved": "router failed",
        "no_dialog": "no such dialog",
        "undecodable": "not readable at its source",
        UNKNOWN_KEY: "signed by an unknown key",
    }
)
"""Reasons in words, where the reason alone is too short."""

SHOWN = 1024
"""Characters of a name or a key that are shown; only rows of an older schema have more."""

DEAD_COLUMNS = (
    *("subscription_id", "destination", "shard", "id", "reason", "error"),
    *COLUMNS,
)
BURY = "COPY saf.dead_letter ({}) FROM STDIN"

# A message that cannot be read, or moved, does not leave the database
BURY_AS_STORED = f"""
INSERT INTO saf.dead_letter
    (subscription_id, destination, shard, id, reason, error, dead_letter_at, {", ".join(COLUMNS)})
SELECT %(subscription_id)s, %(destination)s, shard, id, u.reason, coalesce(u.error, {WHY_NOT}),
       greatest(now(), %(not_before)s::timestamptz), {", ".join(COLUMNS)}
FROM saf.{{table}} JOIN unnest(%(shards)s::smallint[], %(ids)s::bigint[], %(reasons)s::text[],
                              %(errors)s::text[]) AS u (shard, {{id}}, reason, error)
    USING (shard, {{id}})
WHERE NOT EXISTS (
    SELECT FROM saf.dead_letter d
    WHERE d.subscription_id = %(subscription_id)s AND d.destination = %(destination)s
      AND d.shard = {{table}}.shard AND d.id = {{table}}.id
      AND d.message_id = {{table}}.message_id)
ORDER BY {{id}}
"""

KNOWN = """
SELECT message_id FROM saf.dead_letter
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
  AND (id, message_id) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]))
"""

BODY = "SELECT body FROM saf.dead_letter WHERE dead_letter_id = %(dead_letter_id)s"


def known(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    destination: str,
    rows: Sequence[Mapping[str, Any]],
) -> set[UUID]:
    """Return which messages are dead letters of a destination, by their id and message_id."""
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "ids": [row["id"] for row in rows],
        "message_ids": [row["message_id"] for row in rows],
    }
    return {message_id for (message_id,) in fetch(connection, KNOWN, params)}


def bury(
    connection: psycopg.Connection[Any],
    rows: Sequence[dict[str, Any]],
    at: Mapping[int, datetime] | None = None,
) -> None:
    """Make dead letters of messages, as dicts of `DEAD_COLUMNS`. Call it in a transaction.

    ``at`` maps each shard to the time to store; default: the transaction's time. A forwarder passes
    it, because its batch must find the dead letters again even if the clock has gone back.
    """
    columns = DEAD_COLUMNS if at is None else (*DEAD_COLUMNS, "dead_letter_at")
    if at is not None:
        rows = [{**row, "dead_letter_at": at[row["shard"]]} for row in rows]
    statement = sql.SQL(BURY).format(sql.SQL(", ").join(map(sql.Identifier, columns)))
    with psycopg.Cursor(connection) as cursor, cursor.copy(statement) as copy:
        values = ([row[column] for column in columns] for row in rows)
        for row in queries.in_rows(connection, values):
            copy.write_row(row)


@dataclass(frozen=True, kw_only=True)
class AsStored:
    """A message that becomes a dead letter without being read."""

    shard: int
    id: int
    """The parked_id of a parked message."""
    reason: str = "over_size"
    error: str | None = None
    """The error; None: too large to be read."""


def bury_as_stored(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    table: str,
    rows: Sequence[AsStored],
    *,
    destination: str = "",
    not_before: datetime | None = None,
    max_bytes: int = MAX_BODY,
    setting: str = "saf.message.MAX_BODY",
) -> None:
    """Make dead letters of messages as they are stored, in the database. Call it in a transaction.

    Args:
        connection: to the database that contains them.
        subscription_id: the subscription that has them in hand.
        table: "outbox", "inbox" or "parked".
        rows: the messages.
        destination: the destination that they no longer go to; empty for all.
        not_before: the earliest time to store, which is when a forwarder's batch was opened.
        max_bytes: the largest body that can be read, in bytes.
        setting: the name of the setting for ``max_bytes``.
    """
    if not rows:
        return
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "not_before": not_before,
        "max_bytes": max_bytes,
        "setting": setting,
        "shards": [row.shard for row in rows],
        "ids": [row.id for row in rows],
        "reasons": [row.reason for row in rows],
        "errors": [row.error for row in rows],
    }
    number = "parked_id" if table == "parked" else "id"
    connection.execute(BURY_AS_STORED.format(table=table, id=number), params)


def body(connection: psycopg.Connection[Any], dead_letter_id: int) -> bytes | None:
    """Return the body of a dead letter; None if it does not exist."""
    found = fetch(connection, BODY, {"dead_letter_id": dead_letter_id})
    return bytes(found[0][0]) if found else None
