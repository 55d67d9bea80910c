"""Cursors: every log is read in batches, each between two snapshots of a cursor.

This is how every reader, a forwarder or a consumer, reads a log. Each row of a log has the id of
the transaction that wrote it (``txid``). A cursor, one per subscription and shard, contains two
snapshots, which tell which transactions were complete:

    done        every row visible in it is complete
    open        the open batch is the rows visible in ``open`` and not in ``done``
    position    within the batch, the rows with ``id <= position`` are complete

It moves in three steps:

    open        open = the current snapshot, batch = batch + 1
    advance     position = the last id completed, any number of times
    close       done = open, open = NULL; with the last advance, or after it

Guarantees, where simpler schemes fail (the idea is PgQ's; here it is per shard):

- *Nothing is skipped.* Ids are assigned before the commit, so reading ``id > last`` loses the row
  that commits late with a lower id. A row that commits after the snapshot ``open`` is not visible
  in it, so it belongs to the next batch, whatever its id.
- *A batch never changes.* Two snapshots always name the same set of rows. A retried task, or
  another process after a crash, reads the same rows in the same order, and (batch, position) is a
  mark that a destination can compare. Exactly once depends on this.
- *Order.* Rows written one after the other under one lock have rising ids, and the later row is
  never in an earlier batch: if its transaction was complete at a snapshot, so was the transaction
  that had to release the lock first.
- *One long transaction delays only itself.* Its id stays listed as in progress in ``done``, and
  its rows are found by that id when it ends. The cost of a batch follows its new rows.
- *Nothing is forwarded that the source could still lose.* ``open`` commits with
  synchronous_commit = on; WAL is written in order, so everything visible before is durable.

Every write names owner and epoch (see `saf.log.shards`) and the batch. If any of them has changed,
the write changes nothing and raises `Fenced`. Other readers of logs open and move their cursors by
statements of their own, because they own them in another way:

- A dispatcher (`saf.receiving.dispatch.marking`) owns shards by lease and epoch, too, but opens a
  shard alone, once it has new rows, and completes rows of a batch in any order.
- A receiver (`saf.receiving.claim`) needs no lease: its work and its position commit in one
  transaction, which locks the cursor.
- A stream (`saf.log.stream`) waits for no other process: its epoch alone names the newest query,
  and its checkpoint gives the snapshot.

All find their rows by `saf.log.read`.

This module never reads from a standby, never deletes, and does not order messages of different
shards among each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from saf.database import DURABLY, array, fetch
from saf.database.bounds import IDLE_NO_LONGER
from saf.errors import Fenced
from saf.log.read import IN_BATCH, since, since_shown
from saf.log.shards import NEWEST, THIS_ROW, Member


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of some shards of a log, between two snapshots. Can be pickled; has no connection."""

    log: str
    subscription_id: int
    owner: UUID
    number: int
    done: str
    """pg_snapshot as text: rows visible in it are not in the batch."""
    open: str
    """pg_snapshot as text: rows visible in it are in the batch."""
    position: int
    """Rows up to this id are already complete."""
    route_version: int | None
    opened_at: datetime
    """When it was opened, by the database's clock; messages expired by then count as expired."""
    epochs: tuple[tuple[int, int], ...]
    """(shard, epoch) of each shard, by shard."""
    set_aside_at: dict[int, list[datetime]] = field(default_factory=dict, compare=False)
    """For each shard, the last times at which its messages were set aside, ascending."""

    @property
    def shards(self) -> list[int]:
        """The shards of its rows."""
        return [shard for shard, _ in self.epochs]

    def split(self, parts: int) -> list[Batch]:
        """Split the rows into at most ``parts`` batches of about as many shards each."""
        parts = min(parts, len(self.epochs))
        return [replace(self, epochs=self.epochs[part::parts]) for part in range(parts)]

    def of(self, shards: Collection[int]) -> Batch:
        """Return the batch with only some of its shards."""
        return replace(self, epochs=tuple(epoch for epoch in self.epochs if epoch[0] in shards))

    def select(self, columns: Iterable[str | sql.Composable]) -> str:
        """Return the query for the batch's remaining rows, ordered by id.

        Columns are names, or expressions over them.
        """
        return f"{self.rows(columns)} ORDER BY id"

    def rows(
        self,
        columns: Iterable[str | sql.Composable],
        found: sql.Composable | None = None,
    ) -> str:
        """Return the query for the batch's remaining rows, unordered.

        With ``found``, only for those rows that another query finds, as `since` does. The result is
        a complete text without parameters, because COPY takes none; psycopg quotes each part.
        """
        return (
            sql.SQL(ROWS)
            .format(
                columns=sql.SQL(", ").join(
                    sql.Identifier(column) if isinstance(column, str) else column
                    for column in columns
                ),
                since=found or since(self.log, self.shards, self.done),
                open=sql.Literal(self.open),
                position=sql.Literal(self.position),
            )
            .as_string(None)
        )

    @property
    def _params(self) -> dict[str, Any]:
        return {
            "subscription_id": self.subscription_id,
            "owner": self.owner,
            "batch": self.number,
            "shards": array(self.shards),
            "epochs": array(epoch for _, epoch in self.epochs),
        }


