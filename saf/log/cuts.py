"""Cuts: ids up to which a stream reads, so that it reads no more rows or bytes than requested.

Rows are returned ordered by id, and no index has that order. So the rows of a range are counted
once, in groups of some thousands of ids, by one read of each row and without sorting. These counts
show in which group the cut is, and its few thousand rows show where exactly. The counts also show
which transactions wrote the rows up to the cut, so only these transactions' rows are read: many
cuts of a deep backlog together cost little more than reading it.

The rows of one transaction are all read for each cut in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.log.cursor import BY_INDEX
from saf.log.offset import Range

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
        """Return the next rows with ids above ``after``, within the limit; None if there are none.

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
