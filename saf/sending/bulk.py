"""Many messages by COPY, which takes half the time of an INSERT of arrays.

It needs a connection of psycopg below the caller's, and no row-level security that is in force for
the caller's role: with that, PostgreSQL copies nothing. So a database in which `saf sender` has
rules is asked for an INSERT instead, and so are other drivers, asyncio, and few messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import PipelineStatus

from saf.columns import SENT
from saf.database import backslashes

if TYPE_CHECKING:
    from saf.message import Row
    from saf.transaction import Transaction

MANY = 100
"""So many messages are sent by COPY, and fewer by INSERT."""

FORBIDDEN = "SELECT row_security_active('saf.outbox')"
COPY = f"COPY saf.outbox ({', '.join(SENT)}) FROM STDIN"


def copied(transaction: Transaction, rows: Sequence[Row]) -> bool:
    """Store rows by COPY in the caller's transaction, in their order; return whether it could."""
    connection = transaction.below
    if connection is None or len(rows) < MANY:
        return False
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        return False  # a pipeline has no place for a COPY
    # by way of the caller's library, which then knows that its transaction has begun
    ((forbidden,),) = transaction.fetch(FORBIDDEN)
    if forbidden:
        return False
    # a cursor of our own, because the caller's may be in use
    with psycopg.Cursor(connection) as cursor, cursor.copy(COPY) as copy:
        for row in backslashes.in_rows(connection, rows):
            copy.write_row(row)
    return True
