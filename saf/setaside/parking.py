"""Parking: messages set aside in order, and when each is tried again.

A message that cannot be delivered now is copied to ``saf.parked``, in the transaction that moves
the position past it, so that the rest of its batch continues. It is copied into a *lane*, by what
it waits for; see `saf.setaside.lane`.

While a lane has messages, new ones that belong in it park behind them. When the lane is due, the
parked messages go first. (While a destination does not answer, this applies to all shards. Messages
that wait for anything else affect only their own shards.) Each message keeps the (batch, position)
that it had, and each lane has a separate watermark at the destination: a parked message that was
stored before its acknowledgement was lost is dropped there like any other. The message that has
waited longest may find a route last. So lanes of messages that have found a route are ordered and
numbered by the messages' arrival there: parked_id.

``saf.backoff`` has one row for each lane that waits: the attempts so far, and the time of the next
one. They are in the source's database and by its clock, so they survive restarts, and all
forwarders share them. `saf.setaside.backoff` reads and changes them, for many lanes in one
statement. The schedule is Service Broker's: 4, 8, 16, 32, 64, 64 … seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.columns import COLUMNS
from saf.database import array, fetch, queries
from saf.log.cursor import Batch
from saf.setaside.lane import BROKER, GIVEN, OF_RECEIVERS, THE_LANE, Lane, given

FIRST_WAIT_SECONDS = 4
LONGEST_WAIT_SECONDS = 64

# Later than any time that our clocks will show, but before the end of Python's calendar
BLOCKED = datetime(9999, 1, 1, tzinfo=UTC)


def wait_seconds(
    attempts: int, first: float = FIRST_WAIT_SECONDS, longest: float = LONGEST_WAIT_SECONDS
) -> float:
    """Return the seconds to wait after ``attempts`` failures in a row.

    >>> [wait_seconds(attempts) for attempts in (1, 2, 3, 4, 5, 6, 100)]
    [4, 8, 16, 32, 64, 64, 64]
    """
    return min(first * (1 << min(attempts - 1, 30)), longest)


@dataclass(frozen=True, kw_only=True)
class Backoff(Lane):
    """A lane that waits: its attempts, and the time of the next one."""

    attempts: int
    next_attempt_at: datetime
    due: bool
    error: str
    since: datetime
    needs_operator: bool = False
    """Whether only an operator can remove the cause of the last failure."""
    paused: bool = False
    """Whether an operator has paused its destination."""

    @property
    def braked(self) -> bool:
        """Whether it is a forwarder's lane that only an operator can have tried again."""
        blocked = self.next_attempt_at >= BLOCKED and self.kind not in OF_RECEIVERS
        return blocked and not self.paused


# A transaction that parks messages locks the rows of their lanes until it commits, so that
# `backoff.forget`, which checks whether any messages are left, cannot miss them.
TOUCH = f"""
INSERT INTO saf.backoff AS b (subscription_id, {THE_LANE}, error)
SELECT %(subscription_id)s, {THE_LANE}, %(error)s
FROM {GIVEN} AS w ({THE_LANE})
ORDER BY {THE_LANE}
ON CONFLICT (subscription_id, {THE_LANE}) DO UPDATE SET error = b.error
"""

PARKED_COLUMNS = (
    *("subscription_id", "destination", "kind", "subject", "broker", "quality", "shard", "id"),
    *("batch", "position", "opened_at"),
    *COLUMNS,
)
PARK = sql.SQL("COPY saf.parked ({}) FROM STDIN").format(
    sql.SQL(", ").join(map(sql.Identifier, (*PARKED_COLUMNS, "source")))
)
OF_EACH = """unnest(%(parked_ids)s::bigint[], %(kinds)s::text[], %(subjects)s::text[],
           %(brokers)s::uuid[])"""
MOVE_TO_LANE = f"""
UPDATE saf.parked p SET destination = %(destination)s, kind = w.kind, subject = w.subject,
       broker = w.broker
FROM {OF_EACH} AS w (parked_id, kind, subject, broker)
WHERE p.parked_id = w.parked_id
"""
# The columns of the address that the message has found since
ADDRESS = ("to_service", "to_broker", "key")
COPY_TO = f"""
INSERT INTO saf.parked ({THE_LANE}, quality, parked_at, subscription_id, shard, id,
                        batch, position, {", ".join(COLUMNS)})
SELECT %(destination)s, w.kind, w.subject, w.broker, %(quality)s, parked_at, subscription_id,
       shard, id, batch, position,
       {", ".join(f"{'w' if c in ADDRESS else 'p'}.{c}" for c in COLUMNS)}
FROM unnest(%(parked_ids)s::bigint[], %(kinds)s::text[], %(subjects)s::text[],
            %(brokers)s::uuid[], %(to_services)s::text[], %(to_brokers)s::uuid[],
            %(keys)s::text[])
    WITH ORDINALITY AS w (parked_id, kind, subject, broker, {", ".join(ADDRESS)}, place)
JOIN saf.parked p USING (parked_id)
ORDER BY place
"""
STILL = f"""
SELECT parked_id
FROM saf.parked p JOIN {OF_EACH} AS w (parked_id, kind, subject, broker)
    USING (parked_id, kind, subject, broker)
WHERE p.destination = %(destination)s
"""
UNPARK = "DELETE FROM saf.parked WHERE parked_id = ANY (%(parked_ids)s) RETURNING parked_id"