ROWS = f"""
SELECT {{columns}} FROM ({{since}}) AS since WHERE {IN_BATCH} AND id > {{position}}
"""

# The same rows with parameters, so that the server plans the query once
_ROWS_NOT_IN = since_shown(
    "{log}", "", shards="= ANY (%(shards)s::smallint[])", done="%(done)s::pg_snapshot"
)
NEW_ROWS = f"SELECT count(*) FROM (SELECT FROM ({_ROWS_NOT_IN}) AS since LIMIT %(most)s) AS few"

# Shards with the same two snapshots are one batch, read by one query
BATCHES = """
SELECT batch, done::text AS done, open::text AS open, position, route_version, opened_at,
       array_agg(shard ORDER BY shard) AS shards, array_agg(epoch ORDER BY shard) AS epochs,
       jsonb_object_agg(shard, set_aside_at) FILTER (WHERE set_aside_at IS NOT NULL) AS set_aside_at
FROM {cursors} AS c
GROUP BY 1, 2, 3, 4, 5, 6
ORDER BY batch, position
"""

# Without an open batch, ``open`` is NULL, and rows not in ``done`` may be opened
OWNED = BATCHES.format(cursors=f"(SELECT * FROM {NEWEST} AS n WHERE owner = %(owner)s)")

# All shards that are opened together get the same number, above all their earlier ones, so that
# they stay one batch. The number only has to rise per shard. The commit is durable, whatever the
# default.
OPEN = f"""
WITH n AS (SELECT shard, batch FROM {NEWEST} AS c WHERE owner = %(owner)s),
     durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)),
     opened AS (
UPDATE saf.cursor c SET
    open = pg_current_snapshot(),
    batch = (SELECT max(batch) + 1 FROM n),
    opened_at = now(),
    route_version = %(route_version)s
FROM n, durable
WHERE {THIS_ROW} AND c.owner = %(owner)s AND c.open IS NULL
RETURNING c.*)
{BATCHES.format(cursors="opened")}
"""

# The cursors of a batch's shards, if owner, epoch and batch have not changed
SAME = """
unnest(%(shards)s::smallint[], %(epochs)s::bigint[]) AS mine (shard, epoch)
WHERE c.subscription_id = %(subscription_id)s AND c.shard = mine.shard
  AND c.owner = %(owner)s AND c.epoch = mine.epoch AND c.batch = %(batch)s
"""
MINE = f"{SAME} AND c.open IS NOT NULL"

# The commit does not wait for the disk. If a crash loses it, the messages are sent again, and the
# watermark drops them.
RELAXED = "(SELECT set_config('synchronous_commit', 'off', true)) AS relaxed"

STOPPING = "(SELECT stopping FROM saf.member WHERE member_id = c.owner)"

TOLD_TO_STOP = "SELECT EXISTS (SELECT FROM saf.member WHERE member_id = %(owner)s AND stopping)"

ADVANCE = f"""
UPDATE saf.cursor c SET position = greatest(c.position, %(position)s)
FROM {RELAXED}, {MINE}
RETURNING c.shard, {STOPPING}
"""

# Two statements in one transaction: earlier attempts are read under the row locks that the update
# needs anyway.
ATTEMPTED = f"SELECT c.shard, c.attempted FROM saf.cursor c, {MINE} FOR UPDATE OF c"
ATTEMPT = f"""
UPDATE saf.cursor c SET attempted = greatest(c.attempted, %(position)s) FROM {MINE}
RETURNING c.shard
"""

# Rows written together with a position, such as parked messages, are written once: if the answer to
# a commit was lost, the position shows that the commit has happened.
LOCK_CURSORS = f"""
SELECT c.shard, c.position FROM saf.cursor c, {MINE} ORDER BY c.shard FOR UPDATE OF c
"""

TIMES = 20
"""Times to keep per shard at which messages were set aside."""

# A clock that goes backwards changes nothing.
_AND_NOW = f"""(array_append(c.set_aside_at, greatest(
    now(), c.opened_at, c.set_aside_at[cardinality(c.set_aside_at)] + interval '1 microsecond'
)))[greatest(cardinality(c.set_aside_at) + 2 - {TIMES}, 1):]"""

