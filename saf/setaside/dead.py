"""Dead letters: messages set aside for an operator.

They are written in the transaction that moves the position past them. Operators' decisions about
them are in `saf.operating.decide`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.columns import COLUMNS
from saf.database import fetch, parameters
from saf.database.pages import Page, number_at, page_of
from saf.limits import HEADERS_READABLE, WHY_NOT
from saf.message import MAX_BODY
from saf.setaside.staying import DEAD_SINCE, OF_BATCH, TAKEN, Counted
from saf.signing.verifier import ALTERED, UNKNOWN_KEY, UNSIGNED

REASONS = (
    *("rejected", "expired", "over_size", "unavailable", "failed", "unresolved", "no_dialog"),
    *(UNSIGNED, UNKNOWN_KEY, ALTERED),
)

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

CHOSEN = """
FROM saf.dead_letter d JOIN saf.subscription s USING (subscription_id)
WHERE (%(dead_letter_ids)s::bigint[] IS NULL OR dead_letter_id = ANY (%(dead_letter_ids)s))
  AND (%(reason)s::text IS NULL OR reason = %(reason)s)
  AND (%(service)s::text IS NULL OR to_service = %(service)s)
  AND (%(destination)s::text IS NULL OR destination = %(destination)s)
  AND (%(key)s::text IS NULL OR key = %(key)s)
  AND (%(before)s::timestamptz IS NULL OR dead_letter_at < %(before)s)
  AND (%(subscription)s::text IS NULL OR s.name = %(subscription)s)
  AND (%(error)s::text IS NULL OR strpos(lower(error), lower(%(error)s)) > 0)
  AND (%(after)s::bigint IS NULL OR dead_letter_id > %(after)s)
  AND (%(through)s::bigint IS NULL OR dead_letter_id <= %(through)s)
"""

# If it were deleted, the batch would not see it, and would set it aside again, or deliver it
STAYS = f"""
CASE WHEN s.log = 'inbox' AND %(to)s::text IS NOT NULL THEN 'arrived'
     WHEN %(to)s::text IS NOT NULL AND d.conversation_id IS NOT NULL THEN 'dialog'
     WHEN {OF_BATCH.format(one="d", at=DEAD_SINCE)} THEN 'batch' END
"""
"""SQL: why an operator may not decide about the dead letter d of the subscription s now, one of
`saf.setaside.staying.WHY`; or NULL. ``to`` is the destination of a redirection, or NULL."""

LIST = f"""
WITH {TAKEN}
SELECT dead_letter_id, s.name AS subscription, destination, reason, error, dead_letter_at,
       message_id, left(to_service, {SHOWN}) AS service, left(key, {SHOWN}) AS key,
       left(message_type, {SHOWN}) AS message_type, octet_length(body) AS bytes,
       CASE WHEN {HEADERS_READABLE} THEN headers::text END AS headers,
       d.created_at, expires_at, {STAYS} AS stays
{CHOSEN} ORDER BY dead_letter_id LIMIT %(limit)s
"""

COUNT = f"""
WITH {TAKEN}
SELECT stays, count(*), max(dead_letter_id)
FROM (SELECT dead_letter_id, {STAYS} AS stays {CHOSEN}
      ORDER BY dead_letter_id LIMIT %(most)s) AS found
GROUP BY 1 ORDER BY 1
"""

LAST = "SELECT coalesce(max(dead_letter_id), 0) FROM saf.dead_letter"

BODY = "SELECT body FROM saf.dead_letter WHERE dead_letter_id = %(dead_letter_id)s"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which dead letters to choose; None means any."""

    dead_letter_ids: Sequence[int] | None = None
    reason: str | None = None
    service: str | None = None
    destination: str | None = None
    key: str | None = None
    before: datetime | None = None
    subscription: str | None = None
    error: str | None = None
    """A part of the error's text, case-insensitive."""
    after: int | None = None
    """Only those with greater numbers: the next page."""
    through: int | None = None
    """Only those up to this number, without later dead letters."""

    def until_now(self, connection: psycopg.Connection[Any]) -> Self:
        """Return the filter without messages that become dead letters from now on."""
        return self if self.through is not None else replace(self, through=last(connection))


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """One dead letter, without its body."""

    dead_letter_id: int
    subscription: str
    destination: str
    reason: str
    error: str
    dead_letter_at: datetime
    message_id: UUID
    service: str
    key: str | None
    message_type: str | None
    headers: str | None
    """The headers as JSON text; None also if they are too large to be read."""
    bytes: int
    created_at: datetime
    expires_at: datetime | None
    stays: str | None
    """Why nobody may decide about it now, one of `saf.setaside.staying.WHY`; None: operators
    may."""

    def as_dict(self) -> dict[str, Any]:
        """Return the dead letter as a dict for JSON."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        moments = {n: v.isoformat() for n, v in plain.items() if isinstance(v, datetime)}
        if self.headers is not None:
            # as text if Python cannot decode them
            with suppress(ValueError, RecursionError):
                plain["headers"] = json.loads(self.headers)
        return {**plain, **moments, "message_id": str(self.message_id)}


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
        for row in parameters.in_rows(connection, values):
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


def dead_letters(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    limit: int | None = 100,
    *,
    to: str | None = None,
) -> list[DeadLetter]:
    """Return the dead letters that a filter matches, oldest first.

    ``stays`` is set for a redirection ``to`` a destination, or for other decisions.
    """
    with psycopg.Cursor(connection, row_factory=class_row(DeadLetter)) as cursor:
        return cursor.execute(LIST, asdict(chosen) | {"limit": limit, "to": to}).fetchall()


def page(
    connection: psycopg.Connection[Any],
    chosen: Filter,
    limit: int | None,
    *,
    to: str | None = None,
) -> Page[DeadLetter]:
    """Return a page of `dead_letters`; it begins after the filter's ``after``."""
    return page_of(
        lambda most: dead_letters(connection, chosen, most, to=to),
        limit,
        lambda row: str(row.dead_letter_id),
    )


def place_at(place: str | None) -> int | None:
    """Parse a place returned by an earlier page, for the next page's `Filter`.

    Raises:
        UsageError: no page of dead letters ends there.
    """
    return number_at(place, "dead letters")


def count(
    connection: psycopg.Connection[Any], chosen: Filter, most: int, *, to: str | None = None
) -> Counted:
    """Count the dead letters that a filter matches, up to ``most``, oldest first."""
    return Counted.of(fetch(connection, COUNT, asdict(chosen) | {"most": most + 1, "to": to}), most)


def last(connection: psycopg.Connection[Any]) -> int:
    """Return the greatest number of a dead letter; 0 if there is none."""
    ((number,),) = fetch(connection, LAST)
    return int(number)


def body(connection: psycopg.Connection[Any], dead_letter_id: int) -> bytes | None:
    """Return the body of a dead letter; None if it does not exist."""
    found = fetch(connection, BODY, {"dead_letter_id": dead_letter_id})
    return bytes(found[0][0]) if found else None
