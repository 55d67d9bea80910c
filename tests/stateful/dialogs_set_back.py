"""Dialogs and monologs whose brokers are set back, and repaired by the documented commands.

Each end's application writes down what it has said and heard, and goes back with its database. In
the end every dialog fits, or has failed at both ends; and the subscribers of a monolog have no gap
without an Error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.statements import Code
from saf.errors import DialogEnded
from tests import set_backs
from tests.dialogs import ERROR, SHOP, WAREHOUSE, prepare
from tests.pipeline import Cycle, connect, forwarding_rules
from tests.set_backs import MEMORY, Two
from tests.stateful.backups import Backups
from tests.stateful.repairs import A_YEAR, NoWayOut, Person
from tests.stateful.site import Place, Site

PRICES = "prices"
MOST = 4
OPEN = """
SELECT handle FROM saf.conversation JOIN unnest(%(ids)s::uuid[]) WITH ORDINALITY
    AS mine (conversation_id, place) USING (conversation_id)
WHERE state IN ('started_outbound', 'started_inbound', 'conversing') ORDER BY place
"""
ROUTE = "INSERT INTO saf.route (service, destination) VALUES (%s, %s)"
SIDE = st.booleans()
WHICH = st.integers(0, MOST - 1)
WORDS = st.lists(WHICH, max_size=3)
"""In which dialogs something is said."""


class AtSite(set_backs.Place):
    """A broker of a site: its backups are the site's."""

    def __init__(self, service: str, place: Place, backups: Backups) -> None:
        super().__init__(service, place.dsn, backups.site.databases)
        self.place, self.backups = place, backups

    def set_back(self, *, logical: bool) -> None:
        """It is what it was at its backup."""
        self.backups.set_back(self.place, logical=logical)
        self.dsn = self.place.dsn


class Couple(Two):
    """A shop and a warehouse that a person repairs."""

    def __init__(self, shop: AtSite, warehouse: AtSite, person: Person) -> None:
        super().__init__(shop=shop, warehouse=warehouse)
        self.person = person

    def carry(self) -> None:
        """What is pending at both arrives."""
        for source, there in ((self.shop, self.warehouse), (self.warehouse, self.shop)):
            destinations = {there.service: there.dsn}
            with Cycle(source.dsn, forwarding_rules("exactly_once", 1000, **destinations)) as cycle:
                cycle.default = None
                while receipts := cycle.run():
                    refused = [one.error for one in receipts if one.error]
                    assert not refused, f"refused after the repair: {refused}"

    def mend(self) -> None:
        """The commands of docs/operations.md.

        Raises:
            NoWayOut
        """
        lines = []
        for place in (self.shop, self.warehouse):
            dsn = json.dumps(place.dsn.conninfo)
            lines += [f"[brokers.{place.service}]\ndsn = {dsn}"]
            lines += [f"[destinations.{place.service}]\ndsn = {dsn}"]
        lines += [f"[purge]\nretention_seconds = {A_YEAR}"]
        self.person.file.write_text("\n".join(lines) + "\n")
        for command in (("rebase",), ("dialog", "compare")):
            code, said = self.person.saf(*command)
            if code != 0:
                raise NoWayOut(f"saf {' '.join(command)}: exit code {code}: {said}")


