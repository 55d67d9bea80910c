"""A partition of a read: the rows of some shards in the snapshot, by id, as one task reads them.

Reading changes nothing, and gives the same rows each time, so a task may be tried again, or run
twice. From the check for purges on, a lock keeps the rest from being purged until the last row is
given.
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
    """What one task needs. Spark hands it to that task alone, and shows it nowhere."""

    what: str
    """The database, for people."""
    broker: str
    """Its name in saf.toml, or where its dsn was found."""
    dsn: Dsn
    batch: Batch
    kept: bool
    """Whether the log's constraint holds for all rows; see `saf.limits.KEPT`."""
    files: tuple[int, ...]
    """What identified the storage of each slot when the snapshot was taken."""
    deep: bool
    """Whether the log is too large to have its rows sorted at the source."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """What is asked of each partition."""

    asked: StructType
    conditions: tuple[Condition, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns of the log that it gives, the id among them."""
        return fields.columns_read(self.asked, ())

    @property
    def has_seldom(self) -> bool:
        """Whether it gives columns that most messages do not have."""
        return not UNCOMMON.keys().isdisjoint(self.names)

    def columns(self, *, kept: bool, common: bool = False) -> list[str | sql.Composable]:
        """The columns of the log that it needs; ``common`` as in `saf.log.columns.common`."""
        others = (condition.column for condition in self.conditions)
        names = fields.columns_read(self.asked, others)
        if not common:
            return fields.at_source(names, kept=kept)
        some = [name for name in names if name not in UNCOMMON]
        return [*fields.at_source(some, kept=kept), MORE_THAN_COMMON]

    def of(self, rows: str, *, common: bool = False) -> str:
        """The whole query, of a query for its `columns`."""
        names = self.names
        if common:
            names = [*(name for name in names if name not in UNCOMMON), MORE]
        conditions = " AND ".join(["true", *(one.text for one in self.conditions)])
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
    """Give a partition's rows in the schema that was asked for.

    Raises:
        PurgedMeanwhile: some of the rows are not there any more.
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
                whole = [one for some in rows if (one := completed(some, query.names)) is not None]
                if len(whole) == len(rows):
                    return whole
                common = False  # the other windows will have the columns that these have
            return bounded(given(cursor, query.of(window.rows(batch, columns))))

        yield from in_order(survey(cursor, batch), within)


@contextmanager
def _unpurged(part: Part) -> Iterator[bulk.BulkCursor]:
    """A cursor of a transaction in which all rows are still there, and stay."""
    log = part.batch.log
    with reading(part.what, part.dsn) as cursor:
        cursor.execute(sql.SQL(LOCK).format(log=sql.Identifier(log)).as_string(None))
        cursor.execute(FILES.format(log=log))
        ((files,),) = cursor.fetchall()
        purged = [
            slot
            for slot, (now, then) in enumerate(zip(files, part.files, strict=True))
            if now != then
        ]
        if purged and not _keeps(cursor, part.batch):
            raise PurgedMeanwhile(part.what, log, purged)
        yield cursor


def _keeps(cursor: bulk.BulkCursor, batch: Batch) -> bool:
    """Whether a stream's subscription keeps all of a batch: what was purged is older."""
    shards = ", ".join(map(str, batch.shards))
    cursor.execute(COMMITTED.format(subscription_id=batch.subscription_id, shards=shards))
    committed = cursor.fetchall()
    return {shard for shard, _ in committed} == {*batch.shards} and all(
        shows_all_of(batch.done, done) for _, done in committed
    )
