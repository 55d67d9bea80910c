"""Many messages by COPY, which takes half the time of an INSERT of arrays.

COPY needs a psycopg connection beneath the caller's, and a role without active row-level security:
with row-level security, PostgreSQL rejects COPY FROM. So a database in which `saf sender` has rules
gets an INSERT instead. So do other drivers, asyncio, and few messages. Many large messages take
several INSERTs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import PipelineStatus

from saf.columns import SENT
from saf.database import queries
from saf.errors import InvalidMessage

if TYPE_CHECKING:
    from saf.message import Row
    from saf.transaction import Known, Transaction

MANY = 100
"""Minimum number of messages for a COPY; fewer are sent by INSERT."""

LARGEST_STATEMENT = 256 * 1024 * 1024
"""Most bytes of bodies and headers in one INSERT, unless a single message has more. A server takes
less than 1 GB, and a body written out as text takes twice its size."""

FORBIDDEN = "SELECT row_security_active('saf.outbox')"
COPY = f"COPY saf.outbox ({', '.join(SENT)}) FROM STDIN"


def copied(transaction: Transaction, rows: Sequence[Row]) -> bool:
    """Store rows in order by COPY in the caller's transaction; False if COPY is not possible."""
    connection = transaction.below
    if connection is None or len(rows) < MANY:
        return False
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return False  # COPY is impossible in pipeline mode
    # through the caller's library, which then knows that its transaction has begun
    ((forbidden,),) = transaction.fetch(FORBIDDEN)
    if forbidden:
        return False
    # a separate cursor, because the caller's may be in use
    with psycopg.Cursor(connection) as cursor, cursor.copy(COPY) as copy:
        for row in queries.in_rows(connection, rows):
            copy.write_row(row)
    return True


def in_statements(rows: Iterable[Row]) -> list[list[Row]]:
    """Divide rows, in order, among as few INSERTs as a server accepts."""
    statements: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        size += len(row.body) + len(row.headers)
        if size > LARGEST_STATEMENT and statements[-1]:
            statements.append([])
            size = len(row.body) + len(row.headers)
        statements[-1].append(row)
    return statements


def refuse_in_parts(transaction: Known, statements: Sequence[object]) -> None:
    """Reject several statements where each would be a transaction of its own.

    Raises:
        InvalidMessage: explains the alternatives; nothing is written.
    """
    if len(statements) > 1 and transaction.commits_by_itself():
        raise InvalidMessage(
            "messages",
            f"more than {LARGEST_STATEMENT:,} bytes need several statements, and this connection "
            "commits each separately: open a transaction, or send fewer messages",
        )
