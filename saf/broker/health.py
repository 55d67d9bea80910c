"""Health of a broker: checked at first contact; an unhealthy broker is refused by name.

A process that reads or stores messages checks the log that it reads or fills once, before its
first message:

    saf's own rows are complete and visible           `saf.broker.whole`
    ids and transaction ids belong to this cluster    `saf.log.lineage`

Forwarders check the outbox of their sources and the inbox of their stores; receivers, workers,
processors, dispatchers and Spark's tables and streams check the log that they read. The check
takes two statements. Commands that only show or purge a broker check its cursors, but no log.

`saf doctor` and the repairs run the same checks. Two more need more than one broker: a forwarder
sees whether two brokers share a broker_id (`saf.operating.repair.new_id`), and the marks of a
destination show whether the destination was set back (`saf.destinations.marks`).
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
        log: the log to read or fill; None: no log.
        reader: the subscription that needs its cursors, such as ``outbox/forwarder``.

    Raises:
        RowsGone: some of saf's own rows are missing.
        ConfigurationError: row-level security applies to this login.
        Restored: ids or transaction ids come from another cluster or time.
    """
    require_rows(connection, reader=reader)
    query = lineage.MOVED if log is None else lineage.asked(log)
    if why := [row[-1] for row in fetch(connection, query)]:
        raise Restored(connection.info.dbname, why=why)


def require_rows(connection: psycopg.Connection[Any], *, reader: str = "") -> None:
    """Raise if saf's own rows are not complete or not all visible.

    Raises:
        RowsGone, ConfigurationError: as `refuse`.
    """
    try:
        found = fetch(connection, whole.BOTH)
    except psycopg.errors.InsufficientPrivilege:
        # saf's own sessions have row_security off, so PostgreSQL refuses a read under a policy
        if connection.info.transaction_status is not TransactionStatus.INERROR:
            whole.refuse(fetch(connection, whole.POLICIES), connection.info.dbname)
        raise
    whole.refuse(found, connection.info.dbname, reader=reader)
