"""Dialogs between two brokers, over forwarders and receivers that fail, die and repeat themselves.

The truth is what each end has said in transactions that committed, and what the applications' own
tables say was heard. What is heard is what was said, from the beginning, once, in order and whole:
up to now; in the end, all of it. Unless an end has given up: one that has ended by itself hears no
more, and an Error comes instead of what was not received before it.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any, Self
from uuid import UUID

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import saf
from saf.broker import services
from saf.errors import DialogEnded, DialogError, DialogExpired
from saf.operating.maintenance import purge_broker
from saf.testing import clock
from tests.dialogs import END, ERROR
from tests.stateful.forwarder import AN_HOUR, UNHEARD, Died, Forwarder, at, die
from tests.stateful.receiving import POINTS as RECEIVING_POINTS
from tests.stateful.receiving import HandlerFailed
from tests.stateful.site import Place, Site

SHOP, WAREHOUSE = "shop", "warehouse"
SERVICE = {True: SHOP, False: WAREHOUSE}
QUALITY = {True: "at_least_once", False: "exactly_once"}
"""Of what each side says: repeats are for the dialog to drop."""
MOST_TALKS = 3
FRAGMENT_BYTES = 8
MOST_ROUNDS = 60
SOON = timedelta(hours=2)

SIDE = st.booleans()
WHICH = st.integers(0, MOST_TALKS - 1)
WORDS = st.lists(st.tuples(WHICH, st.integers(1, 2), st.booleans()), max_size=3)
"""What a side says before something happens to it: in which talk, how much, in fragments or not."""

HEARD = """
CREATE TABLE IF NOT EXISTS heard (number serial, conversation uuid, handle uuid, what text)
"""
HEAR = "INSERT INTO heard (conversation, handle, what) VALUES (%s, %s, %s)"
ALL_HEARD = "SELECT conversation, handle, what FROM heard ORDER BY number"
ROUTE = "INSERT INTO saf.route (service, destination, quality) VALUES (%s, 'there', %s)"
NEXT_SLOT = """
SELECT setval('saf.{log}_id_seq', ((last_value >> 20) + 1) << 20) FROM saf.{log}_id_seq
"""
POLICY = saf.Policy(max_attempts=1000, first_wait_seconds=AN_HOUR, longest_wait_seconds=AN_HOUR)


@dataclass(eq=False)
class End:
    """One end of a talk: the truth about it."""

    dialog: saf.Dialog | None = None
    said: list[str] = field(default_factory=list)
    gave_up: bool = False
    """It has ended by itself, so it hears no more."""

    @property
    def failed(self) -> bool:
        """It has said an Error."""
        return ERROR in self.said


@dataclass(eq=False)
class Talk:
    """A dialog: the initiator's end and the target's."""

    ends: dict[bool, End]
    mortal: bool
    over: bool = False
    """Its lifetime is."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Dialogs(RuleBasedStateMachine):
    """Some dialogs between a shop and a warehouse."""

    def __init__(self, app: Place, mom: Place) -> None:
        super().__init__()
        self.places = {True: app, False: mom}
        self.talks: list[Talk] = []
        # conversations get the same shards in each run of the same steps
        self.patch = pytest.MonkeyPatch()
        numbers = itertools.count(1)
        self.patch.setattr("saf.dialogs.dialog.uuid4", lambda: UUID(int=next(numbers), version=4))
        Forwarder.begin_anew()
        for side, place in self.places.items():
            Site.empty(place)
            place.person.execute("TRUNCATE heard")
            services.create_service(place.person, SERVICE[side])
            place.person.execute(ROUTE, [SERVICE[not side], QUALITY[side]])

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their databases are made once."""
        app, mom = site.create("shop"), site.create("warehouse")
        for place in (app, mom):
            place.person.execute(HEARD)
        return lambda: cls(app, mom)

    # What the ends say

    @contextmanager
    def transaction(self, side: bool, *, commit: bool) -> Iterator[psycopg.Connection[Any]]:
        """One of an application; what is said in it is true if it commits."""
        with self.places[side].database.connect() as connection:
            yield connection
            connection.commit() if commit else connection.rollback()

    @initialize()
    def begin_one(self) -> None:
        """There is something to talk about."""
        self._begin(False, 1)

    @precondition(lambda self: len(self.talks) < MOST_TALKS)
    @rule(mortal=st.sampled_from((False, False, True)), many=st.integers(1, 3))
    def begin(self, mortal: bool, many: int) -> None:
        """The shop begins another dialog, and says something."""
        self._begin(mortal, many)

    def _begin(self, mortal: bool, many: int) -> None:
        talk = Talk({True: End(), False: End()}, mortal)
        with self.transaction(True, commit=True) as connection:
            talk.ends[True].dialog = saf.begin_dialog(
                connection,
                from_service=SHOP,
                to_service=WAREHOUSE,
                lifetime=3600.0 if mortal else None,
            )
            self.talks.append(talk)
            self._say(connection, talk, True, many, large=False)

    @precondition(lambda self: self.talks)
    @rule(
        which=WHICH,
        side=SIDE,
        many=st.integers(1, 3),
        large=st.booleans(),
        commit=st.sampled_from((True, True, False)),
    )
    def say(self, which: int, side: bool, many: int, large: bool, commit: bool) -> None:
        """An end says something, in one piece or in fragments, and may think better of it."""
        talk = self.talks[which % len(self.talks)]
        before = [*talk.ends[side].said]
        with self.transaction(side, commit=commit) as connection:
            self._say(connection, talk, side, many, large=large)
        if not commit:
            talk.ends[side].said = before

    def _say(
        self, connection: psycopg.Connection[Any], talk: Talk, side: bool, many: int, *, large: bool
    ) -> None:
        end = talk.ends[side]
        if end.dialog is None:
            return
        for number in itertools.islice(talk.numbers, many):
            text = f"{number}{'.' * 3 * FRAGMENT_BYTES if large else ''}"
            try:
                end.dialog.send(connection, text, fragment_bytes=FRAGMENT_BYTES)
            except (DialogEnded, DialogExpired):
                if self.may_be_over(talk, side):
                    return
                raise
            end.said.append(text)

    def may_be_over(self, talk: Talk, side: bool) -> bool:
        """Whether an end has a reason not to take any more."""
        last = self.heard(side)[self.conversation(talk)][-1:]
        return talk.ends[side].gave_up or talk.over or last in ([END], [ERROR])

    @precondition(lambda self: self.talks)
    @rule(which=WHICH, side=SIDE, failing=st.sampled_from((False, False, True)))
    def end(self, which: int, side: bool, failing: bool) -> None:
        """An end ends, in order or with an error."""
        talk = self.talks[which % len(self.talks)]
        mine = talk.ends[side]
        if mine.dialog is None:
            return
        known = self.heard(side)[self.conversation(talk)][-1:]
        with self.transaction(side, commit=True) as connection:
            try:
                if failing:
                    mine.dialog.end_with_error(connection, 1, "no")
                else:
                    mine.dialog.end(connection)
            except DialogError:
                if self.may_be_over(talk, side):
                    return
                raise
        mine.gave_up = True
        if known != [ERROR]:
            mine.said.append(ERROR if failing else END)

    # What carries it

    def forwarder(self, side: bool) -> Forwarder:
        """From one side to the other."""
        return Forwarder(self.places[side].dsn, {"there": self.places[not side].dsn})

    @rule(side=SIDE, words=WORDS)
    def forward(self, side: bool, words: list[tuple[int, int, bool]]) -> None:
        """What one side has said goes to the other."""
        self.talk(side, words)
        self._forward(side)

    def talk(self, side: bool, words: list[tuple[int, int, bool]]) -> None:
        """One side says something, in one transaction."""
        with self.transaction(side, commit=True) as connection:
            for which, many, large in words:
                self._say(connection, self.talks[which % len(self.talks)], side, many, large=large)

    def _forward(self, side: bool) -> int:
        forwarder = self.forwarder(side)
        moved = 0
        for _ in range(MOST_ROUNDS):
            receipts = forwarder.run()
            moved += sum(one.messages + one.dropped for one in receipts)
            if not forwarder.cycle.work:
                break
        forwarder.leave()
        return moved

    @rule(
        side=SIDE,
        point=st.sampled_from(("mom_commit", "mark_commit", UNHEARD)),
        times=st.integers(1, 2),
        words=WORDS,
    )
    def crash(self, side: bool, point: str, times: int, words: list[tuple[int, int, bool]]) -> None:
        """It dies on the way, so that some of it goes again."""
        self.talk(side, words)
        forwarder = self.forwarder(side)
        with suppress(Died), at(point, times, die):
            forwarder.run()
        forwarder.die()

    # What is worth more chances
    forward_again, crash_again = forward, crash

    # Who hears it

    @rule(
        side=SIDE,
        many=st.sampled_from((1, 3, 100)),
        fails=st.sampled_from((None, None, None, 0, 1)),
    )
    def receive(self, side: bool, many: int, fails: int | None) -> None:
        """An application hears what has arrived, or fails at some message."""
        self._receive(side, many, fails)

    @rule(side=SIDE, many=st.sampled_from((1, 100)), nth=st.integers(0, 2))
    def park(self, side: bool, many: int, nth: int) -> None:
        """It does not want one of them now."""
        self._receive(side, many, None, parks=nth)

    @rule(side=SIDE, nth=st.integers(0, 2))
    def stop(self, side: bool, nth: int) -> None:
        """It is told to stop at one of them: the rest is put back."""
        self._receive(side, 100, None, stops=nth)

    @rule(side=SIDE, many=st.sampled_from((1, 100)), point=st.sampled_from(RECEIVING_POINTS))
    def die(self, side: bool, many: int, point: str) -> None:
        """It dies at some point."""
        with suppress(Died), at(point, 1, die):
            self._receive(side, many, None)

    @contextmanager
    def engine(self, side: bool) -> Iterator[psycopg.Connection[Any]]:
        """Where to receive; chance is the same each time."""
        with self.places[side].database.connect(autocommit=True) as connection:
            connection.execute("SELECT setseed(0.5)")
            yield connection

    def _receive(
        self,
        side: bool,
        many: int,
        fails: int | None,
        *,
        parks: int | None = None,
        stops: int | None = None,
    ) -> int:
        received, stopping = 0, Event()
        with (
            suppress(HandlerFailed),
            saf.receive(
                lambda: self.engine(side), SERVICE[side], max_messages=many, policy=POLICY
            ) as delivery,
        ):
            delivery.until(stopping)
            for place, message in enumerate(delivery):
                assert not stopping.is_set(), "one is given after it was told to stop"
                received += 1
                if place == stops:
                    stopping.set()
                if place == fails:
                    raise HandlerFailed
                if place == parks:
                    delivery.park(message, "not now")
                    continue
                assert message.dialog is not None
                own = message.message_type in (END, ERROR)
                what = message.message_type if own else message.text()
                delivery.connection.execute(
                    HEAR, [message.conversation_id, message.dialog.handle, what]
                )
        self.learn(side)
        return received

    def learn(self, side: bool) -> None:
        """An application that has heard of a dialog has its end of it."""
        rows = self.places[side].person.execute(ALL_HEARD).fetchall()
        handles = {conversation: handle for conversation, handle, _ in rows}
        for talk in self.talks:
            handle = handles.get(self.conversation(talk))
            if talk.ends[side].dialog is None and handle is not None:
                talk.ends[side].dialog = saf.open_dialog(self.places[side].person, handle)

    receive_again = receive

    # Time and the world around

    @rule()
    def let_time_pass(self) -> None:
        """Two hours."""
        for place in self.places.values():
            clock.let_time_pass(place.dsn, SOON)
        for talk in self.talks:
            talk.over |= talk.mortal

    @rule(side=SIDE)
    def purge(self, side: bool) -> None:
        """What all have completed may go; what is closed stays known for a day."""
        person = self.places[side].person
        for log in ("outbox", "inbox"):
            person.execute(NEXT_SLOT.format(log=log))
        purge_broker(
            person, retention_seconds=0, rotate_after_seconds=10**9, lock_timeout_seconds=0.001
        )

    # What must be

    @staticmethod
    def conversation(talk: Talk) -> UUID:
        """Its id."""
        dialog = talk.ends[True].dialog
        assert dialog is not None
        return dialog.conversation_id

    def heard(self, side: bool) -> dict[UUID, list[str]]:
        """What an application has, by conversation."""
        found: dict[UUID, list[str]] = defaultdict(list)
        for conversation, _, what in self.places[side].person.execute(ALL_HEARD).fetchall():
            found[conversation].append(what)
        return found

    @invariant()
    def nothing_is_wrong(self) -> None:
        """What is heard is what was said, from the beginning."""
        wrong = [found for side in (True, False) for found in self.wrong(side, at_rest=False)]
        assert not wrong, "; ".join(wrong)

    def wrong(self, side: bool, *, at_rest: bool) -> Iterator[str]:
        """What is, of what one side has heard."""
        heard = self.heard(side)
        known = {self.conversation(talk) for talk in self.talks}
        yield from (f"{SERVICE[side]}: unexpected: {one}" for one in heard.keys() - known)
        for number, talk in enumerate(self.talks):
            mine, other = talk.ends[side], talk.ends[not side]
            got = heard[self.conversation(talk)]
            name = f"talk {number}: {SERVICE[side]} has heard {got} of {other.said}"
            failed = ERROR in got
            may_fail = other.failed or talk.over
            if failed:
                if got.count(ERROR) > 1 or got[-1] != ERROR or not may_fail:
                    yield f"wrong error: {name}"
                got = got[:-1]
            said = [one for one in other.said if one != ERROR]
            if got != said[: len(got)]:
                yield f"not what was said: {name}"
            if at_rest and not mine.gave_up and not failed:
                if may_fail and END not in got:
                    yield f"no error: {name}"
                elif got != said and END not in got:
                    yield f"not heard: {name}"

    def come_to_rest(self) -> None:
        """All that was said is carried and heard."""
        still = 0
        for round_ in range(MOST_ROUNDS):
            moved = self._forward(True) + self._forward(False)
            moved += self._receive(True, 100, None) + self._receive(False, 100, None)
            still = 0 if moved else still + 1
            if still == 3:
                return
            if not moved or round_ % 5 == 4:
                self.let_time_pass()
        raise AssertionError("it does not come to rest")

    def teardown(self) -> None:
        """All that was said has been heard, or both ends know better."""
        try:
            if sys.exc_info()[0] is None:
                self.come_to_rest()
                wrong = [one for side in (True, False) for one in self.wrong(side, at_rest=True)]
                assert not wrong, "in the end: " + "; ".join(wrong)
        finally:
            self.patch.undo()
