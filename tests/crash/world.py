"""Two stores and an application, driven step by step, for planted bugs that are to be found."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import saf
from saf import Outbox
from saf.broker.services import create_subscription
from saf.database import Dsn
from saf.errors import SafError
from saf.failpoints import arm
from tests.crash import hubs
from tests.crash.checker import check, left, receive
from tests.crash.consumers import EFFECT, NOTE
from tests.crash.drops import look
from tests.crash.hearing import listen
from tests.crash.past import Past
from tests.crash.plan import QUALITIES
from tests.crash.talks import DESK, STOCK, hear, hear_and_answer, introduce, talk
from tests.crash.writers import count_up
from tests.dying import Crash, crash
from tests.pipeline import Cycle, connect, forwarding_rules, let_time_pass
from tests.receivers import consume
from tests.stateful.repairs import Person


@dataclass
class World:
    """Two stores and an application, driven step by step."""

    app: Dsn
    mom: Dsn
    other: Dsn
    patch: pytest.MonkeyPatch
    backup: Callable[[Dsn], Dsn]
    outbox: Outbox = field(default_factory=Outbox)
    hub: Dsn | None = None
    talks: bool = False
    consumed: bool = False
    past: Past = field(default_factory=Past)

    def send(self, account: str = "orders-0", times: int = 1, *, poison: bool = False) -> None:
        with self.app.connect(role="test") as connection:
            for _ in range(times):
                count_up(connection, self.outbox, account, poison=poison)

    @contextmanager
    def late(self, account: str) -> Iterator[None]:
        """A transaction that has its ids before what is done meanwhile, and commits after."""
        with self.app.connect(role="test") as connection:
            count_up(connection, self.outbox, account)
            yield

    def cycle(self, **destinations: Dsn) -> Cycle:
        stores = {"mom": self.mom, "other": self.other, **destinations}
        rules = forwarding_rules("exactly_once", 100, **stores)
        return Cycle(self.app, rules)

    def forward(self, times: int = 1, **destinations: Dsn) -> None:
        for _ in range(times):
            with self.cycle(**destinations) as cycle:
                cycle.run()
            let_time_pass(self.app)

    def crash(self, point: str) -> None:
        with suppress(Crash):
            arm(point, crash)
            self.forward()

    def take_over(self) -> None:
        """Another forwarder, as if the lease of the one at work were over."""
        with connect(self.app) as connection:
            connection.execute("DELETE FROM saf.member")
        self.forward(2)

    def findings(self) -> set[str]:
        stores = [self.mom.conninfo, self.other.conninfo]
        verdict = check(self.app.conninfo, stores, QUALITIES, past=self.past)
        if self.consumed:
            receive([self.mom.conninfo], {"orders"}, verdict)
        if self.talks:
            listen(self.app.conninfo, self.mom.conninfo, verdict, self.past)
        others = [*stores, *([self.hub.conninfo] if self.hub else [])]
        look(self.app.conninfo, others, verdict, talks=self.talks, past=self.past)
        return set(verdict.findings) | ({"left"} if left(self.app.conninfo) else set())

    def talk(self) -> None:
        """Say something to the MOM store, in a dialog, by the hub if there is one."""
        if not self.talks:
            introduce(self.app, self.mom)
            if self.hub:
                hubs.join(self.app, self.hub, "hub0")
            self.talks = True
        with self.app.connect(role="test") as connection:
            talk(connection, random.Random(1), by_hub=self.hub is not None)

    def hear(self) -> None:
        """All that has been said to the MOM store; and at the application, its answers."""
        consume(self.mom, 1, STOCK, hear_and_answer)
        self.carry(self.mom)
        consume(self.app, 1, DESK, hear)

    def carry(self, source: Dsn) -> None:
        """What is pending at one broker goes to the others."""
        places = {"app": self.app, "mom": self.mom, **({"hub0": self.hub} if self.hub else {})}
        there = {name: dsn for name, dsn in places.items() if dsn != source}
        with Cycle(source, forwarding_rules("exactly_once", 100, **there)) as cycle:
            cycle.default = None
            cycle.run()

    def go_back(self, copy: Dsn) -> None:
        """The application's database is what the copy is; nobody is told."""
        self.past.source_goes_back(self.app.conninfo, copy.conninfo)
        self.app = self.backup(copy)

    def store_goes_back(self, copy: Dsn) -> None:
        """The MOM store is what the copy is; nobody is told."""
        self.past.store_goes_back(self.mom.conninfo, copy.conninfo)
        self.mom = self.backup(copy)

    def repair(self) -> None:
        """What a person does who is told to."""
        with tempfile.TemporaryDirectory() as folder:
            Person(Path(folder)).repair(self.app, {"mom": self.mom, "other": self.other})

    def consume(self, deliveries: int) -> None:
        """Take some messages at the MOM store, one at a time."""
        if not self.consumed:
            with connect(self.mom) as connection:
                connection.execute(EFFECT)
                create_subscription(connection, "orders", service=None)
            self.consumed = True
        for _ in range(deliveries):
            with suppress(SafError), saf.receive(self.mom, "orders", max_messages=1) as delivery:
                for message in delivery:
                    delivery.connection.execute(NOTE, [message.text()])
