"""The context of a task: what its steps share, and what they learn from each other.

`HeldLanes` are the lanes that the task knows (see `saf.setaside.lane`). New messages that belong in
a held lane park behind its older messages.

`Brake` stops sending to a destination that rejects one message after the other. A destination that
rejects everything is more likely to be at fault than every message. Each rejection makes a dead
letter, so without a brake the whole backlog would become dead letters. After ``most`` rejections in
a row, with nothing stored in between, the destination's messages wait until an operator tries it
again: `saf parked retry-now`. Rejections in a row are counted per source and destination. The
source keeps the count (saf.rejecting), so the count continues in the next run; tasks that run side
by side count separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import psycopg
import pyarrow as pa

from saf.engine.destination_sessions import DestinationSessions
from saf.engine.resolving import Answers, Matcher, Resolver
from saf.engine.source_session import SourceSession
from saf.engine.transforming import Transforming
from saf.engine.work import ForwardingRules, Receipts, Work
from saf.errors import Braked, Paused, Rejected, SafError
from saf.log import rates
from saf.log.cursor import told_to_stop
from saf.log.rates import per_second
from saf.setaside import backoff
from saf.setaside.lane import Kind, Lane, found_lane, service_lane
from saf.setaside.lane_columns import lanes_of, route_lanes

ASK_SECONDS = 0.5
"""Interval in seconds at which a task checks whether to stop, between pieces of a part, and whether
a destination is paused, between parts."""

SPEND_SECONDS = 1.0
"""Time that a task spends on a destination with a rate, or waits for a seat of a destination, in
seconds, if there are others."""

SEAT_SECONDS = 0.02
"""Interval at which a task without a seat tries to take one."""

NO_PERMITS = "its rate is used up"
NO_SEAT = "other tasks store there, as many as its concurrency allows"
"""Why messages wait for a destination with a limit."""

COUNT = """
INSERT INTO saf.rejecting (subscription_id, destination, messages)
VALUES (%(subscription_id)s, %(destination)s, %(messages)s)
ON CONFLICT (subscription_id, destination) DO UPDATE SET messages = excluded.messages
"""
FORGET = """
DELETE FROM saf.rejecting
WHERE subscription_id = %(subscription_id)s AND destination = %(destination)s
"""


class Context:
    """One task's item of work, its connections, and its progress."""

    def __init__(
        self,
        number: int,
        work: Work,
        rules: ForwardingRules,
        answers: Answers | None = None,
        transforming: Transforming | None = None,
    ) -> None:
        self.work = work
        self.rules = rules
        self.source = SourceSession(work, rules.attempts)
        self.destinations = DestinationSessions(work, rules, self.source)
        self.matcher = Matcher(work.routes)
        self.transforming = transforming or Transforming.of(work, rules)
        self.resolver = Resolver(
            work.routes.routers,
            self.matcher,
            self.source,
            answers,
            transforms={
                transform: self.transforming.problems.get(transform)
                for transform in rules.transforms
            },
        )
        self.receipts = Receipts(number)
        self.lanes = HeldLanes(of_services=work.of_services)
        self.brake = Brake(work, rules.max_rejected)
        self.to_repair: SafError | None = None
        """Error of a destination where nothing can be stored until an operator has repaired it."""
        self.stopping = False
        """Whether a request to stop was seen between pieces of a part."""
        self._asked = monotonic()
        self._pauses: dict[str, str | None] = {
            lane.destination: lane.error for lane in work.waiting if lane.paused
        }
        """By destination, who has paused it, and why; None if it is not paused."""
        self.used_up: dict[str, str] = {}
        """Destinations with a limit that get nothing more in this task, each with the reason."""
        self._waited = defaultdict[str, float](float)
        """By destination, the seconds that the task has waited for a seat."""
        self._spent = defaultdict[str, float](float)
        self._began = monotonic()
        self._permits = defaultdict[str, int](int)
        self._asked_pause = defaultdict[str, float](monotonic)

    def paused(self, destination: str) -> Paused | None:
        """Return the error of a paused destination; asks the source now and then."""
        if monotonic() - self._asked_pause[destination] >= ASK_SECONDS:
            subscription_id = self.work.batch.subscription_id
            self._pauses[destination] = self.source.find(
                lambda source: backoff.paused(source, subscription_id, destination)
            )
            self._asked_pause[destination] = monotonic()
        pause = self._pauses.get(destination)
        return None if pause is None else Paused(destination, pause)

    def permits(self, destination: str, messages: int, *, patient: bool) -> int:
        """Return how many messages, of ``messages``, a destination with a rate may get now.

        Wait for permits. Unless ``patient``, a task spends at most `SPEND_SECONDS` on the
        destination, because messages for others would wait, too. Then, in a pause, and after a
        request to stop, return 0: the destination gets nothing more in this task.
        """
        rate = per_second(self.rules.destinations[destination].rate or "")
        subscription_id = self.work.batch.subscription_id
        while not self._permits[destination] and destination not in self.used_up:
            share = self.source(
                lambda source: rates.take(source, subscription_id, rate, messages, destination)
            )
            spent = self._spent[destination] + monotonic() - self._began
            too_long = not patient and spent + share.wait_seconds > SPEND_SECONDS
            if not too_long and self._slept(share.wait_seconds) and not self.paused(destination):
                self._permits[destination] = share.permits
                continue
            self.used_up[destination] = NO_PERMITS
            if permits := share.permits:
                self.source(
                    lambda source: rates.give_back(
                        source, subscription_id, rate, permits, destination
                    )
                )
        return min(messages, self._permits[destination])

    def has_seat(self, destination: str, *, patient: bool, must: bool) -> bool:
        """Return whether the task may store at a destination with a concurrency now.

        Wait for a seat, which the task has until it ends `storing`. Unless ``patient``, a task
        waits at most `SPEND_SECONDS` for a destination, because messages for others would wait,
        too. Then, in a pause, and after a request to stop, return False: the destination gets
        nothing more in this task. With ``must``, wait until a seat is free.
        """
        concurrency = self.rules.destinations[destination].concurrency
        if concurrency is None:
            return True
        while must or destination not in self.used_up:
            if self.source.has_seat(destination, concurrency):
                return True
            began = monotonic()
            if must:
                sleep(SEAT_SECONDS)
                continue
            too_long = not patient and self._waited[destination] >= SPEND_SECONDS
            if too_long or not self._slept(SEAT_SECONDS) or self.paused(destination):
                self.used_up[destination] = NO_SEAT
            self._waited[destination] += monotonic() - began
        return False

    @contextmanager
    def storing(self, destination: str) -> Iterator[None]:
        """Store messages at a destination in this block; its time counts.

        The task's seat is free afterwards.
        """
        self._began = monotonic()
        try:
            yield
        finally:
            self.source.free_seat()
            self._spent[destination] += monotonic() - self._began

    def use(self, destination: str, messages: int) -> None:
        """Note that messages are about to be stored at a destination with a rate."""
        self._permits[destination] = max(0, self._permits[destination] - messages)

    def _slept(self, seconds: float) -> bool:
        """Sleep; return False after a request to stop."""
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0 and not self.told_to_stop():
            sleep(min(left, ASK_SECONDS))
        return not self.stopping

    def told_to_stop(self) -> bool:
        """Whether the task was told to stop; asks the source now and then."""
        if not self.stopping and monotonic() - self._asked >= ASK_SECONDS:
            self.stopping = self.source.find(lambda source: told_to_stop(source, self.work.batch))
            self._asked = monotonic()
        return self.stopping

    def find_held(self, *messages: pa.Table) -> None:
        """Find the lanes of some messages' services; afterwards no other service's lane is held."""
        if self.lanes.of_services:
            older = {lane for rows in messages for lane in _older(rows)}
            held = {lane: why for lane, why in self.lanes.held.items() if not lane.of_service}
            self.lanes.held = held | self.held_among(older)

    def held_among(self, lanes: Collection[Lane]) -> dict[Lane, str]:
        """Return those lanes that have messages of these shards, each with the reason."""
        if not lanes:
            return {}
        batch = self.work.batch
        return self.source.find(
            lambda source: backoff.held(source, batch.subscription_id, batch.shards, lanes)
        )

    def write(self, source: psycopg.Connection[Any]) -> None:
        """Write what destinations answered, in the transaction that moves past their messages."""
        self.destinations.acknowledge(source)
        self.brake.write(source)

    def written(self) -> None:
        """Note that the changes are committed."""
        self.destinations.settled()
        self.brake.written()


