"""Offsets: a stream's progress in one broker, as its checkpoint stores it.

A stream reads a log as `saf.log.cursor` does, in batches between two snapshots. Its cursors store
its *committed* progress. Its *read* progress is in its own checkpoint, as an offset with the same
contents as a cursor: ``done``, ``open`` and ``position``. So two offsets always name the same set
of rows: those that the later offset has and the earlier lacks (`between`).

An offset also contains its broker, incarnation and subscription, and the number of its batch. These
show whether a database was set back: see `saf.log.stream`. Nothing here writes to a database.

*Cuts* are ids up to which a stream reads, so that it reads no more rows or bytes than requested
(`Counted`). Rows are returned ordered by id, and no index has that order. So the rows of a range
are counted once, in groups of some thousands of ids, by one read of each row and without sorting.
These counts show in which group the cut is, and its few thousand rows show where exactly. The
counts also show which transactions wrote the rows up to the cut, so only these transactions' rows
are read: many cuts of a deep backlog together cost little more than reading it. The rows of one
transaction are all read for each cut in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.log.cursor import Batch
from saf.log.read import BY_INDEX

BEGINNING = "1:1:"
"""A snapshot that shows no rows."""

# Appended to the conditions of a batch's rows
NOT_BEFORE = " AND NOT (pg_visible_in_snapshot(txid, {open}::pg_snapshot) AND id <= {position})"
UP_TO = " AND (id <= {position} OR pg_visible_in_snapshot(txid, {done}::pg_snapshot))"
WRITTEN_BY = " AND txid BETWEEN {first}::xid8 AND {last}::xid8"

PART_BITS = 13
"""Each count covers 2 ** 13 ids."""

BYTES = "coalesce(octet_length(body), 0) AS bytes"
COUNT = """
SELECT (id >> {bits}) AS part, count(*), sum(bytes)::bigint,
       min(txid::text::bigint), max(txid::text::bigint)
FROM ({rows}) AS rows GROUP BY 1 ORDER BY 1
"""
WITHIN = """
SELECT max(id) FILTER (WHERE fits), count(*) FILTER (WHERE fits),
       coalesce(sum(bytes) FILTER (WHERE fits), 0)::bigint, count(*)
FROM (
    SELECT id, bytes, number <= {most_rows} AND total <= {most_bytes} OR {force} AND number = 1
               AS fits
    FROM (SELECT id, bytes, row_number() OVER by_id AS number, sum(bytes) OVER by_id AS total
          FROM ({rows}) AS rows WHERE id > {after} AND id <= {end}
          WINDOW by_id AS (ORDER BY id)) AS counted) AS tried
"""
NO_LIMIT = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True)
class Offset:
    """A stream's progress: all rows visible in ``done``, and those of ``open`` up to a position."""

    broker: str
    """The broker's id."""
    incarnation: int
    """The broker's incarnation; a repair raises it."""
    subscription: int
    """The subscription's id."""
    batch: int
    """The number of the last batch that was read, at least in part."""
    done: str
    """pg_snapshot as text."""
    open: str = ""
    """pg_snapshot as text; "" if the last batch was read to its end."""
    position: int = 0
    """An id, within ``open``."""
    settled: bool = False
    """Whether nothing was read between the previous offset and this one."""

    @property
    def end(self) -> str:
        """The snapshot at which its last batch ends."""
        return self.open or self.done

    @property
    def rest(self) -> Self:
        """The end of its last batch."""
        return replace(self, done=self.end, open="", position=0)

    def as_dict(self) -> dict[str, Any]:
        """Return the offset as Spark stores it: strings, numbers and booleans."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Return the offset that `as_dict` has converted.

        Raises:
            ValueError: not a dictionary of `as_dict`.
        """
        try:
            found = cls(**given)
        except TypeError:
            raise ValueError(str(dict(given))) from None
        types = {"str": str, "int": int, "bool": bool}
        if any(
            type(getattr(found, field.name)) is not types[str(field.type)] for field in fields(cls)
        ):
            raise ValueError(str(dict(given)))
        return found


def shows_all_of(later: str, earlier: str) -> bool:
    """Whether a snapshot shows all that an earlier snapshot shows.

    >>> shows_all_of("10:20:10,15", "9:12:9,10"), shows_all_of("10:20:10,15", "12:12:")
    (True, False)
    >>> shows_all_of("20:20:", "10:20:10"), shows_all_of("10:20:10", "20:20:")
    (True, False)
    """
    first, end, running = _parts(earlier)
    later_first, later_end, later_running = _parts(later)
    del first, later_first
    return end <= later_end and all(txid in running for txid in later_running if txid < end)


def _parts(snapshot: str) -> tuple[int, int, set[int]]:
    first, end, running = snapshot.split(":")
    return int(first), int(end), {int(txid) for txid in running.split(",") if txid}


