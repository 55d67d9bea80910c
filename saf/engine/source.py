"""The source: a broker's open batch, read for a group of shards inside a task.

Reading is by COPY into Arrow, so no Python runs per message. It claims and changes nothing, so a
task may run twice; the batch gives the same rows each time. `messages` yields them by id, with the
columns of `saf.log.columns`. A source that does not answer, or stops answering before the end,
raises `Unavailable`.

A deep batch is put in order here, without sorting it at the source. A log is stored nearly in the
order of its ids, but not quite, because concurrent inserts fill different pages. Sorting millions
of rows takes the server as long as reading them, and needs files of the same size. So a deep batch
is read in windows of some pages each, ordered by their lowest ids, which a survey has found
(`saf.engine.survey`). When a window ends, all rows below the lowest id of the next window are
known, and are sorted here. The others are held back, up to `HELD_BYTES`. If there are more, or if
no survey can be made, the source sorts the rest of the batch after all.

`chunks` cuts what was read into tables that are each stored in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import adbc_driver_manager.dbapi as adbc
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors, sql

from saf.database import Dsn, bulk, connections, translated
from saf.engine.survey import ALONE, NotSurveyed, Window, adopt, survey
from saf.engine.work import Work
from saf.limits import KEPT
from saf.log.columns import common, completed, plain, selected

T = TypeVar("T")

HELD_BYTES = 64 * 1024 * 1024
"""Maximum bytes held back, even within one window: its stored bodies may be compressed."""

BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of sorted rows yielded at a time."""

# For the session: its transactions are read-only, with one snapshot for all statements
ONE_SNAPSHOT = """
SELECT set_config('default_transaction_isolation', 'repeatable read', false),
       set_config('default_transaction_read_only', 'on', false)
"""

GONE = (
    errors.InvalidParameterValue.sqlstate,
    errors.UndefinedObject.sqlstate,
    errors.ObjectNotInPrerequisiteState.sqlstate,
)
"""SQLSTATEs, by server version, for a snapshot whose transaction has ended."""


class NotInWindows(Exception):
    """Too many rows to hold back."""


def messages(work: Work, max_bytes: int) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rest of an item of work, with the columns of `saf.log.columns`, by id.

    Close the generator: until then it holds a snapshot at the source. Raises as `read` does.
    """
    rest = work.batch
    if work.deep:
        try:
            for rows in _in_windows(work, max_bytes):
                yield rows
                rest = replace(rest, position=int(rows["id"][-1].as_py()))
        except (NotInWindows, NotSurveyed):
            pass
        else:
            return
    with _reading(work, alone=True) as cursor:
        yield from given(cursor, rest.select(_columns(cursor, rest.log, max_bytes)))


def _in_windows(work: Work, max_bytes: int) -> Iterator[pa.RecordBatch]:
    batch = work.batch
    with _reading(work) as cursor:
        windows = _windows(cursor, work)
        columns = _columns(cursor, batch.log, max_bytes)
        asked = common(columns)

        def within(window: Window) -> Iterable[pa.RecordBatch]:
            nonlocal asked
            if asked is not columns:
                rows = bounded(given(cursor, window.rows(batch, asked)))
                whole = [complete for piece in rows if (complete := completed(piece)) is not None]
                if len(whole) == len(rows):
                    return whole
                asked = columns  # later windows will have full columns too
            return given(cursor, window.rows(batch, columns))

        yield from in_order(windows, within)


def _windows(cursor: bulk.BulkCursor, work: Work) -> list[Window]:
    """Return the windows of the batch, by the tasks' shared survey or else by its own survey."""
    if work.survey is not None:
        try:
            return adopt(cursor, work.batch, work.survey)
        except adbc.Error as error:
            if getattr(error, "sqlstate", None) not in GONE:
                raise
        cursor.connection.rollback()
    return survey(cursor, work.batch)


def _columns(cursor: bulk.BulkCursor, log: str, max_bytes: int) -> list[str | sql.Composable]:
    kept = cursor.connection.learnt.get(KEPT)
    if not kept:  # a fact about all rows of a log; once true, it stays true
        ((kept,),) = cursor.ask(f"SELECT {KEPT.format(log=log)}")
        cursor.connection.learnt[KEPT] = kept
    return selected(max_bytes, kept=bool(kept))


