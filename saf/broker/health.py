"""Whether a broker is healthy: asked at the first contact, and refused by name.

Whoever reads or stores messages asks it all once, before the first of them, of the log that it
reads or fills:

    saf's own rows are complete, and none is hidden                 `saf.broker.whole`
    ids and transaction ids mean in this cluster what the log says  `saf.log.lineage`

That is so of a forwarder at its source (the outbox) and at a store (the inbox), of receivers,
workers, processors and dispatchers, and of tables and streams of Spark. It takes two statements.
What only looks at a broker, or purges it, asks no log: its cursors have to mean something, no more.

`saf doctor` and the repairs ask the same questions. Two more are not a single broker's to answer:
that a broker_id belongs to one broker, is for a forwarder to see (`saf.repair.new_id`), and that a
destination was not set back, for its marks (`saf.destinations.marks`).
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from saf.broker import whole
from saf.database import fetch
from saf.errors import Restored
from saf.log import lineage


def refuse(
    connection: psycopg.Connection[Any], log: str | None = None, *, reader: str = ""
) -> None:
    """Raise if a broker is not healthy.

    Args:
        connection: to the broker.
        log: the log that is to be read or filled; None: neither is.
        reader: whose cursors are needed, such as ``outbox/forwarder``.

    Raises:
        RowsGone: saf's own rows are not complete.
        ConfigurationError: row-level security applies to this login.
        Restored: ids or transaction ids do not mean what they should.
    """
    require_rows(connection, reader=reader)
    query = lineage.MOVED if log is None else lineage.asked(log)
    if why := [row[-1] for row in fetch(connection, query)]:
        raise Restored(connection.info.dbname, why=why)


def require_rows(connection: psycopg.Connection[Any], *, reader: str = "") -> None:
    """Raise if saf's own rows are not complete, or not all to be seen.

    Raises:
        RowsGone, ConfigurationError: as `refuse`.
    """
    try:
        found = fetch(connection, whole.BOTH)
    except psycopg.errors.InsufficientPrivilege:
        # saf's own sessions have row_security off, so that nothing is read where a policy applies
        if connection.info.transaction_status is not TransactionStatus.INERROR:
            whole.refuse(fetch(connection, whole.POLICIES), connection.info.dbname)
        raise
    whole.refuse(found, connection.info.dbname, reader=reader)
