"""The incarnation of a broker: the number of its current life, after set-backs and repairs.

Every repair raises the incarnation. From then on the open ends of the broker's dialogs belong to
the new incarnation, and state it in the messages that they send. An end elsewhere that remembers an
older incarnation compares what both ends know.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import psycopg

from saf.dialogs.comparing import announce
from saf.dialogs.monologs import ReceivedMonolog

# A mere counter would repeat its numbers after another set-back to the same backup
RAISE = """
UPDATE saf.broker SET incarnation = greatest(
    incarnation + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint))
"""


def raise_incarnation(
    connection: psycopg.Connection[Any],
    since: datetime | None = None,
    known: Iterable[ReceivedMonolog] = (),
) -> None:
    """Note that this broker was set back, and is repaired now.

    Call it in the transaction of the repair, which keeps all others from sending in a dialog.

    Args:
        connection: to the broker.
        since: when the newest batch was opened that a destination knows and this broker does not;
            None if all batches are known here.
        known: how far destinations have received its monologs.
    """
    connection.execute(RAISE)
    announce(connection, since, known)