def in_order(
    windows: Sequence[Window], read: Callable[[Window], Iterable[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that ``read`` returns for surveyed windows, ordered by id.

    Raises:
        NotInWindows: too many rows to hold back.
    """
    held: list[pa.RecordBatch] = []
    for number, window in enumerate(windows, 1):
        held += bounded(read(window), held)
        if held:
            bound = windows[number].lowest if number < len(windows) else None
            rows, known = _in_order(pa.Table.from_batches(held), bound)
            held = rows.slice(known).to_batches()
            yield from _batches(rows.slice(0, known))


def bounded(
    batches: Iterable[pa.RecordBatch], beside: Iterable[pa.RecordBatch] = ()
) -> list[pa.RecordBatch]:
    """Return all batches, unless they exceed the limit together with those ``beside``.

    Raises:
        NotInWindows: they exceed it.
    """
    size = sum(batch.nbytes for batch in beside)
    held = []
    for batch in batches:
        size += batch.nbytes
        if size > HELD_BYTES:
            raise NotInWindows
        held.append(batch)
    return held


def _in_order(rows: pa.Table, bound: int | None) -> tuple[pa.Table, int]:
    """Sort rows; return them, and how many are below the bound, if there is one."""
    ids = rows["id"].to_numpy()
    if (np.diff(ids) < 0).any():
        order = np.argsort(ids, kind="stable")
        rows, ids = rows.take(order), ids[order]
    return rows, len(ids) if bound is None else int(np.searchsorted(ids, bound))


def _batches(rows: pa.Table) -> list[pa.RecordBatch]:
    """Split rows into batches of a bounded size, because sorting made them one."""
    if not rows.num_rows:
        return []
    few = max(1, BATCH_BYTES * rows.num_rows // max(1, rows.nbytes))
    return [batch for batch in rows.to_batches(max_chunksize=few) if batch.num_rows]


def read(work: Work, query: str) -> Iterator[pa.RecordBatch]:
    """Yield a query's result at the source, about 4 MiB at a time, in types Arrow computes with.

    Raises:
        Unavailable: the source does not answer, or stops answering before the end.
    """
    with _reading(work, alone=True) as cursor:
        yield from given(cursor, query)


def given(cursor: bulk.BulkCursor, query: str) -> Iterator[pa.RecordBatch]:
    """Yield a query's result on a cursor of `reading`, in types Arrow computes with."""
    cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
    cursor.execute(query)
    for rows in cursor.batches():
        if rows.num_rows:
            yield plain(rows)


@contextmanager
def reading(
    what: str, dsn: Dsn, *, keep: bool = False, alone: bool = False
) -> Iterator[bulk.BulkCursor]:
    """Open a cursor in a read-only transaction with one snapshot, which no query has taken yet.

    With ``alone``, each query has its own snapshot. The connection is kept only if the block ends
    normally. ``what`` names the database in errors.

    Raises:
        Unavailable: the database does not answer, or stops answering.
    """
    try:
        connection = connections.take(
            "read", dsn, lambda: _open(dsn, what), bulk.Connection.refuse_lost
        )
        try:
            connection.let_alone(alone)
            with connection.cursor() as cursor:
                yield cursor
            connection.rollback()  # so that it does not hold on to its snapshot
        except BaseException:  # including a reader that stops before the end
            connections.drop(connection)
            raise
        connections.put(keep, "read", dsn, connection)
    # Arrow itself raises OSError for a stream that breaks off
    except (adbc.Error, OSError) as error:
        raise translated(what, getattr(error, "sqlstate", None), dsn.reason(error)) from None


def _reading(work: Work, *, alone: bool = False) -> AbstractContextManager[bulk.BulkCursor]:
    return reading(f"broker {work.broker!r}", work.dsn, keep=work.keep, alone=alone)


def _open(dsn: Dsn, what: str) -> bulk.Connection:
    connection = bulk.connect(dsn, "read", what)
    try:
        with connection.cursor() as cursor:
            cursor.ask(ALONE)
            cursor.ask(ONE_SNAPSHOT)
        connection.commit()
    except BaseException:
        connections.drop(connection)
        raise
    return connection


def chunks(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[pa.Table]:
    """Join and split Arrow batches into tables of bounded size.

    A table has at most ``max_rows`` rows, and ends with the batch that reaches ``max_bytes``.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, max_rows - rows)
            start += part.num_rows
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows >= max_rows or size >= max_bytes:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


def up_to(batches: Iterable[pa.RecordBatch], last: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages with ids up to ``last``; the batches are ordered by id."""
    for batch in batches:
        inside = int(pc.sum(pc.less_equal(batch["id"], last)).as_py() or 0)
        yield batch.slice(0, inside)
        if inside < batch.num_rows:
            return


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last one.

    >>> list(with_last("ab")), list(with_last(""))
    ([('a', False), ('b', True)], [])
    """
    rest = iter(items)
    held = list(islice(rest, 1))
    for following in rest:
        yield held.pop(), False
        held.append(following)
    for item in held:
        yield item, True