# Also valid if the batch was closed in the same transaction
NOTE_SET_ASIDE = f"""
UPDATE saf.cursor c SET set_aside_at = {_AND_NOW} FROM {SAME} RETURNING c.shard, c.set_aside_at
"""

# Whichever owner and batch the shards have once the locks are free: finding a row by its batch, as
# `saf.log.shards.newest` does, would miss a row whose batch has changed since
NOTE_TAKEN_OUT = f"""
UPDATE saf.cursor c SET set_aside_at = {_AND_NOW}
FROM (SELECT subscription_id, shard FROM saf.cursor
      WHERE subscription_id = %(subscription_id)s AND shard = ANY (%(shards)s::smallint[])
      ORDER BY shard FOR UPDATE) AS locked
WHERE (c.subscription_id, c.shard) = (locked.subscription_id, locked.shard)
"""

SET_ASIDE_AT = f"""
SELECT c.shard, c.set_aside_at FROM saf.cursor c, {SAME} AND c.set_aside_at IS NOT NULL
"""

CLOSE = f"""
UPDATE saf.cursor c SET done = c.open, open = NULL, position = 0, attempted = 0
FROM {RELAXED}, {MINE}
RETURNING c.shard, {STOPPING}
"""
CLOSED = f"SELECT count(*) FROM saf.cursor c, {SAME} AND c.open IS NULL"


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A member's shards: those with open batches, and those without."""

    in_hand: list[Batch]
    """The open batches, oldest first."""
    idle: list[tuple[str, list[int]]]
    """The shards without an open batch, by their snapshot ``done``."""


def owned(connection: psycopg.Connection[Any], log: str, member: Member) -> Owned:
    """Return the open and idle shards that a member owns. Only reads."""
    params = {"subscription_id": member.subscription_id, "owner": member.member_id}
    idle: dict[str, list[int]] = defaultdict(list)
    rows = _fetch(connection, OWNED, params)
    for row in rows:
        if row["open"] is None:
            idle[row["done"]] += row["shards"]
    return Owned(in_hand=_batches(log, member, rows), idle=[*idle.items()])


def in_hand(connection: psycopg.Connection[Any], log: str, member: Member) -> list[Batch]:
    """Return the open batches of the shards that a member owns, oldest first."""
    return owned(connection, log, member).in_hand


def new_rows(
    connection: psycopg.Connection[Any], log: str, idle: Iterable[tuple[str, list[int]]], most: int
) -> int:
    """Count the rows that a batch opened now would have. Reads at most ``most`` rows.

    ``idle`` are the shards without a batch, by ``done``; see `Owned`.
    """
    query = sql.SQL(NEW_ROWS).format(log=sql.Identifier("saf", log))
    count = 0
    for done, shards in idle:
        if count < most:
            params = {"shards": array(shards), "done": done, "most": most - count}
            ((more,),) = fetch(connection, query, params)
            count += more
    return count


def has_more_than(connection: psycopg.Connection[Any], batch: Batch, rows: int) -> bool:
    """Whether the batch has more than ``rows`` rows left; reads at most one row more."""
    query = f"SELECT count(*) FROM ({batch.rows(['id'])} LIMIT {int(rows) + 1}) AS few"
    ((count,),) = fetch(connection, query)
    return bool(count > rows)


def open_batch(
    connection: psycopg.Connection[Any],
    log: str,
    member: Member,
    route_version: int | None = None,
) -> list[Batch]:
    """Open a batch of all rows committed so far, for the member's shards without a batch.

    Return it, as several batches if the shards were not all at the same snapshot. The commit is
    durable, and so are all rows of the batch.
    """
    params = {
        "subscription_id": member.subscription_id,
        "owner": member.member_id,
        "route_version": route_version,
    }
    return _batches(log, member, _fetch(connection, OPEN, params))


def advance(connection: psycopg.Connection[Any], batch: Batch, position: int) -> bool:
    """Mark the batch's rows up to ``position`` complete; return whether the member should stop.

    Call it in a transaction; its commit does not wait for the disk.
    """
    rows = _write(connection, ADVANCE, batch, position=position)
    return any(stopping for _, stopping in rows)


def told_to_stop(connection: psycopg.Connection[Any], batch: Batch) -> bool:
    """Return whether the member that owns the batch should stop, as `advance` does."""
    ((stopping,),) = fetch(connection, TOLD_TO_STOP, {"owner": batch.owner})
    return bool(stopping)


def attempted(connection: psycopg.Connection[Any], batch: Batch) -> dict[int, int]:
    """Return, for each shard, the id up to which at_most_once rows have been attempted."""
    return dict(_write(connection, ATTEMPTED, batch))