@dataclass
class HeldLanes:
    """Lanes that new messages park in, and due lanes that had nothing to try.

    A task knows from the start which lanes a destination has. The number of services' lanes has no
    bound, so a task looks up those of each chunk's services.
    """

    held: dict[Lane, str] = field(default_factory=dict)
    """The lanes that new messages must park in, each with the reason."""
    ahead: set[Lane] = field(default_factory=set)
    """Lanes with messages that the batch itself set aside before a crash. They stay held until the
    position has passed these messages, because later messages of the batch must stay behind
    them."""
    untried: set[Lane] = field(default_factory=set)
    """Lanes that are due, but contained nothing of these shards to try."""
    of_services: bool = False
    """Whether lanes of services may exist."""

    def hold(self, lane: Lane, why: str) -> None:
        """Park new messages behind this lane; behind a replay, all for its destination."""
        self.held[lane] = why
        self.of_services |= lane.of_service
        if lane.kind == Kind.REPLAY:
            self.held[Lane(destination=lane.destination)] = why

    def emptied(self, lane: Lane) -> None:
        """Note that the lane has nothing of these shards, unless the batch has put it there."""
        if lane in self.ahead:
            return
        if Lane(destination=lane.destination, kind=Kind.REPLAY) not in self.held:
            self.held.pop(lane, None)

    def services(self, destination: str) -> frozenset[str]:
        """Return the services whose messages wait for the destination to know them."""
        lanes = [lane for lane in self.held if lane.destination == destination]
        return frozenset(lane.subject for lane in lanes if lane.kind == Kind.SERVICE)


