"""Parked lanes: the lanes of one task's shards, and the parked messages in them.

`HeldLanes` are the lanes that the task knows (see `saf.setaside.lane`). New messages that belong in
a held lane park behind its older messages.

`ParkedLanes` takes messages out of their lanes, wherever they go next. It reads them lane by lane,
in order and in chunks, and runs a step for each chunk. Settled messages leave their lane in a
transaction that only the owner of the shards can commit. Until then the lanes are in hand
(`saf.setaside.in_hand`), so that no operator decides about a message that is on its way.

A message for which the step raises even when alone becomes a dead letter. Where messages go is not
decided here: the steps are those of `saf.engine.finding_routes` and `saf.engine.releasing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.brake import Brake
from saf.engine.chunks import chunks
from saf.engine.destination_sessions import DestinationSessions
from saf.engine.set_aside import SetAside
from saf.engine.source import read
from saf.engine.source_session import SourceSession
from saf.engine.work import ForwardingRules, Receipts, Work
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.log.cursor import Batch, lock_cursors
from saf.setaside import backoff, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Kind, Lane, found_lane, service_lane
from saf.setaside.lane_columns import LANE, given_of, lanes_of, route_lanes


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

    def open(self, lane: Lane) -> None:
        """Note that the lane has nothing of these shards, unless the batch has put it there."""
        if lane in self.ahead:
            return
        if Lane(destination=lane.destination, kind=Kind.REPLAY) not in self.held:
            self.held.pop(lane, None)

    def look(self, source_session: SourceSession, batch: Batch, *messages: pa.Table) -> None:
        """Find the lanes of some messages' services; afterwards no other service's lane is held."""
        if self.of_services:
            older = {lane for rows in messages for lane in _older(rows)}
            found = source_session.find(
                lambda source: backoff.held(source, batch.subscription_id, batch.shards, older)
            )
            others = {lane: why for lane, why in self.held.items() if not lane.of_service}
            self.held = others | found

    def services(self, destination: str) -> frozenset[str]:
        """Return the services whose messages wait for the destination to know them."""
        lanes = [lane for lane in self.held if lane.destination == destination]
        return frozenset(lane.subject for lane in lanes if lane.kind == Kind.SERVICE)


def _older(rows: pa.Table) -> set[Lane]:
    """Return all lanes where older messages for the same services may wait, at any destination."""
    routes, _ = lanes_of(route_lanes(rows))
    found = (found_lane("", lane) for lane in routes)
    return {*routes, *found, *(service_lane("", lane.subject) for lane in routes)}


@dataclass(kw_only=True)
class ParkedLanes:
    """The lanes that hold messages of one task's shards."""

    work: Work
    rules: ForwardingRules
    source_session: SourceSession
    lanes: HeldLanes
    receipts: Receipts
    destinations: DestinationSessions
    brake: Brake
    _until: float = field(init=False, default=0.0)

    def begin(self, seconds: float) -> None:
        """Begin a turn of ``seconds``."""
        self._until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the turn is over: no further chunk is begun."""
        return time.monotonic() > self._until

    def hold(self, lanes: Collection[Lane], why: str) -> None:
        """Park new messages behind these lanes. Lanes of services are looked up instead."""
        for lane in lanes:
            if not lane.of_service:
                self.lanes.hold(lane, why)

    def read(
        self,
        destination: str,
        lanes: Collection[Lane],
        columns: Sequence[str | sql.Composable],
        *,
        found: bool,
    ) -> Iterator[pa.Table]:
        """Read the lanes' messages of these shards in chunks, each lane in order."""
        if lanes:
            query = parking.in_lanes(self.work.batch, destination, lanes, columns, found=found)
            yield from chunks(read(self.work, query), self.rules.chunk_rows, self.rules.chunk_bytes)

    def isolate(self, destination: str, rows: pa.Table, step: Callable[[pa.Table], None]) -> None:
        """Run a step for messages of lanes; a message that fails alone becomes a dead letter.

        The lanes are in hand. If they were not for a while, messages that are gone are left out.
        """
        numbers, lanes = rows["parked_id"], rows.select(LANE)
        gone: set[int] = set()
        """Messages that an earlier attempt has committed durably: they have left this lane."""

        def undo() -> None:
            ids = numbers.to_pylist()
            here = self.source_session(
                lambda source: parking.still(source, destination, given_of(lanes), ids)
            )
            gone.update(number for number in ids if number not in here)

        def remaining(part: pa.Table) -> pa.Table:
            if not gone:
                return part
            out = pc.is_in(part["parked_id"], pa.array(list(gone), pa.int64()))
            return part.filter(pc.invert(out))

        def bury(message: pa.Table, error: str) -> None:
            if message["parked_id"][0].as_py() not in gone:
                set_aside = self.aside(destination)
                set_aside.bury_as_stored(message, error)
                self.settle(message, set_aside)

        def make(part: pa.Table) -> None:
            left = remaining(part)
            if left.num_rows:
                step(left)

        if self.source_session.let_slip():
            undo()
        isolate(rows, make, bury, undo)

    def aside(self, destination: str = "") -> SetAside:
        """Return an empty `SetAside` for messages of a chunk of lanes."""
        return SetAside(
            work=self.work,
            from_lanes=True,
            destination=destination,
            max_bytes=self.rules.max_bytes,
        )

    def settle(self, rows: pa.Table, set_aside: SetAside) -> None:
        """Take messages out of their lane, unless they stay there."""

        def settle(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.work.batch)
            gone = set_aside.write_from_lanes(source, rows["parked_id"].to_pylist())
            set_aside.count_left_out(source, among=gone)
            self.destinations.acknowledge(source)
            self.brake.write(source)
            fail_point("unpark")

        self.source_session(settle)
        self.destinations.settled()
        self.brake.written()
        set_aside.written()
        self.receipts.of(None).dead += set_aside.dead_letters
        fail_point("unpark_commit")

    def postpone(self, failed: Mapping[Lane, SafError]) -> None:
        """Note that attempts at lanes have failed, and park new messages behind these lanes."""
        if failed:
            subscription_id = self.work.batch.subscription_id
            for lane, error in failed.items():
                self.hold([lane], str(error))
            self.source_session(lambda source: backoff.postpone(source, subscription_id, failed))

    def succeed(self, lanes: Collection[Lane]) -> None:
        """Note that the tried messages of lanes are gone, so their backoff starts again."""
        if lanes:
            subscription_id = self.work.batch.subscription_id
            self.source_session(lambda source: backoff.succeeded(source, subscription_id, lanes))
