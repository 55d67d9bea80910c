"""The demo's two applications: a shop that orders, and a warehouse that delivers.

Each has its own database, with its service in it. Between them is a MOM store with the service
trade, a router that forwards. It alone knows which warehouse has what, and it passes on all
messages.

`begin` sends the shop's first messages. Handlers send all others, in the transactions in which they
receive. Read them as a script of four talks: an order that is delivered in parts, one that is
refused, one that is not answered in time, and a drawing of 20 MB that the warehouse acknowledges.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg

import saf
from saf.broker.services import create_service
from saf.database import Dsn
from saf.dialogs.statements import END, ERROR, TIMER, Code
from saf.routing.routers import add_router

SHOP, TRADE, WAREHOUSE, CONTRACT = "shop", "trade", "warehouse", "ordering"
NAME = "talk"
"""Header that names the talk, because the dialog with the warehouse is a separate one."""
DRAWING_BYTES = 20_000_000
IN_STOCK, ON_THE_LORRY = 100, 4
NEXT_LORRY_SECONDS, PATIENCE_SECONDS = 1.0, 10.0
REFUSED = 17

TYPES: Mapping[str, Any] = {
    "order": "initiator",
    "drawing": "initiator",
    "delivery": "target",
    "receipt": "target",
}

Say = Callable[[str, str, str], None]
"""Shows a line of the script: the speaker, the talk, and the text sent or received."""


@dataclass(kw_only=True)
class Talk:
    """One of the dialogs, and how it should end."""

    name: str
    code: int | None = None
    """Code of the error that ends the talk at both ends; None if it ends normally."""
    expected: Any = None
    """The complete answer that the shop should get."""
    told: Any = None
    conversations: dict[str, UUID] = field(default_factory=dict)
    """Ids of the two conversations, the shop's and the warehouse's, by the name of the end."""


@dataclass(kw_only=True)
class Trade:
    """The talks of a run, and the two workers that continue them."""

    say: Say
    talks: dict[str, Talk] = field(default_factory=dict)
    """The talks by name."""

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        """Begin all talks of the shop, in one transaction."""
        chairs = self._begin(connection, Talk(name="chairs", expected=10))
        self._order(connection, chairs, {"article": "chairs", "amount": 10})
        pianos = self._begin(connection, Talk(name="pianos", code=REFUSED))
        self._order(connection, pianos, {"article": "pianos", "amount": 500})
        mermaid = self._begin(
            connection, Talk(name="mermaid", code=Code.EXPIRED), lifetime=PATIENCE_SECONDS
        )
        self._order(connection, mermaid, {"article": "mermaid", "amount": 1})
        drawing = random.Random(7).randbytes(DRAWING_BYTES)  # noqa: S311 - any bytes will do
        digest = hashlib.sha256(drawing).hexdigest()
        cupboard = self._begin(connection, Talk(name="cupboard", expected=digest))
        cupboard.send(
            connection,
            io.BytesIO(drawing),
            message_type="drawing",
            headers={NAME: "cupboard"},
        )
        self.say(SHOP, "cupboard", f"can you build this? A drawing of {len(drawing):,} bytes")

    def warehouse(self, dsn: Dsn) -> saf.Worker:
        """Return the worker of the warehouse, with its handlers."""
        worker = saf.Worker(dsn, WAREHOUSE)

        @worker.handler("order")
        def order(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            dialog, wanted = _of(message), message.json()
            self._hear(WAREHOUSE, message, f"{wanted['amount']} {wanted['article']}")
            if wanted["amount"] > IN_STOCK:
                dialog.end_with_error(connection, REFUSED, "we do not have so many")
                self._tell(WAREHOUSE, message, "no: we do not have so many (an error)")
            elif wanted["amount"] > 1:
                saf.set_group_state(connection, dialog, {"left": wanted["amount"]})
                self._deliver(message, connection)
            else:
                self._tell(WAREHOUSE, message, "(asks a sailor, who does not come back)")

        @worker.handler(TIMER)
        def next_lorry(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            self._deliver(message, connection)

        @worker.handler("drawing")
        def drawing(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            self._hear(WAREHOUSE, message, f"a drawing of {message.size:,} bytes")
            digest = hashlib.file_digest(message.open(), "sha256").hexdigest()
            dialog = _of(message)
            dialog.send(connection, {"sha256": digest}, message_type="receipt")
            dialog.end(connection)
            self._tell(WAREHOUSE, message, "we can; here is its digest, and good bye")

        self._until_the_end(worker, WAREHOUSE)
        return worker

    def shop(self, dsn: Dsn) -> saf.Worker:
        """Return the worker of the shop, with its handlers."""
        worker = saf.Worker(dsn, SHOP)

        @worker.handler("delivery")
        def delivery(message: saf.Received, _: psycopg.Connection[Any]) -> None:
            talk, amount = self._talk(message), message.json()["amount"]
            talk.told = (talk.told or 0) + amount
            self._hear(SHOP, message, f"{amount} are here; {talk.told} by now")

        @worker.handler("receipt")
        def receipt(message: saf.Received, _: psycopg.Connection[Any]) -> None:
            talk = self._talk(message)
            talk.told = message.json()["sha256"]
            comparison = "the same" if talk.told == talk.expected else "another"
            self._hear(SHOP, message, f"a digest: {comparison} as ours")

        self._until_the_end(worker, SHOP)
        return worker

    def _until_the_end(self, worker: saf.Worker, service: str) -> None:
        @worker.handler(END)
        def end(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            self._hear(service, message, "good bye")
            _of(message).end(connection)
            self._tell(service, message, "good bye")

        @worker.handler(ERROR)
        def error(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
            content = message.json()
            self._hear(service, message, f"error {content['code']}: {content['text']}")
            _of(message).end(connection)

    def _deliver(self, message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        """Deliver as many pieces as fit on a lorry; the next lorry brings the rest."""
        dialog = _of(message)
        left = saf.group_state(connection, dialog)["left"]
        amount = min(left, ON_THE_LORRY)
        dialog.send(connection, {"amount": amount}, message_type="delivery")
        if left > amount:
            saf.set_group_state(connection, dialog, {"left": left - amount})
            dialog.start_timer(connection, NEXT_LORRY_SECONDS)
            self._tell(WAREHOUSE, message, f"here are {amount}, the next lorry brings more")
        else:
            dialog.end(connection)
            self._tell(WAREHOUSE, message, f"here are the last {amount}, and good bye")

    def _begin(
        self, connection: psycopg.Connection[Any], talk: Talk, lifetime: float | None = None
    ) -> saf.Dialog:
        dialog = saf.begin_dialog(
            connection,
            from_service=SHOP,
            to_service=TRADE,
            contract=CONTRACT,
            lifetime=lifetime,
        )
        talk.conversations[SHOP] = dialog.conversation_id
        self.talks[talk.name] = talk
        return dialog

    def _order(
        self, connection: psycopg.Connection[Any], dialog: saf.Dialog, wanted: dict[str, Any]
    ) -> None:
        name = wanted["article"]
        dialog.send(connection, wanted, message_type="order", headers={NAME: name})
        self.say(SHOP, name, f"please send {wanted['amount']} {name}")

    def _talk(self, message: saf.Received) -> Talk:
        """Return the talk of a message; a new one if an earlier, killed run has begun it."""
        conversation_id, name = message.conversation_id, message.headers.get(NAME)
        assert conversation_id is not None  # noqa: S101 - it belongs to a dialog
        if name in self.talks:  # sent by the shop, so received at the warehouse
            self.talks[name].conversations.setdefault(WAREHOUSE, conversation_id)
        known = (t for t in self.talks.values() if conversation_id in t.conversations.values())
        return next(known, Talk(name="earlier"))

    def _hear(self, service: str, message: saf.Received, text: str) -> None:
        self.say(service, self._talk(message).name, f"  ← {text}")

    def _tell(self, service: str, message: saf.Received, text: str) -> None:
        self.say(service, self._talk(message).name, text)


def prepare(dsn: Dsn, service: str) -> None:
    """Prepare a database for a service that uses the contract."""
    with dsn.connect(role="demo", autocommit=True) as connection:
        create_service(connection, service)
        for name in TYPES:
            saf.create_message_type(
                connection, name, validation="none" if name == "drawing" else "json"
            )
        saf.create_contract(connection, CONTRACT, TYPES)
        if service == TRADE:
            add_router(connection, TRADE, "python", f"{__name__}:who_has_it", mode="forward")


def who_has_it(message: saf.Received) -> str | None:
    """Classify the first message of a talk: return the service that it is for."""
    return WAREHOUSE if message.message_type in ("order", "drawing") else None


def _of(message: saf.Received) -> saf.Dialog:
    assert message.dialog is not None  # noqa: S101 - the service gets only messages of dialogs
    return message.dialog
