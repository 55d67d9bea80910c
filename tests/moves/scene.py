"""A source, a store and a consumer with messages in each state; a move takes one or both ends."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

import saf
from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError, SchemaError
from tests.moves import ways
from tests.moves.conftest import Site
from tests.pipeline import connect, let_time_pass
from tests.programs import configuration
from tests.programs import saf as command

Part = Literal["source", "store", "both"]
Reader = Literal["forwarder", "receivers"]
Home = Callable[[], AbstractContextManager[EmbeddedServer]]
PARTS: tuple[Part, ...] = ("source", "store", "both")

KNOWN, UNKNOWN = "billing", "shipping"
"""The store's service, and a service that is created at the store at the end."""
PARKED = range(1000, 1003)
BY_HAND = range(2000, 2002)
"""Numbers that others insert into the store's inbox."""
AT_COPY = range(3000, 3018, ways.KEYS)
"""Numbers sent at a copy of the source."""
NOT_OF_BROKERS = ("settings", "clock_skew", "clocks_agree")
"""The doctor's checks of servers: these servers run without fsync and may have wrong clocks."""

HANDLED = "CREATE TABLE handled (at bigint PRIMARY KEY, body text)"
HANDLE = "INSERT INTO handled (at, body) VALUES (%s, %s)"
SENT_BY_HAND = "INSERT INTO saf.inbox (to_service, key, body) VALUES (%s, 'by hand', %s)"


