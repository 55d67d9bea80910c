"""Who receives from the inboxes in a soak; each is run by ``saf worker tests.soak.consumers:NAME``.

Each notes in the ledger what it hears, in the transaction that receives it. A listener of a dialog
notes what it hears there as any service does; the one at the MOM store also says it again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import saf
from saf.dialogs.statements import END
from tests.soak.application import SHOP, WAREHOUSE
from tests.soak.ledger import Said, follow, hear

APP, MOM = os.environ.get("SOAK_APP", ""), os.environ.get("SOAK_MOM", "")

billing = saf.Worker(MOM, "billing", max_messages=500)


@billing.batch_handler()
def billed(messages: Sequence[saf.Received], connection: Any) -> None:
    """Hear all messages of a delivery."""
    hear(connection, "billing", [Said.of(one.body) for one in messages])


class Total(saf.Processor):
    """Knows by itself how far its key is; the ledger has to know the same."""

    def activate(self, connection: Any) -> None:
        """Read how far the key is."""
        found = connection.execute(
            "SELECT n FROM soak.heard WHERE service = 'totals' AND key = %s", [self.key]
        ).fetchone()
        self.n = found[0] if found else 0

    @saf.handles()
    def add(self, message: saf.Received, connection: Any) -> None:
        """Hear the next one; what the instance remembers must be true."""
        said = Said.of(message.body)
        after, faults = follow({said.key: self.n}, [said])
        if faults:
            raise ValueError(f"the instance of {self.key} is at {self.n}, and {said.n} has come")
        hear(connection, "totals", [said])
        self.n = after[said.key]


totals = saf.Processors(MOM, "totals", Total, idle_seconds=20)

warehouse = saf.Worker(MOM, WAREHOUSE)


@warehouse.handler()
def answered(message: saf.Received, connection: Any) -> None:
    """Hear what the shop says, and say it again; whoever hears the last number ends the dialog."""
    assert message.dialog is not None
    hear(connection, WAREHOUSE, [Said.of(message.body)])
    message.dialog.send(connection, message.body)
    if message.message_type == "last":
        message.dialog.end(connection)


shop = saf.Worker(APP, SHOP)


@shop.handler()
def heard(message: saf.Received, connection: Any) -> None:
    """Hear an answer."""
    hear(connection, SHOP, [Said.of(message.body)])


@shop.handler(END)
def ended(message: saf.Received, connection: Any) -> None:
    """The warehouse has heard the last number."""
    assert message.dialog is not None
    message.dialog.end(connection)
