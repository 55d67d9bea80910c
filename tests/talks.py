"""Two services of one database that talk without a forwarder, and messages in the same shards."""

from __future__ import annotations

from itertools import count
from typing import Any

import saf
from saf import Outbox
from saf.broker.services import create_service
from saf.database import Dsn
from saf.log.shards import shard_of
from saf.routing.routes import add_route
from tests import dialogs
from tests.dialogs import SHOP, WAREHOUSE, receive
from tests.pipeline import connect


def house_of(dsn: Dsn) -> Dsn:
    """Give a database two services that talk without a forwarder."""
    with connect(dsn) as connection:
        for service in (SHOP, WAREHOUSE):
            create_service(connection, service)
            add_route(connection, "here", service=service, local=True)
    return dsn


def answers(dsn: Dsn, dialog: saf.Dialog, *bodies: str) -> None:
    """Let the other end of a dialog send something."""
    with dsn.connect(role="test") as connection:
        find = "SELECT handle FROM saf.conversation WHERE conversation_id = %s AND NOT is_initiator"
        ((handle,),) = connection.execute(find, [dialog.conversation_id]).fetchall()
        other = saf.open_dialog(connection, handle)
        for body in bodies:
            other.send(connection, body)


def answered(dsn: Dsn, *bodies: str, **options: Any) -> saf.Dialog:
    """A dialog of the shop that has been answered."""
    dialog = dialogs.begin(dsn, "question", **options)
    receive(dsn, WAREHOUSE)
    answers(dsn, dialog, *bodies)
    return dialog


def before(dsn: Dsn, dialog: saf.Dialog, *bodies: str) -> None:
    """Send plain messages to the shop, into the shard of a dialog."""
    shard = shard_of(str(dialog.conversation_id), 64)
    key = next(str(n) for n in count() if shard_of(str(n), 64) == shard)
    with connect(dsn) as connection, connection.transaction():
        for body in bodies:
            Outbox().send(connection, SHOP, body, key=key)


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last)]
