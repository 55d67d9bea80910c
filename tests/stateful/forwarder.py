"""A forwarder process, driven step by step, that may die or pause at any of them.

It is the forwarder's cycle without Spark of `saf.testing.cycle`, taken apart further: its tasks run
one by one, so that those of two forwarders interleave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from saf.database import Dsn
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine.context import Context
from saf.engine.source import messages
from saf.engine.source_session import SourceSession
from saf.engine.task import Task
from saf.engine.work import Receipt
from saf.errors import Fenced, SafError, Unavailable
from saf.failpoints import arm
from saf.log.shards import Member
from saf.testing.cycle import Cycle, forwarding_rules

EXPECTED = (None, Fenced.__name__, Unavailable.__name__)
"""How a task may end where nothing was set back."""

AN_HOUR = 3600
"""Leases and waits are over when a test says so, and not because the machine is slow."""

NOWHERE = Dsn("host=/nonexistent dbname=nowhere")
CHUNK_ROWS = 2
"""So that a few messages are several chunks, and there is something between them."""

OUTSIDE = ("mom_commit", "mark_commit", "set_aside", "unpark_commit", "chosen")
"""Fail points at which the process is in no transaction."""
INSIDE = ("mom_insert", "mark_forwarded", "routed", "unpark")
"""Those at which one is open, which is rolled back when the process dies."""
BEFORE = {"before_store": (PostgresInbox, "store"), "before_write": (SourceSession, "__call__")}
"""Places where the process is about to do something, and may be late."""
UNHEARD = "answer_lost"
"""What is written at the source is written, and the process does not learn it."""
POINTS = (*OUTSIDE, *INSIDE, *BEFORE, UNHEARD)
PAUSES = (*OUTSIDE, *BEFORE)

GONE = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
LEASE_OVER = """
UPDATE saf.member SET lease_until = clock_timestamp() - interval '1 second' WHERE member_id = %s
"""


class Died(BaseException):
    """The process dies here; whatever would catch an Exception does not."""


class Unexpected(AssertionError):
    """A forwarder has ended with an error that nothing in the test accounts for."""


class Forwarder:
    """One process.

    Attributes:
        left: numbers of the tasks that have not run in its cycle.
        busy: it has a cycle in hand.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, app: Dsn, stores: Mapping[str, Dsn], refusals: list[SafError | str] | None = None
    ) -> None:
        self.app = app
        self.stores = dict(stores)
        rules = forwarding_rules("exactly_once", CHUNK_ROWS, **stores)
        self.cycle = Cycle(app, rules, lease_seconds=AN_HOUR)
        self.cycle.default = None
        self.left: list[int] = []
        self.receipts: list[Receipt] = []
        self.busy = False
        self.refusals = refusals
        """Where it notes what it refuses to do; None if it has no reason to."""

    def open(self, tasks: int = 2, down: frozenset[str] = frozenset()) -> None:
        """Take what is pending in hand."""
        if self.busy:
            return
        there = {name: NOWHERE if name in down else dsn for name, dsn in self.stores.items()}
        self.cycle.rules = forwarding_rules("exactly_once", CHUNK_ROWS, **there)
        # as if it were time to renew the lease and to look at the fair share
        self.cycle.broker._renewed = 0.0
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("saf.forwarding.broker.Member", self._member)
                self.cycle.open(tasks)
        except SafError as error:
            if self.refusals is None:
                raise
            self.refusals.append(error)
            self.cycle.broker.forget_connection()
            self.cycle.work = []
        self.cycle.work = [replace(work, keep=True) for work in self.cycle.work]
        self.left = [*range(len(self.cycle.work))]
        self.receipts = []
        self.busy = bool(self.left)

    def _member(self, **more: Any) -> Member:
        # by their ids members share out shards, so that has to be the same each time
        return Member(**more, member_id=UUID(int=next(self._numbers)))

    @classmethod
    def begin_anew(cls) -> None:
        """The same steps are to come to the same."""
        cls._numbers = itertools.count(1)

    def deliver(self, which: int = 0) -> list[Receipt]:
        """Run one of the tasks that are left."""
        if not self.left:
            return []
        number = self.left.pop(which % len(self.left))
        work = self.cycle.work[number]
        rules = self.cycle.rules
        with closing(messages(work, rules.max_bytes)) as rows:
            receipts = Task(Context(number, work, rules)).run(rows)
        self.receipts += receipts
        for receipt in receipts:
            if receipt.error_kind not in EXPECTED:
                refusal = f"{receipt.error_kind}: {receipt.error}"
                if self.refusals is None:
                    raise Unexpected(refusal)
                self.refusals.append(refusal)
        return receipts

    def deliver_all(self) -> list[Receipt]:
        """Run the tasks that are left."""
        return [receipt for _ in [*self.left] for receipt in self.deliver()]

    def close(self) -> None:
        """End the cycle: what is complete is closed, what is not stays open."""
        if not self.busy:
            return
        self.busy, self.left = False, []
        try:
            self.cycle.close(self.receipts)
        except Fenced:
            return  # another one has its shards

    def run(self, down: frozenset[str] = frozenset()) -> list[Receipt]:
        """A whole cycle, or the rest of the one in hand."""
        self.open(down=down)
        receipts = self.deliver_all()
        self.close()
        return receipts

    def leave(self) -> None:
        """End as one is asked to."""
        self.cycle.broker.leave()
        self.busy, self.left = False, []

    def die(self) -> None:
        """End like one that is killed: its session ends, its rows stay."""
        self.busy, self.left = False, []
        connection = self.cycle.broker._connection
        if connection is None or connection.closed:
            return
        pid = connection.info.backend_pid
        self.cycle.broker.forget_connection()
        with self.app.connect(role="test", autocommit=True) as watch:
            while watch.execute(GONE, [pid]).fetchone() != (True,):
                pass  # a server process ends in a millisecond

    def outlive_its_lease(self) -> None:
        """As if it had been stopped for so long; it goes on later, and does not know."""
        member = self.cycle.broker._member
        if member is not None:
            with self.app.connect(role="test", autocommit=True) as connection:
                connection.execute(LEASE_OVER, [member.member_id])


@contextmanager
def at(point: str, times: int, action: Callable[[], None]) -> Iterator[None]:
    """Do something, once, when the code comes to a point for the so-manieth time."""
    if point in BEFORE or point == UNHEARD:
        with pytest.MonkeyPatch.context() as patch:
            (_late if point in BEFORE else _unheard)(patch, point, times, action)
            yield
        return
    arm(f"{point}:{times}", action)
    try:
        yield
    finally:
        arm("")


def die() -> None:
    """What a process does that is killed."""
    raise Died


def _late(patch: pytest.MonkeyPatch, point: str, times: int, action: Callable[[], None]) -> None:
    owner, name = BEFORE[point]
    whole = getattr(owner, name)
    left = [times]

    def late(self: Any, *arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            action()
        return whole(self, *arguments, **more)

    patch.setattr(owner, name, late)


def _unheard(patch: pytest.MonkeyPatch, _: str, times: int, __: Callable[[], None]) -> None:
    """The answer to a commit gets lost, so the same is written once more."""
    whole = SourceSession.__call__
    left = [times]

    def twice(self: SourceSession, write: Callable[[psycopg.Connection[Any]], Any]) -> Any:
        left[0] -= 1
        if left[0] == 0:
            whole(self, write)
        return whole(self, write)

    patch.setattr(SourceSession, "__call__", twice)
