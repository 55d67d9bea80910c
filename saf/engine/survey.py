"""A survey: where the rows of a deep batch are, and in which order to read its pages.

A log is cut into *windows* of some pages each, and the survey finds the lowest id in each window.
This reads each row's header, so it is done once per batch: tasks that share the batch share the
survey. A window's lowest id is that of the whole batch; for the shards of one task it is a lower
bound, and `saf.engine.source` needs no more.

*Why sharing is safe.* A survey is true in its snapshot while its transaction has the log locked: no
row that the snapshot shows leaves its page. So each user of the survey locks the log too, and then
adopts the snapshot (`adopt`). PostgreSQL allows this only while the transaction that exported the
snapshot is open. From the survey to the last row that is read, some transaction holds the lock, and
all see the same versions of the same rows: VACUUM FULL and TRUNCATE have to wait, and rows that an
UPDATE writes elsewhere are not seen. If that transaction has ended, the survey is worthless, and
the task makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from psycopg import sql

from saf.log.cursor import Batch
from saf.log.read import begun_since, since
from saf.log.ring import SLOT_ROWS, SLOTS

WINDOW_BYTES = 8 * 1024 * 1024
"""Stored size of a window, in bytes."""

AT_ONCE = 256
"""Windows that one statement surveys."""

ISOLATION = "repeatable read"
# One snapshot for all statements of a reader. Must come before any query of the transaction.
ONE_SNAPSHOT = f"SET TRANSACTION ISOLATION LEVEL {ISOLATION}, READ ONLY"

# For the session. Tasks are the parallelism: parallel workers of PostgreSQL would only pass rows to
# each other.
ALONE = "SELECT set_config('max_parallel_workers_per_gather', '0', false)"

EXPORT = "SELECT pg_export_snapshot()"
# The lock comes first: if the snapshot can still be adopted afterwards, its exporter has held its
# locks until then. Unlike a query, LOCK TABLE takes no snapshot.
LOCK = "LOCK TABLE {log} IN ACCESS SHARE MODE"
ADOPT = "SET TRANSACTION SNAPSHOT {snapshot}"

# Only the index can show quickly that a full slot contains nothing of the batch. For reading some
# pages the index is useless, whatever the planner expects. Separate queries, because ADBC prepares
# statements.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       current_setting('transaction_isolation')
"""
BY_PAGES = "SELECT set_config('enable_indexscan', 'off', true)"

# Name the slot by the partitions' expression, so that the planner skips the others
IN_SLOT = "(SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot})"
IN_WINDOW = """
SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}
AND ctid >= {first}::tid AND ctid < {end}::tid AND shard = ANY ({shards}::smallint[])
AND (txid >= {xmax}::xid8 OR txid = ANY ({xip}::xid8[]))
"""

SIZES = """
SELECT {slot}, pg_relation_size({name}::regclass) / current_setting('block_size')::bigint,
       pg_table_size({name}::regclass)
WHERE EXISTS ({rows})
"""
LOWEST = "(SELECT min(id) FROM ({rows}) AS rows)"


class Querying(Protocol):
    """The methods needed of a database cursor."""

    def execute(self, operation: str, /) -> object:
        """Run a statement."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the statement's rows."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of a batch on some pages of a slot, from page ``first`` to before page ``end``."""

    slot: int
    first: int
    end: int
    lowest: int = 0
    """The lowest id in the window."""

    def rows(self, batch: Batch, columns: Iterable[str | sql.Composable]) -> str:
        """Return the query for these rows, unordered."""
        xmax, in_progress = begun_since(batch.done)
        found = sql.SQL(IN_WINDOW).format(
            **_slot(batch, self.slot),
            first=f"({self.first},0)",
            end=f"({self.end},0)",
            shards=sql.Literal(batch.shards),
            xmax=xmax,
            xip=sql.Literal(in_progress),
        )
        return batch.rows(columns, found)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The windows of a batch, usable in the snapshot in which they were found."""

    windows: tuple[Window, ...]
    snapshot: str
    """The name under which the snapshot was exported."""


class NotSurveyed(Exception):
    """The statements of the transaction do not share a snapshot, so a survey means nothing."""


def export(cursor: Querying, batches: Iterable[Batch]) -> list[Survey]:
    """Survey batches for other tasks; the surveys are usable while the transaction is open.

    Raises as `survey` does.
    """
    found = [tuple(survey(cursor, batch)) for batch in batches]
    cursor.execute(EXPORT)
    ((snapshot,),) = cursor.fetchall()
    return [Survey(windows=windows, snapshot=snapshot) for windows in found]


def adopt(cursor: Querying, batch: Batch, shared: Survey) -> list[Window]:
    """Adopt a survey's snapshot and return its windows; call before any query of a transaction.

    Raises the database's error if the survey's transaction has ended.
    """
    lock = sql.SQL(LOCK).format(log=sql.Identifier("saf", batch.log))
    cursor.execute(lock.as_string(None))
    adoption = sql.SQL(ADOPT).format(snapshot=sql.Literal(shared.snapshot))
    cursor.execute(adoption.as_string(None))
    for setting in (BY_INDEX, BY_PAGES):
        cursor.execute(setting)
        cursor.fetchall()
    return list(shared.windows)


def survey(cursor: Querying, batch: Batch) -> list[Window]:
    """Return the windows with rows of a batch, in the order in which to read them.

    Raises:
        NotSurveyed: the transaction's isolation level is not repeatable read.
    """
    cursor.execute(BY_INDEX)
    if cursor.fetchall()[0][-1] != ISOLATION:
        raise NotSurveyed
    cursor.execute(" UNION ALL ".join(_sizes(batch, slot) for slot in range(SLOTS)))
    windows = [
        window for slot, pages, size in cursor.fetchall() for window in _cut(slot, pages, size)
    ]
    cursor.execute(BY_PAGES)
    found: list[Window] = []
    for start in range(0, len(windows), AT_ONCE):
        group = windows[start : start + AT_ONCE]
        queries = ", ".join(LOWEST.format(rows=window.rows(batch, ["id"])) for window in group)
        cursor.execute(f"SELECT ARRAY[{queries}]")
        ((lowest,),) = cursor.fetchall()
        found += [
            replace(window, lowest=id_)
            for window, id_ in zip(group, lowest, strict=True)
            if id_ is not None
        ]
    return sorted(found, key=lambda window: window.lowest)


def _cut(slot: int, pages: int, size: int) -> Iterator[Window]:
    """Cut a slot into windows by its pages and bytes; the bytes include large bodies.

    >>> [(window.first, window.end) for window in _cut(0, 2500, 2500 * 8192)]
    [(0, 1024), (1024, 2048), (2048, 3072)]
    """
    step = max(1, WINDOW_BYTES * pages // size)
    for first in range(0, pages, step):
        yield Window(slot=slot, first=first, end=first + step)


def _sizes(batch: Batch, slot: int) -> str:
    """Return the query for the size of a slot, if it contains anything of the batch."""
    part = sql.SQL(IN_SLOT).format(**_slot(batch, slot))
    query = sql.SQL(SIZES).format(
        slot=slot,
        name=f"saf.{batch.log}_{slot}",
        rows=sql.SQL(batch.rows(["id"], since(part, batch.shards, batch.done))),
    )
    return query.as_string(None)


def _slot(batch: Batch, slot: int) -> dict[str, Any]:
    log = sql.Identifier("saf", batch.log)
    return {"log": log, "slot_rows": SLOT_ROWS, "slots": SLOTS, "slot": slot}