class DialogsSetBack(RuleBasedStateMachine):
    """Some dialogs and monologs between two brokers, each of which may be set back."""

    def __init__(self, two: Couple, backups: Backups) -> None:
        super().__init__()
        self.two, self.backups = two, backups
        self.number = 0
        self.dialogs: list[UUID] = []
        self.monologs: dict[UUID, list[str]] = {}
        """What each has ever said, in whichever life of its publisher."""
        self.backed_up: set[bool] = set()
        for place in (two.shop, two.warehouse):
            with connect(place.dsn) as connection:
                connection.execute("TRUNCATE memory")
        prepare(two.shop.dsn, two.warehouse.dsn)
        self._route(two.shop.dsn, WAREHOUSE, PRICES, there=WAREHOUSE)
        self._route(two.warehouse.dsn, SHOP, there=SHOP)
        with connect(two.warehouse.dsn) as connection:
            create_service(connection, PRICES)

    @staticmethod
    def _route(dsn: Dsn, *services: str, there: str) -> None:
        with connect(dsn) as connection:
            for service in services:
                connection.execute(ROUTE, [service, there])

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their databases are made once."""
        backups = Backups(site)
        places = [site.create(name) for name in (SHOP, WAREHOUSE)]
        for place in places:
            place.person.execute(MEMORY)
        folder = site.closing.enter_context(tempfile.TemporaryDirectory(prefix="saf-stateful-"))
        person = Person(Path(folder))

        def two() -> Couple:
            backups.cleared()
            for place in places:
                Site.empty(place)
            shop, warehouse = places
            return Couple(
                AtSite(SHOP, shop, backups), AtSite(WAREHOUSE, warehouse, backups), person
            )

        return lambda: cls(two(), backups)

    def at(self, side: bool) -> AtSite:
        """The shop, or the warehouse."""
        place = self.two.shop if side else self.two.warehouse
        assert isinstance(place, AtSite)
        return place

    def text(self) -> str:
        """Nothing is said twice."""
        self.number += 1
        return str(self.number)

    # What is said and heard

    @initialize()
    def begin_one(self) -> None:
        """There is something to talk about, and a backup of each that has begun it."""
        self.begin()
        self.begin_monolog()
        self.two.talk()
        for side in (True, False):
            self.back_up(side, [])

    @precondition(lambda self: len(self.dialogs) < MOST)
    @rule()
    def begin(self) -> None:
        """The shop begins a dialog."""
        self.dialogs.append(self.two.begin(self.text()).conversation_id)

    @precondition(lambda self: len(self.monologs) < MOST)
    @rule()
    def begin_monolog(self) -> None:
        """The shop begins a monolog."""
        with self.two.shop.dsn.connect(role="test") as connection:
            monolog = saf.begin_monolog(connection, from_service=SHOP, topic=PRICES)
        self.monologs[monolog.conversation_id] = []
        self.publish(len(self.monologs) - 1)

    @rule(which=WHICH)
    def publish(self, which: int) -> None:
        """A monolog says something, if its publisher knows it and it is not over."""
        monolog = [*self.monologs][which % len(self.monologs)]
        if self.one(True, [monolog], 0) is not None:
            text = self.text()
            self.say_in(True, [monolog], 0, text)
            self.monologs[monolog].append(text)

    publish_again = publish

    @rule(side=SIDE, words=WORDS)
    def say(self, side: bool, words: list[int]) -> None:
        """An end says something."""
        for which in words:
            self.say_in(side, self.dialogs, which, self.text())

    def say_in(self, side: bool, ids: list[UUID], which: int, text: str) -> None:
        """What it says in one of its dialogs that are open, if there are any."""
        if dialog := self.one(side, ids, which):
            self.at(side).says(dialog, text)

    def one(self, side: bool, ids: list[UUID], which: int) -> saf.Dialog | None:
        """One of the open ends of a side."""
        with connect(self.at(side).dsn) as connection:
            ends = [handle for (handle,) in fetch(connection, OPEN, {"ids": ids})]
            return saf.open_dialog(connection, ends[which % len(ends)]) if ends else None

    @rule(side=SIDE, which=WHICH)
    def end(self, side: bool, which: int) -> None:
        """An end ends."""
        if dialog := self.one(side, self.dialogs, which):
            with suppress(DialogEnded), self.at(side).dsn.connect(role="test") as connection:
                dialog.end(connection)

    @rule()
    def carry(self) -> None:
        """What is pending arrives."""
        self.two.carry()

    @rule(side=SIDE)
    def hear(self, side: bool) -> None:
        """What has arrived is heard."""
        self.at(side).hears()

    # Set-backs

    @rule(side=SIDE, words=WORDS)
    def back_up(self, side: bool, words: list[int]) -> None:
        """A backup is taken, in mid-talk perhaps."""
        self.say(side, words)
        if self.backups.at_home(self.at(side).place):
            self.backups.take(self.at(side).place)
            self.backed_up.add(side)

    @precondition(lambda self: self.backed_up)
    @rule(
        side=SIDE,
        logical=st.sampled_from((False, False, False, True)),
        before=WORDS,
        early=WORDS,
    )
    def set_back(self, side: bool, logical: bool, before: list[int], early: list[int]) -> None:
        """A broker is what it was; its application may go on before it is repaired."""
        self.say(side, before)
        self.two.carry()
        self.at(side).set_back(logical=logical)
        self.say(side, early) if not logical else None
        self.two.mend()

    set_back_again = set_back

    # What must be

    def come_to_rest(self) -> None:
        """All that is under way is heard."""
        self.two.mend()
        self.two.talk()

    def teardown(self) -> None:
        """Every dialog fits or has failed at both ends; no monolog has a gap without an Error."""
        if sys.exc_info()[0] is None:
            self.come_to_rest()
            self.two.check(set(self.dialogs) - self.over())
            for monolog, texts in self.monologs.items():
                self.check_monolog(monolog, texts)

    def over(self) -> set[UUID]:
        """The dialogs that an end has ended by itself: it hears no more."""
        return {
            dialog
            for place in (self.two.shop, self.two.warehouse)
            for dialog, (state, code, _) in place.ends().items()
            if code is None and state.startswith(("disconnected", "closed"))
        }

    def check_monolog(self, monolog: UUID, texts: list[str]) -> None:
        """Of what the publisher says it has said, the subscribers have all; or an Error."""
        said = self.two.shop.remembers(monolog, said=True)
        numbered = self.stored(monolog)
        heard = [text for _, text in numbered if text != ERROR]
        assert set(heard) <= set(texts), f"monolog: heard {numbered}, said {texts}"
        if ERROR not in [text for _, text in numbered]:
            numbers = [number for number, _ in numbered]
            assert numbers == [*range(1, len(numbers) + 1)], f"monolog with a gap: {numbered}"
            assert heard == said, f"monolog: heard {numbered}, the publisher has said {said}"

    def stored(self, monolog: UUID) -> list[tuple[int, str]]:
        """What subscribers get, which is what is in the inbox."""
        with connect(self.two.warehouse.dsn) as connection:
            rows: list[Any] = fetch(
                connection,
                "SELECT sequence, CASE WHEN message_type = %(error)s "
                "  AND body LIKE %(code)s THEN message_type ELSE convert_from(body, 'UTF8') END "
                "FROM saf.inbox WHERE conversation_id = %(monolog)s ORDER BY id",
                {"monolog": monolog, "error": ERROR, "code": f"%{Code.SET_BACK:d}%".encode()},
            )
        return rows
