"""``saf demo --dialog``: a shop orders, and a warehouse delivers, through a MOM store.

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from rich.text import Text

import saf
from saf.broker.services import create_service
from saf.cli.console import Listing
from saf.config import Broker, Route, Settings
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.dialogs.conversations import Conversation, conversations
from saf.dialogs.statements import END, ERROR, TIMER, Code
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess
from saf.operating.wording import shown
from saf.routing.routers import add_router
from saf.routing_service import RoutingService
from saf_demo.stage import Outcome, Stage

SHOP, TRADE, WAREHOUSE, CONTRACT = "shop", "trade", "warehouse", "ordering"
NAME = "talk"
"""Header that names the talk, because the dialog with the warehouse is a separate one."""
DRAWING_BYTES = 20_000_000
STYLES = {SHOP: "cyan", WAREHOUSE: "magenta"}
DEADLINE_SECONDS, PAUSE_SECONDS = 90.0, 0.2
IN_STOCK, ON_THE_LORRY = 100, 4
NEXT_LORRY_SECONDS, PATIENCE_SECONDS = 1.0, 10.0
REFUSED = 17

TYPES: Mapping[str, Any] = {
    "order": "initiator",
    "drawing": "initiator",
    "delivery": "target",
    "receipt": "target",
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The outcome of a talk, at both ends."""

    name: str
    shop: str | None
    """The state of the shop's end; None if it does not exist."""
    warehouse: str | None
    error: int | None
    right: bool


def converse(stage: Stage) -> Outcome:
    """Run the talks between shop and warehouse."""
    started = time.monotonic()

    def say(speaker: str, talk: str, text: str) -> None:
        at = f"{time.monotonic() - started:5.1f} s"
        line = Text.assemble(at, f"  {talk:10}", (f"{speaker:11}", STYLES[speaker]), shown(text))
        stage.console.print(line, soft_wrap=True)

    dsns = stage.databases(SHOP, TRADE, WAREHOUSE)
    for name, dsn in dsns.items():
        prepare(dsn, name)
    settings = Settings.model_construct(
        brokers={name: Broker(dsn=dsn) for name, dsn in dsns.items()},
        destinations={name: Postgresql(dsn=dsn) for name, dsn in dsns.items()},
        routes=tuple(Route(service=name, destination=name) for name in dsns),
    )
    trade, forwarded = Trade(say=say), 0
    with dsns[SHOP].connect(role="demo") as connection:
        trade.begin(connection)
    between = RoutingService(dsns[TRADE], TRADE, declared=settings.declared)
    workers = (between, trade.warehouse(dsns[WAREHOUSE]), trade.shop(dsns[SHOP]))
    ends = _ends(dsns, trade)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(end.right for end in ends) and time.monotonic() < deadline:
        forwarded += Forwarder(settings, InProcess()).drain().forwarded
        for worker in workers:
            worker.drain()
        ends = _ends(dsns, trade)
        time.sleep(PAUSE_SECONDS)
    right = all(end.right for end in ends)
    return Outcome(
        right=right,
        title="every talk ended as it should",
        result={
            "right": right,
            "talks": [asdict(end) for end in ends],
            "forwarded": forwarded,
            "seconds": round(time.monotonic() - started, 1),
        },
        listing=_listing(ends),
    )


def _listing(ends: Sequence[Ended]) -> Listing:
    """Return a row for each talk: its state at both ends, and whether that is right."""
    rows = Listing("talk", "shop's end", "warehouse's end", "error", "this is")
    for end in ends:
        error = "" if end.error is None else str(end.error)
        verdict = "right" if end.right else "wrong"
        rows.add(end.name, end.shop or "", end.warehouse or "", error, verdict)
    return rows


def _ends(dsns: dict[str, Dsn], trade: Trade) -> list[Ended]:
    """Return the state of the talks, from the databases."""
    known: dict[UUID, Conversation] = {}
    for name in (SHOP, WAREHOUSE):
        with dsns[name].connect(role="demo", autocommit=True) as connection:
            known |= {item.conversation_id: item for item in conversations(connection)}
    ends = []
    for talk in trade.talks.values():
        ids = (talk.conversations.get(name) for name in (SHOP, WAREHOUSE))
        pair = [known.get(item) if item else None for item in ids]
        shop, warehouse = (str(item.state) if item else None for item in pair)
        codes = {item.error_code for item in pair if item}
        # a message that comes too late may never arrive
        closed = ("closed", None) if talk.code == Code.EXPIRED else ("closed",)
        ends.append(
            Ended(
                name=talk.name,
                shop=shop,
                warehouse=warehouse,
                error=next(filter(None, codes), None),
                right=warehouse in closed
                and (shop, codes, talk.told) == ("closed", {talk.code}, talk.expected),
            )
        )
    return ends


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

    say: Callable[[str, str, str], None]
    """Shows a line of the script: the speaker, the talk, and the text sent or received."""
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
        drawing = random.Random(7).randbytes(DRAWING_BYTES)
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
                dialog.end_with_error(connection, REFUSED, "we do not have that many")
                self._tell(WAREHOUSE, message, "no: we do not have that many (an error)")
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
            self._tell(WAREHOUSE, message, "we can; here is its digest, and goodbye")

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
            self._hear(service, message, "goodbye")
            _of(message).end(connection)
            self._tell(service, message, "goodbye")

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
            self._tell(WAREHOUSE, message, f"here are the last {amount}, and goodbye")

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
        assert conversation_id is not None  # it belongs to a dialog
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
    assert message.dialog is not None  # the service gets only messages of dialogs
    return message.dialog