def attempt(connection: psycopg.Connection[Any], batch: Batch, position: int) -> dict[int, int]:
    """Record durably that at_most_once rows up to ``position`` are about to be sent.

    Return, for each shard, the id up to which rows had been attempted before: they are not sent
    again. Call it in a transaction, and send after its commit.
    """
    connection.execute(DURABLY)
    before = attempted(connection, batch)
    _write(connection, ATTEMPT, batch, position=position)
    return before


def lock_cursors(connection: psycopg.Connection[Any], batch: Batch) -> int:
    """Lock the batch's cursors until the transaction ends; return their position.

    While they are locked, an older owner can write nothing for the batch.
    """
    return min(int(position) for _, position in _write(connection, LOCK_CURSORS, batch))


def note_set_aside(connection: psycopg.Connection[Any], batch: Batch) -> dict[int, list[datetime]]:
    """Note durably that messages of the batch's shards are set aside, in that transaction.

    Return the shards' ``set_aside_at``, which is valid once the transaction is committed.
    """
    connection.execute(DURABLY)
    return dict(_write(connection, NOTE_SET_ASIDE, batch))


def note_taken_out(
    connection: psycopg.Connection[Any], subscription_id: int, shards: Collection[int]
) -> None:
    """Note durably that an operator takes messages of some shards out of their lanes.

    Call it in the transaction that takes them out, which keeps forwarders from these lanes.
    Forwarders read the note before they deliver the rest of the lanes (`learn_set_aside`). They
    wait for its locks, so the transaction must not idle longer than they wait.
    """
    if shards:
        connection.execute(DURABLY)
        connection.execute(IDLE_NO_LONGER)
        params = {"subscription_id": subscription_id, "shards": array(sorted(shards))}
        connection.execute(NOTE_TAKEN_OUT, params)


def learn_set_aside(connection: psycopg.Connection[Any], batch: Batch) -> bool:
    """Read when messages were set aside; return whether any were since the last read. Only reads.

    Another task with the same batch may have set messages aside, before this one or beside it. Or
    an operator may have decided about parked messages.
    """
    found = dict(fetch(connection, SET_ASIDE_AT, batch._params))
    news = any(batch.set_aside_at.get(shard) != times for shard, times in found.items())
    batch.set_aside_at.update(found)
    return news


def finish(connection: psycopg.Connection[Any], batch: Batch) -> bool:
    """Mark every row of the batch complete; return whether the member should stop.

    Call it in a transaction; its commit does not wait for the disk.
    """
    return any(stopping for _, stopping in _write(connection, CLOSE, batch))


def is_finished(connection: psycopg.Connection[Any], batch: Batch) -> bool:
    """Whether `finish` was committed, for a caller that has lost the answer. Only reads."""
    ((shards,),) = fetch(connection, CLOSED, batch._params)
    return bool(shards == len(batch.epochs))


def close(connection: psycopg.Connection[Any], batches: Iterable[Batch]) -> None:
    """Mark every row of the batches complete: all batches, or none."""
    with connection.transaction():
        for batch in batches:
            finish(connection, batch)


def join_splits(batches: Iterable[Batch]) -> list[Batch]:
    """Join splits of the same batch again, so that one write closes them."""
    parts: dict[Batch, list[tuple[int, int]]] = defaultdict(list)
    for batch in batches:
        parts[replace(batch, epochs=())].extend(batch.epochs)
    return [replace(whole, epochs=tuple(sorted(epochs))) for whole, epochs in parts.items()]


def _fetch(
    connection: psycopg.Connection[Any], query: str, params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    with psycopg.Cursor[Any](connection, row_factory=dict_row) as cursor:
        return cursor.execute(query, params).fetchall()


def _batches(log: str, member: Member, rows: Iterable[dict[str, Any]]) -> list[Batch]:
    return [
        Batch(
            log=log,
            subscription_id=member.subscription_id,
            owner=member.member_id,
            number=row["batch"],
            done=row["done"],
            open=row["open"],
            position=row["position"],
            route_version=row["route_version"],
            opened_at=row["opened_at"],
            epochs=tuple(zip(row["shards"], row["epochs"], strict=True)),
            set_aside_at={
                int(shard): list(map(datetime.fromisoformat, times))
                for shard, times in (row["set_aside_at"] or {}).items()
            },
        )
        for row in rows
        if row["open"] is not None
    ]


def _write(
    connection: psycopg.Connection[Any], statement: str, batch: Batch, **params: Any
) -> list[tuple[Any, ...]]:
    rows = fetch(connection, statement, {**batch._params, **params})
    if len(rows) < len(batch.epochs):
        lost = set(batch.shards) - {row[0] for row in rows}
        raise Fenced("the source", sorted(lost))
    return rows
