"""Forwarding, whatever happens to who sends, who forwards, and in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar, Self

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stateful.forwarder import PAUSES, POINTS, UNHEARD, Died, Forwarder, at, die
from tests.stateful.site import Site
from tests.stateful.world import POLITE, SERVICES, STORES, World

MOST_OPEN, MOST_FORWARDERS = 3, 2
WHICH = st.integers(0, 3)
SERVICE = st.sampled_from(tuple(SERVICES))
STORE = st.sampled_from(STORES)


class Forwarding(RuleBasedStateMachine):
    """An application that sends, and forwarders that die, pause and take each other over."""

    needs: ClassVar[str] = "two MOM stores"

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their databases are made once."""
        app = site.create("app")
        stores = {name: site.create(name) for name in STORES}
        for store in stores.values():
            store.person.execute(POLITE)
        return lambda: cls(World(app, stores))

    # The application

    @rule(
        service=SERVICE,
        many=st.integers(1, 5),
        poison=st.sampled_from((False, False, True)),
        mortal=st.sampled_from((False, False, False, True)),
        undone=st.booleans(),
    )
    def send(self, service: str, many: int, poison: bool, mortal: bool, undone: bool) -> None:
        """A transaction, perhaps with savepoints that it goes back to."""
        transaction = self.world.begin()
        for number in range(many):
            key = f"{service}-{number % 2}"
            if not self.world.free(key, transaction):
                continue
            if undone:
                self.world.undone_at_once(transaction, service, key)
            last = number == many - 1
            self.world.send(transaction, service, key, poison=poison and last, mortal=mortal)
        self.world.end(transaction, commit=True)

    @precondition(lambda self: len(self.world.open) < MOST_OPEN)
    @rule(services=st.lists(SERVICE, min_size=1, max_size=3, unique=True), prepared=st.booleans())
    def begin(self, services: list[str], prepared: bool) -> None:
        """A transaction that has its ids now, and ends after others."""
        transaction = self.world.begin()
        for service in services:
            if self.world.free(f"{service}-0", transaction):
                self.world.send(transaction, service, f"{service}-0")
        if prepared and transaction.sent:
            self.world.prepare(transaction)

    @precondition(lambda self: self.world.open)
    @rule(which=WHICH, commit=st.sampled_from((True, True, False)))
    def decide(self, which: int, commit: bool) -> None:
        """Such a transaction ends."""
        self.world.end(self.world.open[which % len(self.world.open)], commit=commit)

    # Forwarders

    @rule()
    def forward(self) -> None:
        """A run of a process of its own."""
        self.world.forward()

    @precondition(lambda self: len(self.world.forwarders) < MOST_FORWARDERS)
    @rule(tasks=st.integers(1, 3))
    def start(self, tasks: int) -> None:
        """A process that takes in hand what is pending."""
        self.world.forwarder().open(tasks, frozenset(self.world.down))

    def one(self, which: int) -> Forwarder:
        """Some process."""
        return self.world.forwarders[which % len(self.world.forwarders)]

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH, tasks=st.integers(1, 3))
    def open(self, which: int, tasks: int) -> None:
        """It takes in hand what is pending, unless it has something."""
        self.one(which).open(tasks, frozenset(self.world.down))

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH, task=WHICH)
    def deliver(self, which: int, task: int) -> None:
        """One task of it runs."""
        self.one(which).deliver(task)

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        """It ends its cycle, whether all tasks ran or not."""
        self.one(which).close()

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        """It ends as it should."""
        forwarder = self.one(which)
        forwarder.leave()
        self.world.forwarders.remove(forwarder)

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH, point=st.sampled_from(POINTS), times=st.integers(1, 3))
    def crash(self, which: int, point: str, times: int) -> None:
        """It dies at some point; at the latest, when it has delivered everything."""
        forwarder = self.one(which)
        try:
            with at(point, times, die):
                forwarder.run(frozenset(self.world.down))
        except Died:
            pass
        if point != UNHEARD:
            self.world.dies(forwarder)

    @precondition(lambda self: self.world.forwarders)
    @rule(
        which=WHICH,
        point=st.sampled_from(PAUSES),
        times=st.integers(1, 3),
        all_of_it=st.booleans(),
    )
    def pause(self, which: int, point: str, times: int, all_of_it: bool) -> None:
        """It pauses at some point beyond its lease, another takes over, and it goes on."""
        forwarder = self.one(which)

        def take_over() -> None:
            forwarder.outlive_its_lease()
            other = Forwarder(self.world.app.dsn, self.world.dsns)
            other.open(2, frozenset(self.world.down))
            other.deliver_all() if all_of_it else other.deliver()
            if all_of_it:
                other.close()
            other.leave()

        self.world.unsure()
        with at(point, times, take_over):
            forwarder.run(frozenset(self.world.down))

    @precondition(lambda self: self.world.forwarders)
    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        """It is stopped beyond its lease; others take over as they come by, unknown to it."""
        self.one(which).outlive_its_lease()
        self.world.unsure()

    @rule()
    def purge(self) -> None:
        """Ids leave their slot, and what everybody has completed goes."""
        self.world.purge()

    # What must be

    @invariant()
    def nothing_is_wrong(self) -> None:
        """As far as one can say in the middle of it."""
        wrong = self.world.truth.wrong_now(self.world.seen())
        assert not wrong, "; ".join(wrong)

    def teardown(self) -> None:
        """All is up again: each message has an end that it may have."""
        try:
            if sys.exc_info()[0] is None:
                seen = self.world.come_to_rest()
                wrong = self.world.truth.wrong_in_the_end(seen)
                assert not wrong, "in the end: " + "; ".join(wrong)
        finally:
            self.world.clear_up()