# A message parked beyond the open batch's position stays until the position has passed it: while it
# is parked, and only then, the batch knows not to send it as well. The batch is recognised by the
# time it was opened. The time of parking is not compared with it, because clocks go back.
IN_LANES = """
SELECT {columns} FROM saf.parked
WHERE subscription_id = {subscription_id} AND destination = {destination}
  AND (kind, subject, broker) IN (SELECT * FROM unnest({kinds}::text[], {subjects}::text[],
                                                       {brokers}::uuid[]))
  AND shard = ANY ({shards}::smallint[])
  AND (id <= {after} OR opened_at IS DISTINCT FROM {opened_at}::timestamptz)
ORDER BY {order}
"""

SET_ASIDE = f"""
SELECT id, destination, kind, subject, {BROKER} FROM saf.parked
WHERE subscription_id = %(subscription_id)s AND shard = ANY (%(shards)s::smallint[])
  AND id > %(position)s AND opened_at = %(opened_at)s
UNION ALL
SELECT id, destination, NULL, NULL, NULL FROM saf.dead_letter
WHERE subscription_id = %(subscription_id)s AND shard = ANY (%(shards)s::smallint[])
  AND id > %(position)s AND dead_letter_at >= %(opened_at)s
"""
OCCUPIED = f"""
SELECT destination, kind, subject, {BROKER} FROM {GIVEN} AS w ({THE_LANE})
WHERE EXISTS (
    SELECT FROM saf.parked p
    WHERE subscription_id = %(subscription_id)s
      AND (p.destination, p.kind, p.subject, p.broker)
          = (w.destination, w.kind, w.subject, w.broker)
      AND shard = ANY (%(shards)s::smallint[]))
"""
KNOWN = """
SELECT message_id FROM saf.parked
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
  AND (id, message_id) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(message_ids)s::uuid[]))
"""


def touch(
    connection: psycopg.Connection[Any], subscription_id: int, lanes: Iterable[Lane], error: str
) -> None:
    """Prepare lanes for messages that are about to be parked. Call it in the same transaction."""
    params = {"subscription_id": subscription_id, "error": error, **given(lanes)}
    connection.execute(TOUCH, params)