def _older(rows: pa.Table) -> set[Lane]:
    """Return all lanes where older messages for the same services may wait, at any destination."""
    routes, _ = lanes_of(route_lanes(rows))
    found = (found_lane("", lane) for lane in routes)
    return {*routes, *found, *(service_lane("", lane.subject) for lane in routes)}


@dataclass
class Brake:
    """Rejections in a row, for each destination of one task."""

    work: Work
    most: int
    _reasons: dict[str, str] = field(default_factory=dict)
    """The last reason of each destination that has rejected a message."""
    _written: dict[str, int] = field(init=False)
    _in_a_row: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._in_a_row = dict(self.work.rejecting)
        self._written = dict(self.work.rejecting)

    def stored(self, destination: str) -> None:
        """Note that a destination has stored a message."""
        self._in_a_row.pop(destination, None)

    def rejected(self, destination: str, error: Rejected) -> None:
        """Note that a destination has rejected a message."""
        self._in_a_row[destination] = self._in_a_row.get(destination, 0) + 1
        self._reasons[destination] = error.reason

    def engaged(self, destination: str) -> Braked | None:
        """Return the error that stops sending to a destination; None if it is not braked."""
        messages = self._in_a_row.get(destination, 0)
        if messages < self.most or destination not in self._reasons:
            return None
        return Braked(destination, messages, self._reasons[destination])

    def counts(self) -> Mapping[str, int]:
        """Return the rejections in a row by destination, for the next cycle.

        The count starts again when an operator has lifted the brake.
        """
        return {
            name: messages
            for name, messages in self._in_a_row.items()
            if self.engaged(name) is None
        }

    def write(self, source: psycopg.Connection[Any]) -> None:
        """Write the changed counts, in the transaction that sets the messages aside."""
        counts = self.counts()
        for name in {*counts, *self._written}:
            if counts.get(name, 0) != self._written.get(name, 0):
                params = {
                    "subscription_id": self.work.batch.subscription_id,
                    "destination": name,
                    "messages": counts.get(name, 0),
                }
                source.execute(COUNT if params["messages"] else FORGET, params)

    def written(self) -> None:
        """Note that the written counts are committed."""
        self._written = dict(self.counts())
