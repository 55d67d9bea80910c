"""A log from outside: all that a broker's outbox or inbox holds, read in one snapshot.

It is for comparing logs. A reader that goes on reading does so through a cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import psycopg
from psycopg import sql

from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.log.ring import SLOT_ROWS, SLOTS
from saf.log.shards import shard_expression

Row = tuple[Any, ...]
ROWS_AT_A_TIME = 10_000
NUMBERS = count()
"""How many logs of one side may be read at the same time."""

# In a REPEATABLE READ transaction a lock alone takes no snapshot
KEEP_UNPURGED = "LOCK TABLE saf.{log} IN ACCESS SHARE MODE"

NEVER_PURGED = f"""
SELECT last_value < {SLOTS * SLOT_ROWS} AND NOT EXISTS (
    SELECT FROM generate_series(0, {SLOTS - 1}) AS number,
                LATERAL (SELECT ('saf.{{log}}_' || number)::regclass AS slot) AS named
    WHERE pg_relation_filenode(slot) <> slot::oid
       OR number < last_value / {SLOT_ROWS} AND pg_relation_size(slot) = 0)
FROM saf.{{log}}_id_seq
"""

IN_RANGE = """
created_at >= coalesce(%(since)s::timestamptz, '-infinity')
AND created_at < coalesce(%(until)s::timestamptz, 'infinity')
"""

# Messages of no topic are compared by their figures alone
PLAIN = "to_service <> ALL (%(topics)s::text[])"

# uuid_send, because bytes sort like uuids, and need no object for each
SORTED = """
SELECT uuid_send(message_id), %(where)s::text, shard, id, to_service, to_broker, key, created_at,
       {state}
FROM ({rows}) AS rows
WHERE (shard = ANY ({shards}::smallint[]) OR to_service = ANY (%(topics)s::text[])) AND {in_range}
ORDER BY message_id
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One log, read in one snapshot of its own."""

    name: str
    what: str
    log: str
    connection: psycopg.Connection[Any]

    def fetch(self, query: sql.Composed | str, params: Mapping[str, Any]) -> list[Row]:
        """All rows at once.

        Raises:
            Unavailable: the database does not answer.
        """
        with unavailable_if_lost(self.what):
            return fetch(self.connection, as_sql(query), params)

    def stream(self, query: sql.Composed | str, params: Mapping[str, Any]) -> Iterator[Row]:
        """Rows as they come, in bounded memory; raises as `fetch` does."""
        with (
            unavailable_if_lost(self.what),
            self.connection.cursor(name=f"saf_reconcile_{next(NUMBERS)}") as cursor,
        ):
            cursor.itersize = ROWS_AT_A_TIME
            yield from cursor.execute(as_sql(query), {**params, "where": self.name}, binary=True)

    def may_be_purged(self) -> bool:
        """Whether the log has ever been purged, as far as can be seen."""
        query = sql.SQL(NEVER_PURGED).format(log=sql.SQL(self.log))
        return (True,) not in self.fetch(query, {})


@contextmanager
def open_side(name: str, what: str, dsn: Dsn, log: str) -> Iterator[Side]:
    """Connect; keep the log from being purged, and take no snapshot yet."""
    with dsn.connect(role="reconcile") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with unavailable_if_lost(what):
            check_schema(connection)
            connection.rollback()
            connection.execute(sql.SQL(KEEP_UNPURGED).format(log=sql.Identifier(log)))
        yield Side(name=name, what=what, log=log, connection=connection)


def in_order(rows: sql.Composed | str, shards: Sequence[int], *, state: str) -> sql.Composed:
    """The query for messages of some shards, and of topics, sorted by their ids."""
    return sql.SQL(SORTED).format(
        state=sql.SQL(state),
        rows=as_sql(rows),
        shards=sql.Literal([*shards]),
        in_range=sql.SQL(IN_RANGE),
    )


def shard_of(shards: int) -> sql.SQL:
    """SQL: the shard that a row has at a source with so many shards."""
    return sql.SQL(shard_expression(shards, modulo="%%"))


def as_sql(query: sql.Composed | str) -> sql.Composed:
    """Turn a query into a part of other queries."""
    return sql.SQL(query).format() if isinstance(query, str) else query
