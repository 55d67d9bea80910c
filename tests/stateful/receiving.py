"""Receiving: two subscriptions of a service, whose receivers fail, are killed and overlap.

The truth is what was put into the inbox, and what the application's own table says has taken
effect. Each message takes effect exactly once for each subscription, in the order of its key; or it
is a dead letter, because it failed every time, was rejected or has expired; or a person has
discarded it.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from threading import Event
from typing import Any, Self

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import saf
from saf.broker import services
from saf.operating import decide
from saf.operating.maintenance import purge_broker
from saf.receiving.delivery import Delivery
from saf.setaside.selection import DeadLetters
from saf.testing import clock
from tests.stateful.forwarder import AN_HOUR, Died, at, die
from tests.stateful.site import Place, Site

SERVICE, COPY = "billing", "billing copy"
SUBSCRIPTIONS = (SERVICE, COPY)
KEYS = ("a", "b", "c")
POINTS = (
    "receive_read",
    "receive_handled",
    "receive_settled",
    "receive_committed",
    "attempt_counted",
)
HOWS = ("fine", "fine", "fine", "raise", "park", "reject", "kill")
MOST_ATTEMPTS = 4
MOST_ROUNDS = 60
SOON = timedelta(hours=2)
POLICY = saf.Policy(
    max_attempts=MOST_ATTEMPTS, first_wait_seconds=AN_HOUR, longest_wait_seconds=AN_HOUR
)

TABLES = "CREATE TABLE IF NOT EXISTS effect (number serial, subscription text, name text)"
PUT = """
INSERT INTO saf.inbox (message_id, to_service, key, body, deliver_at, expires_at)
VALUES (md5(%(name)s)::uuid, 'billing', %(key)s, %(body)s,
        CASE WHEN %(delayed)s THEN now() + interval '1 hour' END,
        CASE WHEN %(mortal)s THEN now() + interval '1 hour' END)