@dataclass(frozen=True, kw_only=True)
class Range(Batch):
    """The rows between two offsets, as a batch that nobody owns and that can only be read."""

    before: tuple[str, int] | None = None
    """A snapshot and a position: rows that it shows, up to the position, were read already."""
    until: tuple[str, int] | None = None
    """A snapshot and a position: of rows that it does not show, only those up to the position."""
    written_by: tuple[int, int] | None = None
    """The first and the last transaction that may have written any of the rows, if known."""

    def rows(
        self, columns: Iterable[str | sql.Composable], found: sql.Composable | None = None
    ) -> str:
        """Return the query for these rows, unordered, as `Batch.rows` does."""
        parts = [sql.SQL(super().rows(columns, found))]
        if self.before is not None:
            snapshot, position = map(sql.Literal, self.before)
            parts.append(sql.SQL(NOT_BEFORE).format(open=snapshot, position=position))  # type: ignore[arg-type]
        if self.until is not None:
            snapshot, position = map(sql.Literal, self.until)
            parts.append(sql.SQL(UP_TO).format(done=snapshot, position=position))  # type: ignore[arg-type]
        if self.written_by is not None:
            first, last = (sql.Literal(str(txid)) for txid in self.written_by)
            parts.append(sql.SQL(WRITTEN_BY).format(first=first, last=last))  # type: ignore[arg-type]
        return sql.Composed(parts).as_string(None)


def between(
    log: str,
    start: Offset,
    end: Offset,
    shards: Iterable[int],
    written_by: tuple[int, int] | None = None,
) -> Range:
    """Return the rows of some shards that ``end`` has and ``start`` lacks."""
    same_batch = start.open != "" and start.open == end.end
    return Range(
        log=log,
        subscription_id=end.subscription,
        owner=UUID(int=0),
        number=end.batch,
        done=start.done,
        open=end.end,
        position=start.position if same_batch else 0,
        route_version=None,
        opened_at=datetime.now(UTC),
        epochs=tuple((shard, 0) for shard in shards),
        before=(start.open, start.position) if start.open and not same_batch else None,
        until=(end.done, end.position) if end.open else None,
        written_by=written_by,
    )


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Maximum to read; at least one row is always read."""

    rows: int = NO_LIMIT
    bytes: int = NO_LIMIT
    """Bytes of the bodies."""

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self.rows == self.bytes == NO_LIMIT

    def share(self, among: int) -> Limit:
        """Return the limit for each of ``among`` brokers.

        >>> Limit(rows=7).share(2).rows, Limit(rows=2).share(3).rows
        (3, 1)
        """
        return Limit(
            rows=self.rows if self.rows == NO_LIMIT else max(1, self.rows // among),
            bytes=self.bytes if self.bytes == NO_LIMIT else max(1, self.bytes // among),
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of a range in one group of ids."""

    number: int
    rows: int
    bytes: int
    first_txid: int
    last_txid: int

    @property
    def first(self) -> int:
        """The lowest id that one of its rows may have."""
        return self.number << PART_BITS

    @property
    def end(self) -> int:
        """The highest id that one of its rows may have."""
        return self.first + (1 << PART_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The next rows to read of a range."""

    position: int | None
    """The last id; None: all remaining rows."""
    written_by: tuple[int, int]
    """The first and the last transaction that wrote any of the rows."""


class Counted:
    """A range whose rows were counted; it is cut from its beginning to its end."""

    def __init__(self, connection: psycopg.Connection[Any], whole: Range) -> None:
        with connection.transaction():
            connection.execute(BY_INDEX)
            query = sql.SQL(COUNT).format(bits=PART_BITS, rows=_rows(whole))
            found = fetch(connection, query)
        self._whole = whole
        self._parts = [
            Part(number=part, rows=rows, bytes=size, first_txid=first, last_txid=last)
            for part, rows, size, first, last in found
        ]

    def next(self, connection: psycopg.Connection[Any], after: int, limit: Limit) -> Cut | None:
        """Return the next rows with ids above ``after``, within the limit; None after the last.

        They include at least one row, even if that row alone exceeds the limit.
        """
        rows_left, bytes_left = limit.rows, limit.bytes
        taken: list[Part] = []
        for part in self._parts:
            if part.end <= after:
                continue
            if part.first > after and part.rows <= rows_left and part.bytes <= bytes_left:
                rows, size = part.rows, part.bytes
            else:
                last, rows, size, all_rows = self._within(
                    connection, part, after, rows_left, bytes_left, force=not taken
                )
                if rows < all_rows:
                    taken += [part] * (rows > 0)
                    # a position need not be the id of a row
                    return _cut(taken, last if rows else part.first - 1)
                if not rows:
                    continue
            taken.append(part)
            rows_left, bytes_left = rows_left - rows, bytes_left - size
        return _cut(taken, None) if taken else None

    def _within(
        self,
        connection: psycopg.Connection[Any],
        part: Part,
        after: int,
        most_rows: int,
        most_bytes: int,
        *,
        force: bool,
    ) -> tuple[int, int, int, int]:
        """Return a part's last id, rows and bytes that fit, and the number of all its rows."""
        near = replace(self._whole, written_by=(part.first_txid, part.last_txid))
        query = sql.SQL(WITHIN).format(
            rows=_rows(near),
            after=max(after, part.first - 1),
            end=part.end,
            most_rows=most_rows,
            most_bytes=most_bytes,
            force=force,
        )
        with connection.transaction():
            connection.execute(BY_INDEX)
            ((last, rows, size, all_rows),) = fetch(connection, query)
        return last, rows, size, all_rows


def _cut(taken: list[Part], position: int | None) -> Cut:
    first, last = min(row.first_txid for row in taken), max(row.last_txid for row in taken)
    return Cut(position=position, written_by=(first, last))


def _rows(of: Range) -> sql.Composable:
    return sql.SQL(of.rows(["id", "txid", sql.SQL(BYTES)]))
