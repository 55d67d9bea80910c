"""A partition of a read: the rows of some shards in the snapshot, ordered by id, for one task.

Reading changes nothing and returns the same rows each time, so a task may be retried, or run twice.
From the purge check until the last row is returned, a lock prevents purges of the remaining rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from saf.database import Dsn, bulk
from saf.engine.source import given, reading
from saf.engine.survey import NotSurveyed, Window, survey
from saf.engine.windows import NotInWindows, bounded, in_order
from saf.errors import PurgedMeanwhile
from saf.log.columns import MORE, MORE_THAN_COMMON, UNCOMMON, completed
from saf.log.cursor import Batch
from saf.log.offset import shows_all_of
from saf.spark.table import fields
from saf.spark.table.filters import Condition
from saf.spark.table.snapshot import FILES, LOCK

COMMITTED = """
SELECT shard, done::text FROM saf.cursor
WHERE subscription_id = {subscription_id} AND shard IN ({shards})
"""

ROWS = "SELECT {columns} FROM ({rows}) AS message WHERE {conditions}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(InputPartition):
    """Everything that one task needs. Spark passes it to that task only, and never shows it."""

    what: str
    """The database, for error messages."""
    broker: str
    """The broker's name in saf.toml, or the place of its dsn."""
    dsn: Dsn
    batch: Batch
    kept: bool
    """True if the log's constraint holds for all rows; see `saf.limits.KEPT`."""
    files: tuple[int, ...]
    """Storage identifier of each slot at the time of the snapshot."""
    deep: bool
    """True if the log is too large to sort its rows at the source."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """The query for each partition."""

    asked: StructType
    conditions: tuple[Condition, ...] = ()

    @property
    def names(self) -> list[str]:
        """The log's columns that the query returns, including the id."""
        return fields.columns_read(self.asked, ())

    @property
    def has_seldom(self) -> bool:
        """True if the query returns columns that most messages lack."""
        return not UNCOMMON.keys().isdisjoint(self.names)

    def columns(self, *, kept: bool, common: bool = False) -> list[str | sql.Composable]:
        """Return the log's columns to read; ``common``: see `saf.log.columns.common`."""
        others = (condition.column for condition in self.conditions)
        names = fields.columns_read(self.asked, others)
        if not common:
            return fields.at_source(names, kept=kept)
        common_names = [name for name in names if name not in UNCOMMON]
        return [*fields.at_source(common_names, kept=kept), MORE_THAN_COMMON]

    def of(self, rows: str, *, common: bool = False) -> str:
        """Return the whole query around ``rows``, a query for its `columns`."""
        names = self.names
        if common:
            names = [*(name for name in names if name not in UNCOMMON), MORE]
        conditions = " AND ".join(["true", *(condition.text for condition in self.conditions)])
        return (
            sql.SQL(ROWS)
            .format(
                columns=sql.SQL(", ").join(map(sql.Identifier, names)),
                rows=sql.SQL(rows),
                conditions=sql.SQL(conditions),
            )
            .as_string(None)
        )


def read(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield a partition's rows in the requested schema.

    Raises:
        PurgedMeanwhile: some of the rows were purged.
        Unavailable: the database does not answer, or stops answering.
    """
    for rows in _rows(part, query):
        yield fields.shaped(rows, query.asked, part.broker)


def _rows(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    rest = part.batch
    if part.deep:
        try:
            for rows in _in_windows(part, query):
                yield rows
                rest = replace(rest, position=int(rows["id"][-1].as_py()))
        except (NotInWindows, NotSurveyed):
            pass
        else:
            return
    with _unpurged(part) as cursor:
        sorted_ = f"{query.of(rest.rows(query.columns(kept=part.kept)))} ORDER BY id"
        yield from given(cursor, sorted_)


def _in_windows(part: Part, query: Query) -> Iterator[pa.RecordBatch]:
    batch, common = part.batch, query.has_seldom
    columns = query.columns(kept=part.kept)
    few = query.columns(kept=part.kept, common=True)
    with _unpurged(part) as cursor:

        def within(window: Window) -> Iterable[pa.RecordBatch]:
            nonlocal common
            if common:
                rows = bounded(given(cursor, query.of(window.rows(batch, few), common=True)))
                whole = [
                    complete
                    for piece in rows
                    if (complete := completed(piece, query.names)) is not None
                ]
                if len(whole) == len(rows):
                    return whole
                common = False  # expect the same columns in the other windows
            return bounded(given(cursor, query.of(window.rows(batch, columns))))

        yield from in_order(survey(cursor, batch), within)


@contextmanager
def _unpurged(part: Part) -> Iterator[bulk.BulkCursor]:
    """Yield a cursor of a transaction in which all rows exist, and cannot be purged."""
    log = part.batch.log
    with reading(part.what, part.dsn) as cursor:
        cursor.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)).as_string(None))
        cursor.execute(FILES.format(log=log))
        ((files,),) = cursor.fetchall()
        purged = [
            slot
            for slot, (now, before) in enumerate(zip(files, part.files, strict=True))
            if now != before
        ]
        if purged and not _keeps(cursor, part.batch):
            raise PurgedMeanwhile(part.what, log, purged)
        yield cursor


def _keeps(cursor: bulk.BulkCursor, batch: Batch) -> bool:
    """Return whether a stream's subscription retains a whole batch: only older rows were purged."""
    shards = ", ".join(map(str, batch.shards))
    cursor.execute(COMMITTED.format(subscription_id=batch.subscription_id, shards=shards))
    committed = cursor.fetchall()
    return {shard for shard, _ in committed} == {*batch.shards} and all(
        shows_all_of(batch.done, done) for _, done in committed
    )
