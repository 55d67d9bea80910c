"""A log from outside: all rows of a broker's outbox or inbox, read in one snapshot.

It is used to compare logs. Continuous readers use a cursor.
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
"""Numbers for cursors' names, so that several logs of one side can be read at the same time."""

# A lock alone takes no snapshot in a REPEATABLE READ transaction
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

# Messages for no topic are compared by their totals alone
PLAIN = "to_service <> ALL (%(topics)s::text[])"

# uuid_send, because bytes sort like uuids, and need no object each
SORTED = """
SELECT uuid_send(message_id), %(where)s::text, shard, id, to_service, to_broker, key, created_at,
       {state}
FROM ({rows}) AS rows
WHERE (shard = ANY ({shards}::smallint[]) OR to_service = ANY (%(topics)s::text[])) AND {in_range}
ORDER BY message_id
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One log, read in its own snapshot."""

    name: str
    what: str
    log: str
    connection: psycopg.Connection[Any]

    def fetch(self, query: sql.Composed | str, params: Mapping[str, Any]) -> list[Row]:
        """Return all rows.

        Raises:
            Unavailable: the database does not answer.
        """
        with unavailable_if_lost(self.what):
            return fetch(self.connection, as_sql(query), params)

    def stream(self, query: sql.Composed | str, params: Mapping[str, Any]) -> Iterator[Row]:
        """Yield rows as they arrive, in bounded memory; raises as `fetch` does."""
        with (
            unavailable_if_lost(self.what),
            self.connection.cursor(name=f"saf_reconcile_{next(NUMBERS)}") as cursor,
        ):
            cursor.itersize = ROWS_AT_A_TIME
            yield from cursor.execute(as_sql(query), {**params, "where": self.name}, binary=True)

    def may_be_purged(self) -> bool:
        """Whether the log was ever purged, as far as can be seen."""
        query = sql.SQL(NEVER_PURGED).format(log=sql.SQL(self.log))
        return (True,) not in self.fetch(query, {})


@contextmanager
def open_side(name: str, what: str, dsn: Dsn, log: str) -> Iterator[Side]:
    """Connect, and keep the log from being purged. Takes no snapshot yet."""
    with dsn.connect(role="reconcile") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with unavailable_if_lost(what):
            check_schema(connection)
            connection.rollback()
            connection.execute(sql.SQL(KEEP_UNPURGED).format(log=sql.Identifier(log)))
        yield Side(name=name, what=what, log=log, connection=connection)


def in_order(rows: sql.Composed | str, shards: Sequence[int], *, state: str) -> sql.Composed:
    """Return the query for messages of some shards, and of topics, sorted by message_id."""
    return sql.SQL(SORTED).format(
        state=sql.SQL(state),
        rows=as_sql(rows),
        shards=sql.Literal([*shards]),
        in_range=sql.SQL(IN_RANGE),
    )


def shard_of(shards: int) -> sql.SQL:
    """Return SQL for the shard that a row has at a source with ``shards`` shards."""
    return sql.SQL(shard_expression(shards, modulo="%%"))


def as_sql(query: sql.Composed | str) -> sql.Composed:
    """Turn a query into a part of other queries."""
    return sql.SQL(query).format() if isinstance(query, str) else query
