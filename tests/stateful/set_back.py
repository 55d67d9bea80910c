"""Set-backs: the source or a store is what it was at a backup, and life goes on.

Continuing in silence is wrong; refusing by name is right, if the documented command then repairs
it. What the source has forgotten cannot be sent again; all else has one of its ends, and a message
that had arrived since the backup at most comes a second time.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import saf
from saf.broker import services
from saf.errors import SafError
from tests.stateful.aside import SettingAside
from tests.stateful.backups import Backups
from tests.stateful.forwarding import STORE, TRAFFIC
from tests.stateful.model import Memory, Seen
from tests.stateful.repairs import NoWayOut, Person
from tests.stateful.site import Place, Site
from tests.stateful.world import POLITE, STORES, World

APP = "app"
PLACE = st.sampled_from((APP, *STORES))
READER = "reader"
EFFECTS = "CREATE TABLE IF NOT EXISTS effect (number serial, name text)"
NAME = "split_part(convert_from(body, 'UTF8'), ' ', 1)"
ENDED_THERE = f"SELECT name FROM effect UNION ALL SELECT {NAME} FROM saf.dead_letter"
STORED = f"SELECT {NAME} FROM saf.inbox"
MOST_REPAIRS = 4


class SetBacks(SettingAside):
    """An application and two stores with receivers, any of which goes back to a backup."""

    def __init__(self, backups: Backups, world: World, person: Person) -> None:
        super().__init__(world)
        world.refusals = []
        self.backups = backups
        self.repairer = person
        self.memories: dict[str, Memory | None] = {}
        self.routes: dict[str, Any] = {}
        for place in world.stores.values():
            place.person.execute("TRUNCATE effect")
            services.create_subscription(place.person, READER, service=None)

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their databases are made once."""
        backups = Backups(site)
        app = site.create("app")
        stores = {name: site.create(name) for name in STORES}
        for store in stores.values():
            store.person.execute(POLITE)
            store.person.execute(EFFECTS)
        folder = site.closing.enter_context(tempfile.TemporaryDirectory(prefix="saf-stateful-"))
        person = Person(Path(folder))

        return lambda: cls(backups.cleared(), World(app, stores), person)

    # Backups

    def place(self, name: str) -> Place:
        """The application's or a store's."""
        return self.world.app if name == APP else self.world.stores[name]

    def stop_everything(self) -> None:
        """Nobody is connected any more."""
        for transaction in [*self.world.open]:
            self.world.end(transaction, commit=False)
        for forwarder in [*self.world.forwarders]:
            self.world.dies(forwarder)

    @rule(name=PLACE, traffic=TRAFFIC)
    def back_up(self, name: str, traffic: list[tuple[str, int, str]]) -> None:
        """A backup is taken, of a database that is at rest or has something in hand."""
        self.traffic(traffic)
        self.stop_everything()
        if not self.backups.at_home(self.place(name)):
            return
        self.backups.take(self.place(name))
        self.memories[name] = self.world.truth.remember(self.world.settled) if name == APP else None
        self.routes = dict(self.world.routes) if name == APP else self.routes

    @precondition(lambda self: self.memories)
    @rule(name=PLACE, logical=st.sampled_from((False, False, False, True)), traffic=TRAFFIC)
    def set_back(self, name: str, logical: bool, traffic: list[tuple[str, int, str]]) -> None:
        """A database is what it was, and the application goes on at once."""
        if name not in self.memories:
            name = next(iter(self.memories))
        self.stop_everything()
        before = self.world.seen()
        self.backups.set_back(self.place(name), logical=logical)
        memory = self.memories[name]
        if memory is not None:
            self.world.truth.set_back(memory)
            self.world.routes = dict(self.routes)
            self.world.settled = set(memory.settled)
        else:
            after = self.world.seen()
            self.world.truth.lost_at(before.stored[name], after.stored[name])
            self.world.settled &= {one for names in after.stored.values() for one in names}
        # a savepoint has a transaction id of its own, which a dump's repair has to understand
        self.traffic(traffic, undone=logical)

    # What is worth more chances
    back_up_again, set_back_again = back_up, set_back

    @precondition(lambda self: self.world.refusals)
    @rule()
    def repair(self) -> None:
        """A person does what the refusal says."""
        self.stop_everything()
        uncertain = self.repairer.repair(self.world.app.dsn, self.world.dsns)
        self.world.truth.uncertain += uncertain
        assert self.world.refusals is not None
        self.world.refusals.clear()

    def traffic(self, traffic: list[tuple[str, int, str]], *, undone: bool = False) -> None:
        """Send, or be refused."""
        try:
            super().traffic(traffic, undone=undone)
        except SafError as error:
            assert self.world.refusals is not None
            self.world.refusals.append(error)
            self.world.end(self.world.open[-1], commit=False)

    # What is purged cannot be sent again
    @precondition(lambda self: not self.memories)
    @rule()
    def purge(self) -> None:
        """Ids leave their slot, and what everybody has completed goes."""
        self.world.purge()

    # Receivers

    @rule(store=STORE)
    def consume(self, store: str) -> None:
        """What has arrived takes effect."""
        self._consume(store)

    def _consume(self, store: str) -> int:
        place, received = self.world.stores[store], 0
        try:
            while True:
                with saf.receive(place.dsn, READER) as delivery:
                    if not delivery:
                        return received
                    for message in delivery:
                        received += 1
                        delivery.connection.execute(
                            "INSERT INTO effect (name) VALUES (%s)", [message.text().split()[0]]
                        )
        except SafError as error:
            assert self.world.refusals is not None
            self.world.refusals.append(error)
            return received

    # What must be

    @invariant()
    def nothing_takes_effect_twice(self) -> None:
        """Nor what is not there."""
        for name, place in self.world.stores.items():
            effects = Counter(row[0] for row in place.person.execute(ENDED_THERE).fetchall())
            stored = Counter(row[0] for row in place.person.execute(STORED).fetchall())
            assert effects <= stored, f"{name}: {effects - stored}"

    def come_to_rest(self) -> Seen:
        """All is up; what is refused is repaired; what is lost is sent again."""
        repairs = still = 0
        for transaction in [*self.world.open]:
            self.world.end(transaction, commit=True)
        self.world.as_it_was_meant_to_be()
        for _ in range(200):
            moved = self.world.forward()
            moved += sum(self._consume(store) for store in self.world.stores)
            if self.world.refusals:
                repairs += 1
                if repairs > MOST_REPAIRS:
                    raise NoWayOut(f"after {MOST_REPAIRS} repairs: {self.world.refusals[-1]}")
                self.repair()
                self.world.as_it_was_meant_to_be()
                still = 0
                continue
            still = 0 if moved else still + 1
            if still == 2:
                replayed = self.repairer.compare(self.world.app.dsn, self.world.dsns)
                if not replayed:
                    return self.world.seen()
                wrong = self.world.truth.replayed(replayed, self.world.seen())
                assert not wrong, "; ".join(wrong)
            self.world.let_time_pass()
        raise AssertionError("it does not come to rest")

    def wrong_in_the_end(self, seen: Seen) -> list[str]:
        """Each message has an end, and what has arrived has taken effect."""
        wrong = super().wrong_in_the_end(seen)
        for name, place in self.world.stores.items():
            effects = Counter(row[0] for row in place.person.execute(ENDED_THERE).fetchall())
            wrong += [
                f"never received at {name}: {one}" for one in Counter(seen.stored[name]) - effects
            ]
        return wrong