@dataclass(kw_only=True)
class Scene:
    """The databases that an operator moves, and their messages."""

    site: Site
    old: EmbeddedServer
    """The cluster of the moved databases."""
    part: Part
    brokers: dict[str, Dsn]
    """The source and the store, at their present place."""
    folder: Path
    running: ExitStack
    """Servers and databases that end with the scene."""
    expected: list[int] = field(default_factory=list)
    dumps: dict[str, bytes] = field(default_factory=dict)
    """Backups of the moved databases."""
    copies: dict[str, Dsn] = field(default_factory=dict)
    """Copies that live on beside the source and the store."""

    @property
    def moving(self) -> list[str]:
        """The moved ones of source and store."""
        return [one for one in self.brokers if self.part in (one, "both")]

    def elsewhere(self) -> Dsn:
        """An empty database in the new cluster."""
        return self.site.new.create_database(self.site.name())

    def name_there(self) -> str:
        """Return a name for a copy in the old cluster; the copy is dropped with the scene."""
        name = self.site.name("copy")
        self.running.callback(lambda: ways.drop_database(self.old, name))
        return name

    def named(self) -> dict[str, Dsn]:
        """Return the moved databases by new names."""
        return {self.site.name(one): self.brokers[one] for one in self.moving}

    def each(self, move: Callable[[Dsn], Dsn | None]) -> None:
        """Move each database: to the place that ``move`` returns, or in place."""
        for one in self.moving:
            self.brokers[one] = move(self.brokers[one]) or self.brokers[one]

    def back_up(self, *options: str) -> None:
        """Keep a dump of each moved database."""
        for one in self.moving:
            self.dumps[one] = ways.dump(self.old, self.brokers[one], *options)

    def is_in(self, server: EmbeddedServer) -> None:
        """Use the databases of the same names in another cluster."""
        self.each(lambda broker: server.dsn(broker.database))

    def cut_over(self, followers: Mapping[str, ways.Subscription], *, sequences: bool) -> None:
        """Replace each moved database by its follower, without a write in between."""
        for one, follower in zip(self.moving, followers.values(), strict=True):
            follower.cut(sequences=sequences)
            self.brokers[one] = follower.new

    # --- what applications and operators do

    def begin(self) -> None:
        """Leave messages handled, stored, parked and pending."""
        self.send(30)
        ways.send_numbers(self.brokers["source"], *PARKED, service=UNKNOWN)
        self.forward()
        self.handle(20)
        self.send(6)

    def work(self) -> None:
        """Send, forward, handle and leave some messages pending."""
        self.send(12)
        self.forward()
        self.handle(9)
        self.send(6)

    def send(self, count: int, *, savepoint: bool = False) -> None:
        """Send the next numbers."""
        new = range(len(self.expected), len(self.expected) + count)
        ways.send_numbers(self.brokers["source"], *new, savepoint=savepoint)
        self.expected += new

    def senders_continue(self, others: int) -> None:
        """Send and insert by hand at the present place, then use up ``others`` transaction ids."""
        self.send(12)
        self.send(6, savepoint=True)
        if "source" in self.copies:
            ways.send_numbers(self.copies["source"], *AT_COPY)
        if "store" in self.moving:
            with connect(self.brokers["store"]) as store:
                for number in BY_HAND:
                    store.execute(SENT_BY_HAND, (KNOWN, str(number)))
        for one in self.moving:
            ways.burn(self.brokers[one], others)

    def saf(self, line: str) -> str:
        """Run a command of saf; return its output."""
        done = command(*line.split(), "--config", self._file())
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout

    def forward(self) -> None:
        """Forward all that can be forwarded."""
        self.saf("forward")

    def handle(self, most: int = 1000, service: str = KNOWN) -> None:
        """Handle messages of a service, in the store's own transaction."""
        with saf.receive(self.brokers["store"], service, max_messages=most) as delivery:
            for message in delivery:
                delivery.connection.execute(HANDLE, [time.monotonic_ns(), message.text()])

    # --- promises

    def is_refused(self, words: str, who: Collection[Reader]) -> None:
        """Check that each reader names the reason and neither reads nor stores a message."""
        stored = self._stored()
        if "forwarder" in who:
            done = command("forward", "--config", self._file())
            assert re.search(words, done.stderr, re.DOTALL), (done.stdout, done.stderr)
            assert done.returncode == ConfigurationError.exit_code
        new = self._stored() - stored
        assert not (new & {*AT_COPY} if self.copies else new), "only a copy's original continues"
        if "receivers" in who and "store" in self.moving:
            with pytest.raises(SchemaError, match=f"(?s){words}"):
                self.handle()

    def delivers_all(self) -> None:
        """Check that every sent message is handled once and in order."""
        let_time_pass(self.brokers["source"])
        self.forward()
        self.handle()
        with connect(self.brokers["store"]) as store:
            create_service(store, UNKNOWN)
        for _ in range(2):
            let_time_pass(self.brokers["source"])
            self.forward()
        for service in (KNOWN, UNKNOWN):
            self.handle(service=service)
        with connect(self.brokers["store"]) as store:
            found = [int(body) for (body,) in fetch(store, "SELECT body FROM handled ORDER BY at")]
        by_hand = BY_HAND if "store" in self.moving else ()
        at_copy = AT_COPY if "source" in self.copies else ()
        assert sorted(found) == [*self.expected, *PARKED, *by_hand, *at_copy]
        for key in {self._key(number) for number in found}:
            of_key = [number for number in found if self._key(number) == key]
            assert of_key == sorted(of_key)
        assert self.problems() == []

    def problems(self) -> list[str]:
        """Return the errors that the doctor finds."""
        done = command("doctor", "--json", "--config", self._file())
        found = [one for one in json.loads(done.stdout)["findings"] if one["severity"] == "error"]
        return [one["what"] for one in found if one["check"] not in NOT_OF_BROKERS]

    @staticmethod
    def _key(number: int) -> int:
        return number % ways.KEYS if number < PARKED[0] else number - number % PARKED[0]

    def _stored(self) -> set[int]:
        with connect(self.brokers["store"]) as store:
            found = fetch(store, "SELECT body FROM saf.inbox WHERE source IS NOT NULL")
        return {int(body) for (body,) in found}

    def _file(self) -> Path:
        sources, stores = {"shop": self.brokers["source"]}, {"mom": self.brokers["store"]}
        if "source" in self.copies:
            sources["shop_copy"] = self.copies["source"]
        if "store" in self.copies:
            stores["mom_copy"] = self.copies["store"]
        return configuration(self.folder / "saf.toml", sources, stores)


@contextmanager
def scene(site: Site, part: Part, folder: Path, home: Home | None = None) -> Iterator[Scene]:
    """A scene in the site's old cluster, or with the moved databases in a cluster of their own."""
    brokers = {"source": site.app, "store": site.mom}
    with ExitStack() as running:
        made = Scene(
            site=site, old=site.old, part=part, brokers=brokers, folder=folder, running=running
        )
        if home is not None:
            made.old = running.enter_context(home())
            made.each(lambda broker: made.old.create_database(broker.database))
            for name in made.moving:
                migrate(made.brokers[name])
        with connect(made.brokers["store"]) as store:
            create_service(store, KNOWN)
            store.execute(HANDLED)
        yield made