"""
NAME = "split_part(convert_from(body, 'UTF8'), ' ', 1)"
EFFECTS = "SELECT subscription, name FROM effect ORDER BY number"
DEAD = f"""
SELECT s.name, {NAME}, reason FROM saf.dead_letter JOIN saf.subscription s USING (subscription_id)
"""
PARKED = f"""
SELECT s.name, {NAME} FROM saf.parked JOIN saf.subscription s USING (subscription_id)
"""
INBOX = f"SELECT {NAME} FROM saf.inbox"
NEXT_SLOT = """
SELECT setval('saf.inbox_id_seq', ((last_value >> 20) + 1) << 20) FROM saf.inbox_id_seq
"""


class HandlerFailed(Exception):
    """What a handler raises."""


def name_of(message: saf.Received) -> str:
    """What the model calls a message."""
    return message.text().split()[0]


@dataclass(kw_only=True, eq=False)
class Put:
    """One message, and what may become of it for each subscription."""

    name: str
    key: str
    number: int
    poison: bool
    delayed: bool
    mortal: bool
    committed: bool = False
    may_expire: bool = False
    failures_before: int = 0
    rejected: set[str] = field(default_factory=set)
    again: Counter[str] = field(default_factory=Counter)
    discarded: set[str] = field(default_factory=set)

    @property
    def body(self) -> str:
        """What it says."""
        return f"{self.name} poison" if self.poison else self.name


@dataclass(eq=False)
class Held:
    """A receiver in the middle of its work."""

    stack: ExitStack
    delivery: Delivery[Any]
    subscription: str
    stopping: Event = field(default_factory=Event)


class Receiving(RuleBasedStateMachine):
    """One inbox and its receivers."""

    def __init__(self, mom: Place) -> None:
        super().__init__()
        self.mom = mom
        self.put: dict[str, Put] = {}
        self.numbers: Counter[str] = Counter()
        self.late: list[tuple[psycopg.Connection[Any], list[Put]]] = []
        self.held: list[Held] = []
        self.failures = 0
        """Deliveries that did not come to their end."""
        self.put_back: dict[tuple[str, str], tuple[int, int]] = {}
        """For a message that was put back by a stop: its attempt, and `failures` at that time."""
        self.policy = POLICY
        Site.empty(mom)
        mom.person.execute("TRUNCATE effect")
        services.create_service(mom.person, SERVICE)
        services.create_subscription(mom.person, COPY, service=SERVICE)

    @classmethod
    def on(cls, site: Site) -> Callable[[], Self]:
        """Makes machines; their database is made once."""
        mom = site.create("inbox")
        mom.person.execute(TABLES)
        return lambda: cls(mom)

    @initialize(block=st.booleans())
    def agree(self, block: bool) -> None:
        """Whether a dead letter holds its key up until a person has decided."""
        self.policy = replace(POLICY, block=block)

    # What arrives

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6),
        kind=st.sampled_from(("plain", "plain", "plain", "poison", "delayed", "mortal")),
        late=st.sampled_from((False, False, True)),
    )
    def arrive(self, keys: list[str], kind: str, late: bool) -> None:
        """A forwarder stores messages in one transaction, that may commit later than others."""
        connection = self.mom.database.connect()
        mine: list[Put] = []
        held = {one.key for _, some in self.late for one in some}
        for key in keys:
            if key in held:
                continue
            self.numbers[key] += 1
            one = Put(
                name=f"{key}/{self.numbers[key]}",
                key=key,
                number=self.numbers[key],
                poison=kind == "poison" and not mine,
                delayed=kind == "delayed" and not mine,
                mortal=kind == "mortal",
            )
            self.put[one.name] = one
            connection.execute(
                PUT,
                {
                    "name": one.name,
                    "key": key,
                    "body": one.body.encode(),
                    "delayed": one.delayed,
                    "mortal": one.mortal,
                },
            )
            mine.append(one)
        self.late.append((connection, mine))
        if not late or len(self.late) > 2:
            self._decide(len(self.late) - 1, True)

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 2), commit=st.sampled_from((True, True, False)))
    def decide(self, which: int, commit: bool) -> None:
        """Such a transaction ends."""
        self._decide(which % len(self.late), commit)

    def _decide(self, which: int, commit: bool) -> None:
        connection, mine = self.late.pop(which)
        connection.commit() if commit else connection.rollback()
        connection.close()
        for one in mine:
            one.committed = commit
            one.failures_before = self.failures

    # Receivers

    @contextmanager
    def engine(self) -> Iterator[psycopg.Connection[Any]]:
        """Where to receive; chance is the same each time."""
        with self.mom.database.connect(autocommit=True) as connection:
            connection.execute("SELECT setseed(0.5)")
            yield connection

    def enter(self, subscription: str, many: int) -> Held:
        """Take messages in hand."""
        stack = ExitStack()
        delivery = stack.enter_context(
            saf.receive(self.engine, subscription, max_messages=many, policy=self.policy)
        )
        held = Held(stack, delivery, subscription)
        delivery.until(held.stopping)
        for message in delivery:
            attempt, failures = self.put_back.pop((subscription, name_of(message)), (0, -1))
            assert failures != self.failures or message.attempt == attempt, (
                f"put back by a stop, which is no attempt: {name_of(message)}, {message.attempt}"
            )
        return held

    def handle(self, held: Held, how: str, nth: int) -> None:
        """Let each take effect, and fail at the nth in some way; poison fails by itself.

        Raises:
            HandlerFailed
        """
        for place, message in enumerate(held.delivery):
            name = name_of(message)
            if "poison" in message.text() or (place == nth and how == "raise"):
                raise HandlerFailed
            if place == nth and how == "park":
                held.delivery.park(message, "not now")
            elif place == nth and how == "reject":
                held.delivery.reject(message, "never")
            else:
                held.delivery.connection.execute(
                    "INSERT INTO effect (subscription, name) VALUES (%s, %s)",
                    [held.subscription, name],
                )
            if place == nth and how == "kill":
                pid = held.delivery.connection.info.backend_pid
                self.mom.person.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            if place == nth and how == "stop":
                held.stopping.set()

    def finish(self, held: Held, how: str, nth: int) -> None:
        """Handle what is in hand, and end as it comes."""
        self.failures += how not in ("fine", "stop")
        rejected = [name_of(one) for one in held.delivery][nth : nth + 1]
        try:
            with held.stack:
                self.handle(held, how, nth)
        except HandlerFailed:
            self.failures += 1
        except psycopg.OperationalError:
            assert how == "kill"
        else:
            if how == "reject":
                for name in rejected:
                    self.put[name].rejected.add(held.subscription)

    @rule(
        subscription=st.sampled_from(SUBSCRIPTIONS),
        many=st.sampled_from((1, 3, 100)),
        how=st.sampled_from(HOWS),
        nth=st.integers(0, 3),
    )
    def receive(self, subscription: str, many: int, how: str, nth: int) -> None:
        """A delivery."""
        self.finish(self.enter(subscription, many), how, nth)

    @rule(
        subscription=st.sampled_from(SUBSCRIPTIONS),
        many=st.sampled_from((3, 100)),
        nth=st.integers(0, 3),
    )
    def stop(self, subscription: str, many: int, nth: int) -> None:
        """A receiver is told to stop: what it was given has its effect, the rest is put back."""
        held = self.enter(subscription, many)
        messages = list(held.delivery)
        before, failures = len(self.of(EFFECTS, subscription)), self.failures
        self.finish(held, "stop", nth)
        had = [name for _, name in self.of(EFFECTS, subscription)][before:]
        if self.failures == failures:
            assert had == [name_of(one) for one in messages[: nth + 1]], f"after a stop: {had}"
            for one in messages[nth + 1 :]:
                self.put_back[subscription, name_of(one)] = one.attempt, self.failures

    @rule(
        subscription=st.sampled_from(SUBSCRIPTIONS),
        many=st.sampled_from((1, 3, 100)),
        point=st.sampled_from(POINTS),
    )
    def die(self, subscription: str, many: int, point: str) -> None:
        """A receiver dies at some point."""
        self.failures += 1
        with suppress(Died), at(point, 1, die):
            self.finish(self.enter(subscription, many), "fine", 0)

    @precondition(lambda self: len(self.held) < 2)
    @rule(subscription=st.sampled_from(SUBSCRIPTIONS), many=st.sampled_from((1, 3)))
    def hold(self, subscription: str, many: int) -> None:
        """A receiver takes its time, and others receive meanwhile."""
        self.held.append(self.enter(subscription, many))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1), how=st.sampled_from(HOWS), nth=st.integers(0, 2))
    def end(self, which: int, how: str, nth: int) -> None:
        """It comes to its end, or not."""
        self.finish(self.held.pop(which % len(self.held)), how, nth)

    # Time, people and the world around

    @rule()
    def let_time_pass(self) -> None:
        """Two hours."""
        clock.let_time_pass(self.mom.dsn, SOON)
        for one in self.put.values():
            one.may_expire |= one.mortal and one.committed

    @rule(subscription=st.sampled_from(SUBSCRIPTIONS))
    def retry_dead(self, subscription: str) -> None:
        """``saf dead retry`` of one subscription's."""
        ids = self._dead_ids(subscription)
        for _, name, _ in self.of(DEAD, subscription):
            self.put[name].again[subscription] += 1
            self.put[name].failures_before = self.failures
        decide.retry(self.mom.person, DeadLetters(numbers=ids), "a test")

    @rule(subscription=st.sampled_from(SUBSCRIPTIONS))
    def discard_dead(self, subscription: str) -> None:
        """``saf dead discard`` of one subscription's."""
        ids = self._dead_ids(subscription)
        for _, name, _ in self.of(DEAD, subscription):
            self.put[name].discarded.add(subscription)
        decide.discard(self.mom.person, DeadLetters(numbers=ids), "a test")

    @rule()
    def purge(self) -> None:
        """What all have received may go."""
        self.mom.person.execute(NEXT_SLOT)
        purge_broker(
            self.mom.person,
            retention_seconds=0,
            rotate_after_seconds=10**9,
            lock_timeout_seconds=0.001,
        )

    # What must be

    def of(self, query: str, subscription: str) -> list[tuple[Any, ...]]:
        """Rows of one subscription."""
        return [row for row in self.mom.person.execute(query).fetchall() if row[0] == subscription]

    def _dead_ids(self, subscription: str) -> list[int]:
        query = (
            "SELECT s.name, dead_letter_id FROM saf.dead_letter "
            "JOIN saf.subscription s USING (subscription_id)"
        )
        return [number for _, number in self.of(query, subscription)]

    @invariant()
    def nothing_is_wrong(self) -> None:
        """As far as one can say in the middle of it."""
        inbox = {name for (name,) in self.mom.person.execute(INBOX).fetchall()}
        wrong = [found for one in SUBSCRIPTIONS for found in self.wrong(one, inbox)]
        assert not wrong, "; ".join(wrong)

    def wrong(self, subscription: str, inbox: set[str]) -> Iterator[str]:
        """What is, for one subscription."""
        effects = [name for _, name in self.of(EFFECTS, subscription)]
        letters = [(name, reason) for _, name, reason in self.of(DEAD, subscription)]
        parked = [name for _, name in self.of(PARKED, subscription)]
        letter_of = Counter(name for name, _ in letters)
        for name, times in (Counter(effects) + letter_of + Counter(parked)).items():
            if times > 1:
                yield f"{subscription}: more than once: {name}"
            if not self.put[name].committed:
                yield f"{subscription}: unexpected: {name}"
        for name, reason in letters:
            one = self.put[name]
            tried = self.failures - one.failures_before >= MOST_ATTEMPTS - 2
            failed = one.poison or subscription in one.rejected or tried
            if not {"failed": failed, "expired": one.may_expire}.get(reason):
                yield f"{subscription}: dead wrongly: {name}, {reason}"
        by_key: dict[str, list[int]] = defaultdict(list)
        for name in effects:
            one = self.put[name]
            if not one.delayed and not one.again[subscription]:
                by_key[one.key].append(one.number)
        for key, numbers in by_key.items():
            if any(later < earlier for earlier, later in pairwise(numbers)):
                yield f"{subscription}: out of order: {key}: {numbers}"
        somewhere = {*effects, *letter_of, *parked} | inbox
        for one in self.put.values():
            if one.committed and not one.discarded and one.name not in somewhere:
                yield f"{subscription}: nowhere: {one.name}"

    def come_to_rest(self) -> None:
        """All that is due is received by receivers that do not fail, and people decide."""
        while self.late:
            self._decide(0, True)
        while self.held:
            self.finish(self.held.pop(), "fine", 0)
        still = 0
        for _ in range(MOST_ROUNDS):
            moved = 0
            for subscription in SUBSCRIPTIONS:
                held = self.enter(subscription, 5)
                moved += len(held.delivery)
                self.finish(held, "fine", 0)
            if moved:
                still = 0
                continue
            still += 1
            if still == 2:
                return
            if self.policy.block:
                for subscription in SUBSCRIPTIONS:
                    self.discard_dead(subscription)
            self.let_time_pass()
        raise AssertionError("it does not come to rest")

    def wrong_in_the_end(self, subscription: str) -> Iterator[str]:
        """Each has one end."""
        effects = {name for _, name in self.of(EFFECTS, subscription)}
        letters = {name for _, name, _ in self.of(DEAD, subscription)}
        for one in self.put.values():
            gone = subscription in one.discarded
            ends = (one.name in effects) + (one.name in letters) + gone
            if one.committed and not ends:
                yield f"{subscription}: lost: {one.name}"
            if ends > 1 and not one.again[subscription]:
                yield f"{subscription}: more than one end: {one.name}"

    def teardown(self) -> None:
        """Each message has an end that it may have."""
        try:
            if sys.exc_info()[0] is None:
                self.come_to_rest()
                self.nothing_is_wrong()
                wrong = [found for one in SUBSCRIPTIONS for found in self.wrong_in_the_end(one)]
                assert not wrong, "in the end: " + "; ".join(wrong)
        finally:
            for held in self.held:
                with suppress(HandlerFailed, psycopg.Error), held.stack:
                    raise HandlerFailed
            for connection, _ in self.late:
                connection.close()
