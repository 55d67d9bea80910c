"""Forwarding, whatever happens to who sends, who forwards, and in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.stateful.forwarder import PAUSES, POINTS, UNHEARD, Died, Forwarder, at, die
from tests.stateful.model import Seen
from tests.stateful.site import Site
from tests.stateful.world import POLITE, SERVICES, STORES, World

MOST_OPEN, MOST_FORWARDERS = 3, 2
WHICH = st.integers(0, 3)
SERVICE = st.sampled_from(tuple(SERVICES))
STORE = st.sampled_from(STORES)
KIND = st.sampled_from(("", "", "", "poison", "mortal"))
TRAFFIC = st.lists(st.tuples(SERVICE, st.integers(0, 1), KIND), max_size=5)
"""What is sent before something happens, so that it happens to something: Hypothesis leaves whole
rules out of an example, and one without any message shows little."""


class Forwarding(RuleBasedStateMachine):
    """An application that sends, and forwarders that die, pause and take each other over."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.seen = world.seen()

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their databases are made once."""
        app = site.create("app")
        stores = {name: site.create(name) for name in STORES}
        for store in stores.values():
            store.person.execute(POLITE)
        return lambda: cls(World(app, stores))

    # The application

    @rule(traffic=TRAFFIC, undone=st.booleans())
    def send(self, traffic: list[tuple[str, int, str]], undone: bool) -> None:
        """A transaction, perhaps with savepoints that it goes back to."""
        self.traffic(traffic, undone=undone)

    def traffic(self, traffic: list[tuple[str, int, str]], *, undone: bool = False) -> None:
        """Send messages in one transaction, but for keys that another one holds."""
        if not traffic:
            return
        transaction = self.world.begin()
        for service, number, kind in traffic:
            key = f"{service}-{number}"
            if self.world.free(key, transaction):
                if undone:
                    self.world.undone_at_once(transaction, service, key)
                self.world.send(
                    transaction, service, key, poison=kind == "poison", mortal=kind == "mortal"
                )
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

    @rule(traffic=TRAFFIC)
    def forward(self, traffic: list[tuple[str, int, str]]) -> None:
        """A run of a process of its own."""
        self.traffic(traffic)
        self.world.forward()

    @rule(which=WHICH, tasks=st.integers(1, 3), traffic=TRAFFIC)
    def open(self, which: int, tasks: int, traffic: list[tuple[str, int, str]]) -> None:
        """A process takes in hand what is pending, unless it has something."""
        self.traffic(traffic)
        self.one(which).open(tasks, frozenset(self.world.down))

    def one(self, which: int) -> Forwarder:
        """Some process, perhaps a new one."""
        there = self.world.forwarders
        if len(there) < MOST_FORWARDERS and which >= len(there):
            return self.world.forwarder()
        return there[which % len(there)]

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

    @rule(which=WHICH, point=st.sampled_from(POINTS), times=st.integers(1, 3), traffic=TRAFFIC)
    def crash(
        self, which: int, point: str, times: int, traffic: list[tuple[str, int, str]]
    ) -> None:
        """It dies at some point; at the latest, when it has delivered everything."""
        self.traffic(traffic)
        forwarder = self.one(which)
        with suppress(Died), at(point, times, die):
            forwarder.run(frozenset(self.world.down))
        if point != UNHEARD:
            self.world.dies(forwarder)

    @rule(
        which=WHICH,
        point=st.sampled_from(PAUSES),
        times=st.integers(1, 3),
        all_of_it=st.booleans(),
        traffic=TRAFFIC,
    )
    def pause(
        self,
        which: int,
        point: str,
        times: int,
        all_of_it: bool,
        traffic: list[tuple[str, int, str]],
    ) -> None:
        """It pauses at some point beyond its lease, another takes over, and it goes on."""
        self.traffic(traffic)
        forwarder = self.one(which)

        def take_over() -> None:
            forwarder.outlive_its_lease()
            self.traffic(traffic)
            other = self.world.process()
            other.open(2, frozenset(self.world.down))
            other.deliver_all() if all_of_it else other.deliver()
            if all_of_it:
                other.close()
            other.leave()

        self.world.unsure()
        with at(point, times, take_over):
            forwarder.run(frozenset(self.world.down))

    # What is worth more chances
    forward_again, crash_again, pause_again = forward, crash, pause

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
        self.seen = self.world.seen()
        wrong = self.world.truth.wrong_now(self.seen)
        assert not wrong, "; ".join(wrong)

    def come_to_rest(self) -> Seen:
        """All is up, and forwarded."""
        return self.world.come_to_rest()

    def wrong_in_the_end(self, seen: Seen) -> list[str]:
        """What must not be so then."""
        return self.world.truth.wrong_in_the_end(seen)

    def teardown(self) -> None:
        """All is up again: each message has an end that it may have."""
        try:
            if sys.exc_info()[0] is None:
                seen = self.come_to_rest()
                wrong = self.wrong_in_the_end(seen)
                assert not wrong, "in the end: " + "; ".join(wrong)
        finally:
            self.world.clear_up()
