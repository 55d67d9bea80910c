"""A survey: where the rows of a deep batch are, and in which order its pages have to be read.

A log is cut into *windows* of some pages each, and the lowest id in each window is looked up. That
takes a look at each row's header, so it is done once for a batch: the tasks that share the batch
share the survey as well. A window's lowest id is that of the whole batch; for the shards of one
task it is a lower bound, which is all that `saf.engine.windows` needs.

*What makes it safe to share.* A survey is true in the snapshot that it was made in, as long as its
transaction has the log locked: no row that the snapshot shows leaves its page. So whoever uses the
survey locks the log too, and then adopts the snapshot (`adopt`), which PostgreSQL allows only while
the transaction that has exported it goes on. From the survey to the last row that is read, somebody
holds the lock, and everybody sees the same versions of the same rows: VACUUM FULL and TRUNCATE have
to wait, and what an UPDATE writes elsewhere is not seen. If that transaction has ended, nothing is
known any more, and the task makes a survey of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from psycopg import sql

from saf.log.cursor import Batch, begun_since, since
from saf.log.ring import SLOT_ROWS, SLOTS

WINDOW_BYTES = 8 * 1024 * 1024
"""The size of a window, in bytes, as it is stored."""

AT_ONCE = 256
"""How many windows one statement surveys."""

ISOLATION = "repeatable read"
# One snapshot for all statements of a reader. Must come before any query of the transaction.
ONE_SNAPSHOT = f"SET TRANSACTION ISOLATION LEVEL {ISOLATION}, READ ONLY"

# For the session. Tasks are the parallelism: parallel workers of PostgreSQL would only pass rows to
# each other.
ALONE = "SELECT set_config('max_parallel_workers_per_gather', '0', false)"

EXPORT = "SELECT pg_export_snapshot()"
# The lock comes first: where the snapshot can be adopted after it, its exporter's locks have not
# ended before. It takes no snapshot of its own, as a query would.
LOCK = "LOCK TABLE {log} IN ACCESS SHARE MODE"
ADOPT = "SET TRANSACTION SNAPSHOT {snapshot}"

# Only the index can say quickly that a full slot holds nothing of the batch. To read some pages the
# index is of no use, whatever the planner expects. A query each, because ADBC prepares statements.
BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       current_setting('transaction_isolation')
"""
BY_PAGES = "SELECT set_config('enable_indexscan', 'off', true)"

# The slot by the expression of the partitions, so that the planner leaves out the others
IN_SLOT = "(SELECT * FROM {log} WHERE (id / {slot_rows}) % {slots} = {slot}) AS slot"
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
    """What is needed of a cursor of a database."""

    def execute(self, operation: str, /) -> object:
        """Run a statement."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return its rows."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The rows of a batch on some pages of a slot, from page ``first`` to before page ``end``."""

    slot: int
    first: int
    end: int
    lowest: int = 0
    """The lowest id in the window."""

    def rows(self, batch: Batch, columns: Iterable[str | sql.Composable]) -> str:
        """The query for these rows, in no order."""
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
    """The windows of a batch, for whoever adopts the snapshot that they were found in."""

    windows: tuple[Window, ...]
    snapshot: str
    """The name under which the snapshot was exported."""


class NotSurveyed(Exception):
    """The transaction has no snapshot that all its statements share, so a survey means nothing."""


def export(cursor: Querying, batches: Iterable[Batch]) -> list[Survey]:
    """Survey batches for others; the surveys can be used as long as the transaction goes on.

    Raises as `survey` does.
    """
    found = [tuple(survey(cursor, batch)) for batch in batches]
    cursor.execute(EXPORT)
    ((snapshot,),) = cursor.fetchall()
    return [Survey(windows=windows, snapshot=snapshot) for windows in found]


def adopt(cursor: Querying, batch: Batch, shared: Survey) -> list[Window]:
    """Read what a survey has found, in its snapshot; call it before any query of a transaction.

    Raises what the database says if the survey's transaction has ended.
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
    """Return the windows with rows of a batch, in the order in which they have to be read.

    Raises:
        NotSurveyed: the transaction is not one of repeatable reads.
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
        some = windows[start : start + AT_ONCE]
        each = ", ".join(LOWEST.format(rows=window.rows(batch, ["id"])) for window in some)
        cursor.execute(f"SELECT ARRAY[{each}]")
        ((lowest,),) = cursor.fetchall()
        found += [
            replace(window, lowest=id_)
            for window, id_ in zip(some, lowest, strict=True)
            if id_ is not None
        ]
    return sorted(found, key=lambda window: window.lowest)


def _cut(slot: int, pages: int, size: int) -> Iterator[Window]:
    """Cut a slot of so many pages and bytes into windows; the bytes include large bodies."""
    step = max(1, WINDOW_BYTES * pages // size)
    for first in range(0, pages, step):
        yield Window(slot=slot, first=first, end=first + step)


def _sizes(batch: Batch, slot: int) -> str:
    """The query for the size of a slot, if it holds anything of the batch."""
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