def park(connection: psycopg.Connection[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Park messages, as dicts of `PARKED_COLUMNS`, in their lanes. Call it in a transaction."""
    lanes: dict[int, set[Lane]] = defaultdict(set)
    for row in rows:
        lane = Lane(
            destination=row["destination"],
            kind=row["kind"],
            subject=row["subject"],
            broker=row["broker"],
        )
        lanes[row["subscription_id"]].add(lane)
    for subscription_id, subscription_lanes in lanes.items():
        touch(connection, subscription_id, subscription_lanes, "behind others")
    copy_in(connection, rows)


def copy_in(connection: psycopg.Connection[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Copy messages, as dicts of `PARKED_COLUMNS`, into lanes that exist, or will.

    Messages from an inbox also have their ``source``.
    """
    with psycopg.Cursor(connection) as cursor, cursor.copy(PARK) as copy:
        values = ([*(row[c] for c in PARKED_COLUMNS), row.get("source")] for row in rows)
        for row in queries.in_rows(connection, values):
            copy.write_row(row)


def move(
    connection: psycopg.Connection[Any],
    destination: str,
    lanes: Mapping[str, list[Any]],
    parked_ids: Sequence[int],
) -> None:
    """Move parked messages into other lanes, one each, as `saf.setaside.lane.given` returns them.

    Call `touch` for the lanes before, in the same transaction.
    """
    params = {"destination": destination, "parked_ids": list(parked_ids), **lanes}
    connection.execute(MOVE_TO_LANE, params)


def copy(
    connection: psycopg.Connection[Any],
    destination: str,
    quality: str | None,
    rows: Sequence[dict[str, Any]],
) -> None:
    """Copy parked messages into lanes. ``rows`` have the lanes' columns, `ADDRESS` and parked_id.

    The copies keep the order of ``rows``. Call `touch` for the lanes before, and `unpark` for the
    copied messages, in the same transaction.
    """
    columns = {
        "parked_ids": [row["parked_id"] for row in rows],
        "kinds": [row["kind"] for row in rows],
        "subjects": [row["subject"] for row in rows],
        "brokers": [UUID(bytes=row["broker"]) for row in rows],
        "to_services": [row["to_service"] for row in rows],
        "to_brokers": [row["to_broker"] and UUID(bytes=row["to_broker"]) for row in rows],
        "keys": [row["key"] for row in rows],
    }
    connection.execute(COPY_TO, {"destination": destination, "quality": quality} | columns)


def still(
    connection: psycopg.Connection[Any],
    destination: str,
    lanes: Mapping[str, list[Any]],
    parked_ids: Sequence[int],
) -> set[int]:
    """Return which messages are still in the lanes that they were read from, one lane each."""
    params = {"destination": destination, "parked_ids": list(parked_ids), **lanes}
    return {number for (number,) in fetch(connection, STILL, params)}


def unpark(connection: psycopg.Connection[Any], parked_ids: Sequence[int]) -> list[int]:
    """Delete parked messages, which were delivered or moved elsewhere; return those deleted."""
    return [number for (number,) in fetch(connection, UNPARK, {"parked_ids": list(parked_ids)})]


def as_log(columns: Sequence[str | sql.Composable], *, found: bool) -> list[str | sql.Composable]:
    """Return a log's columns, and ``batch``, for messages in lanes, as the watermark knows them."""
    as_found = {"id": sql.SQL("parked_id AS id"), "batch": sql.SQL("0::bigint AS batch")}
    replacements = as_found if found else {"id": sql.SQL("position AS id")}
    return [
        replacements.get(column, column) if isinstance(column, str) else column
        for column in columns
    ]


def set_aside(
    connection: psycopg.Connection[Any], batch: Batch
) -> list[tuple[int, str, Lane | None]]:
    """Return the messages of a batch that are set aside beyond its position.

    Each has its id, its destination (empty for all), and the lane that it is parked in; dead
    letters have None instead of a lane.
    """
    params = {
        "subscription_id": batch.subscription_id,
        "shards": array(batch.shards),
        "position": batch.position,
        "opened_at": batch.opened_at,
    }
    return [
        (id_, name, kind and Lane(destination=name, kind=kind, subject=subject, broker=broker))
        for id_, name, kind, subject, broker in fetch(connection, SET_ASIDE, params)
    ]


def known(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    destination: str,
    rows: Sequence[Mapping[str, Any]],
) -> set[UUID]:
    """Return which messages are parked for a destination, by their id and message_id.

    An id alone may have been assigned twice, if a sequence was set back.
    """
    params = {
        "subscription_id": subscription_id,
        "destination": destination,
        "ids": [row["id"] for row in rows],
        "message_ids": [row["message_id"] for row in rows],
    }
    return {message_id for (message_id,) in fetch(connection, KNOWN, params)}


def occupied(connection: psycopg.Connection[Any], batch: Batch, lanes: Iterable[Lane]) -> set[Lane]:
    """Return which of some lanes have messages in a batch's shards."""
    params = {
        "subscription_id": batch.subscription_id,
        "shards": array(batch.shards),
        **given(lanes),
    }
    with psycopg.Cursor(connection, row_factory=class_row(Lane)) as cursor:
        return set(cursor.execute(OCCUPIED, params).fetchall())


def in_lanes(
    batch: Batch,
    destination: str,
    lanes: Iterable[Lane],
    columns: Sequence[str | sql.Composable],
    *,
    found: bool = False,
) -> str:
    """Return the complete query, for COPY, for a batch's shards' messages in some lanes.

    The messages are in the order of each lane; those that have ``found`` a route have a different
    order.
    """
    columns_of_lanes = given(lanes)
    return (
        sql.SQL(IN_LANES)
        .format(
            columns=sql.SQL(", ").join(
                sql.Identifier(column) if isinstance(column, str) else column for column in columns
            ),
            subscription_id=sql.Literal(batch.subscription_id),
            destination=sql.Literal(destination),
            kinds=sql.Literal(columns_of_lanes["kinds"]),
            subjects=sql.Literal(columns_of_lanes["subjects"]),
            brokers=sql.Literal([str(broker) for broker in columns_of_lanes["brokers"]]),
            shards=sql.Literal(batch.shards),
            after=sql.Literal(batch.position),
            order=sql.SQL("parked_id" if found else "batch, position"),
            opened_at=sql.Literal(batch.opened_at.isoformat()),
        )
        .as_string(None)
    )
