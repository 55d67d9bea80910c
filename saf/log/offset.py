"""An offset: a stream's progress in one broker, as its checkpoint stores it.

A stream reads a log as `saf.log.cursor` does, in batches between two snapshots. Its cursors store
its *committed* progress. Its *read* progress is in its own checkpoint, as an offset with the same
contents as a cursor: ``done``, ``open`` and ``position``. So two offsets always name the same set
of rows: those that the later offset has and the earlier lacks (`between`).

An offset also contains its broker, incarnation and subscription, and the number of its batch. These
show whether a database was set back: see `saf.log.stream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

from psycopg import sql

from saf.log.cursor import Batch

BEGINNING = "1:1:"
"""A snapshot that shows no rows."""

# Appended to the conditions of a batch's rows
NOT_BEFORE = " AND NOT (pg_visible_in_snapshot(txid, {open}::pg_snapshot) AND id <= {position})"
UP_TO = " AND (id <= {position} OR pg_visible_in_snapshot(txid, {done}::pg_snapshot))"
WRITTEN_BY = " AND txid BETWEEN {first}::xid8 AND {last}::xid8"


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
