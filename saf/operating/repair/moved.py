"""How a broker was moved, and which messages were written here since, as its rows show.

The transaction ids of a broker that was moved into another cluster mean nothing there. For a
message that the move brought, the cursors that came with it show whether it is complete. A message
that was written here since the move is pending, whatever its transaction id happens to be. How the
broker was moved decides which rows the move brought:

    dump      COPY has brought all rows and all cursors; all later rows were written here
    logical   logical replication brought them: first by COPY, then transaction by transaction
    copy      a copy of the storage, and perhaps logical replication after it: rows that were
              written long before look as if they had been written here
    upgrade   as pg_upgrade does: no rows were brought, and the cursors are right

The rows show this:

- Rows of several transactions that share one xmin were brought by a COPY.
- A row whose xmin is older than its transaction id was brought.
- No cursor was written here during the move. So a row that came here after a cursor is not
  complete for that cursor, whether the row was brought or written here.
- saf.timeline names the transaction that wrote its row: if another transaction wrote the row here,
  the row was brought.

`by` finds the possible ways. If two of them would give different results for some message, the
operator has to choose.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Any

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.errors import UsageError
from saf.log import lineage
from saf.log.shards import full


class MovedBy(StrEnum):
    """How a broker was moved to its cluster."""

    DUMP = "dump"
    LOGICAL = "logical"
    COPY = "copy"
    UPGRADE = "upgrade"


# The row of saf.timeline was written by the transaction that it names
WRITTEN_HERE = """
SELECT xmin::text::bigint = written::text::bigint & 4294967295 FROM saf.timeline
"""
ONE_COPY = "SELECT count(DISTINCT xmin::text) = 1 FROM saf.cursor"

_BROUGHT_BY_COPY = """
SELECT xmin::text AS xmin FROM {log} GROUP BY 1
HAVING min(txid::text::bigint) <> max(txid::text::bigint)
"""

# The last transaction of a dump, or of an initial copy, as far as the rows show it
_LAST_COPY = f"""
greatest((SELECT max({full("t.xmin")}) FROM saf.timeline t
          WHERE t.xmin::text::bigint <> t.written::text::bigint & 4294967295),
         (SELECT max({full("b.xmin")}) FROM brought AS b), 0)
"""

_AFTER_CURSOR = f"{full('l.xmin')} > {full('c.xmin')}"
IS_HERE = {
    MovedBy.DUMP: "l.txid::text::bigint > copied.last",
    MovedBy.LOGICAL: f"""{full("l.xmin")} > copied.last
        AND (l.xmin::text::bigint = l.txid::text::bigint & 4294967295 OR {_AFTER_CURSOR})""",
    MovedBy.COPY: _AFTER_CURSOR,
    MovedBy.UPGRADE: "false",
}

# For each row, one letter per subscription: c completed, h in hand, p pending
_LETTER = f"""
CASE WHEN {full("l.xmin")} >= l.txid::text::bigint AND b.xmin IS NULL AND ({{is_here}}) THEN 'p'
     WHEN pg_visible_in_snapshot(l.txid, c.done) THEN 'c'
     WHEN c.open IS NOT NULL AND pg_visible_in_snapshot(l.txid, c.open) THEN 'h'
     ELSE 'p' END
"""
_STATE = f"coalesce(string_agg({_LETTER}, '' ORDER BY c.subscription_id), '')"
_HERE = f"""
coalesce(bool_and({full("l.xmin")} >= l.txid::text::bigint AND b.xmin IS NULL AND ({{is_here}})),
         false)
"""
_ROWS = f"""
WITH brought AS MATERIALIZED ({_BROUGHT_BY_COPY}),
     copied AS MATERIALIZED (SELECT {_LAST_COPY} AS last)
SELECT {{columns}}
FROM {{log}} l CROSS JOIN copied LEFT JOIN brought b ON b.xmin = l.xmin::text
LEFT JOIN (SELECT c.xmin, c.* FROM saf.cursor c JOIN saf.subscription s USING (subscription_id)
           WHERE s.log = {{name}}) AS c ON c.shard = l.shard
GROUP BY l.tableoid, l.ctid
"""
STATES = f"CREATE TEMPORARY TABLE saf_states ON COMMIT DROP AS {_ROWS}"
HERE = "SELECT count(*) FROM saf_states WHERE is_here"
ANALYZE = "ANALYZE saf_states"
DIFFERENT = f"SELECT count(*), min(id) FROM ({_ROWS}) AS rows WHERE {{differ}}"


def by(connection: psycopg.Connection[Any], told: MovedBy | None) -> MovedBy:
    """Return how a broker was moved whose transaction ids mean nothing here.

    Args:
        connection: to the broker.
        told: the operator's answer.

    Raises:
        UsageError: the operator's answer is impossible, or is needed.
    """
    if told is MovedBy.UPGRADE:
        problem = lineage.foreign(connection)[0]
        raise UsageError(f"not by an upgrade alone, which keeps transaction ids: {problem}")
    if told is not None:
        return told
    possible = [MovedBy.COPY]
    if fetch(connection, WRITTEN_HERE) != [(True,)]:
        possible.insert(0, MovedBy.LOGICAL)
        if fetch(connection, ONE_COPY) == [(True,)]:
            possible.insert(0, MovedBy.DUMP)
    for log in lineage.LOGS if len(possible) > 1 else ():
        count, first = _different(connection, log, possible)
        if count:
            raise UsageError(
                f"the rows do not show how the database was moved, and it matters for {count} "
                f"messages of saf.{log}, the first with id {first}: complete, or written here "
                f"since? Add --moved-by {' or '.join(possible)}; --dry-run shows the changes"
            )
    return possible[0]


def states(connection: psycopg.Connection[Any], log: str, how: MovedBy | None) -> int:
    """Write the state of each row for each subscription to the temporary table saf_states.

    Return how many rows were written here since the move; 0 if nothing was moved.
    """
    is_here = sql.SQL(IS_HERE[how or MovedBy.UPGRADE])
    columns = sql.SQL(
        f"l.tableoid AS slot, l.ctid AS place, {_STATE} AS state, {_HERE} AS is_here"
    ).format(is_here=is_here)
    connection.execute(sql.SQL(STATES).format(**_parts(log), columns=columns))
    connection.execute(ANALYZE)
    ((here,),) = fetch(connection, HERE)
    return int(here)


def _different(
    connection: psycopg.Connection[Any], log: str, ways: Collection[MovedBy]
) -> tuple[int, int | None]:
    """Return how many messages get different states by different ways, and the first id."""
    columns = [sql.SQL(f"{_STATE} AS {way}").format(is_here=sql.SQL(IS_HERE[way])) for way in ways]
    first, *others = ways
    query = sql.SQL(DIFFERENT).format(
        **_parts(log),
        columns=sql.SQL(", ").join([sql.SQL("min(l.id) AS id"), *columns]),
        differ=sql.SQL(" OR ").join(sql.SQL(f"{first} <> {other}") for other in others),
    )
    ((count, id_),) = fetch(connection, query)
    return int(count), id_


def _parts(log: str) -> dict[str, sql.Composable]:
    return {"log": sql.Identifier("saf", log), "name": sql.Literal(log)}
