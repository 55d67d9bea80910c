"""Notice and refuse a broker that a dump has brought into another cluster.

Its logs name transactions of the cluster that they were written in; `saf.repair.rebase` mends it.
"""

from __future__ import annotations

from typing import Any

import psycopg

from saf.broker import whole
from saf.database import fetch
from saf.errors import Restored

# The cursors' snapshots are ahead of the cluster where its transaction ids went back but the
# cursors did not, as after pg_resetwal or into a database of the same cluster.
IS_RESTORED = """
SELECT system_identifier <> (SELECT system_identifier FROM pg_control_system())
    OR EXISTS (
        SELECT FROM saf.cursor
        WHERE pg_snapshot_xmax(coalesce(open, done)) > pg_snapshot_xmax(pg_current_snapshot()))
FROM saf.broker
"""


def is_restored(connection: psycopg.Connection[Any]) -> bool:
    """Whether the logs' transaction ids are another cluster's."""
    return (True,) in fetch(connection, IS_RESTORED)


def refuse(connection: psycopg.Connection[Any]) -> None:
    """Raise if the logs' transaction ids are not this cluster's, or if the broker is not whole.

    Raises:
        Restored, RowsGone, ConfigurationError
    """
    whole.refuse(connection)
    if is_restored(connection):
        raise Restored(connection.info.dbname)
