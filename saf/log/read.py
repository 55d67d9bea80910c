"""Reading: the rows of a log that a reader has not read yet, as SQL.

Everything that reads a log finds its rows here: tasks of the engine and of Spark by COPY, which
takes no parameters; receivers and dispatchers by parameters; figures, checks and repairs by the
cursors themselves. Cursors are those of `saf.log.cursor`; in SQL, ``c`` is the row of one.

    since       the rows that the snapshot ``done`` does not show
    in a batch  those of them that the snapshot ``open`` shows
    left        those of them that are not complete

A snapshot shows the transactions that began before its xmax and were not in progress. So the rows
that it does not show are of two kinds, and each is a plain range or list on the index (shard,
txid): transactions that began at xmax or later, and those that were in progress. Both are read by
UNION ALL and not by OR, to keep them so. They are disjoint, because transactions in progress are
below xmax. The cost follows the new rows, not the age of the oldest transaction.
"""

from __future__ import annotations

from psycopg import sql

from saf.database import array

BEGUN_SINCE = "SELECT {columns} FROM {log} r WHERE r.shard {shards} AND r.txid >= {xmax}"
ENDED_SINCE = """
UNION ALL
SELECT {columns} FROM {log} r WHERE r.shard {shards} AND r.txid = ANY ({xip})
"""

IN_BATCH = """
txid < pg_snapshot_xmax({open}::pg_snapshot)
AND pg_visible_in_snapshot(txid, {open}::pg_snapshot)
"""
"""SQL: whether a row that is not visible in ``done`` is in the batch up to a snapshot."""

COMPLETE = (
    "(c.open IS NOT NULL AND pg_visible_in_snapshot({row}.txid, c.open) AND {row}.id <= c.position)"
)
"""SQL: whether a row that is not visible in ``done`` is complete, by its cursor ``c``."""

BEYOND = """
LEFT JOIN saf.dispatched d ON c.open IS NOT NULL
    AND d.subscription_id = c.subscription_id AND d.shard = c.shard AND d.batch = c.batch
"""
"""SQL: joins ``d.ids``: in the open batch, a dispatcher has completed them beyond the position."""

# For a session that polls for new rows: most polls find nothing, which only the index can show
# quickly. With stale statistics, the planner may choose to scan the whole table, hoping to meet a
# row early.
BY_INDEX = "SET enable_seqscan = off; SET enable_bitmapscan = off"


def since(log: str | sql.Composable, shards: list[int], done: str) -> sql.Composed:
    """Return the query for all rows that are not visible in a snapshot, committed or not.

    ``log`` is the name of a log or of a slot of its ring, or an SQL expression for use in FROM. The
    result has no parameters.
    """
    xmax, in_progress = begun_since(done)
    parts = {
        "columns": sql.SQL("*"),
        "log": sql.Identifier("saf", log) if isinstance(log, str) else log,
        "shards": sql.SQL("= ANY ({}::smallint[])").format(sql.Literal(array(shards))),
        "xmax": sql.SQL("{}::xid8").format(sql.Literal(xmax)),
        "xip": sql.SQL("{}::xid8[]").format(sql.Literal(array(in_progress))),
    }
    query = sql.SQL(BEGUN_SINCE).format(**parts)
    return query + sql.SQL(ENDED_SINCE).format(**parts) if in_progress else query


def since_shown(
    log: str = "saf.inbox",
    columns: str = "*",
    *,
    shards: str = "= c.shard",
    done: str = "c.done",
) -> str:
    """Return SQL for the rows that ``done`` does not show, by default of a cursor ``c``.

    Columns are those of the log, which is ``r``; the other parts are SQL expressions.
    """
    xip = f"ARRAY(SELECT pg_snapshot_xip({done}))"
    parts = {"log": log, "columns": columns, "shards": shards, "xip": xip}
    return (BEGUN_SINCE + ENDED_SINCE).format(**parts, xmax=f"pg_snapshot_xmax({done})")


def left(log: str, columns: str = "*") -> str:
    """Return SQL for the rows that a cursor ``c`` has not completed, as `since_shown` does.

    The columns include ``id`` and ``txid``. Ids of `BEYOND` are not considered.
    """
    rows = since_shown(log, columns)
    return f"SELECT * FROM ({rows}) AS since WHERE NOT {COMPLETE.format(row='since')}"


# Each shard's incomplete rows, found by the index; as in saf.status for the outbox. Messages that a
# dispatcher has completed beyond the position belong to the open batch.
UNREAD = f"""
saf.cursor c {BEYOND}
CROSS JOIN LATERAL ({left("saf.inbox")}) AS since
WHERE c.subscription_id = s.subscription_id
  AND NOT coalesce(since.id <@ d.ids AND pg_visible_in_snapshot(since.txid, c.open), false)
  AND (s.service IS NULL OR since.to_service = s.service)
"""
"""SQL: the messages ``since`` that a subscription ``s`` of the inbox has not read."""


def begun_since(done: str) -> tuple[str, list[str]]:
    """Return the first transaction that began after a snapshot, and those then in progress.

    >>> begun_since("10:20:10,14"), begun_since("10:20:")
    (('20', ['10', '14']), ('20', []))
    """
    _, xmax, in_progress = done.split(":")
    return xmax, in_progress.split(",") if in_progress else []
