"""Parked lanes: the parked messages of one task's shards.

`ParkedLanes` takes messages out of their lanes, wherever they go next. It reads them lane by lane,
in order and in chunks, and runs a step for each chunk. Settled messages leave their lane in a
transaction that only the owner of the shards can commit. Until then the lanes are in hand
(`saf.setaside.in_hand`), so that no operator decides about a message that is on its way. A message
for which the step raises even when alone becomes a dead letter.

`FindingRoutes` moves messages that wait for a route, or for their router, once a route exists. They
move to lanes of the destinations that routes lead to; a topic's message moves as one copy per
destination. Each chunk is one transaction, and the messages keep their place in the order. From
then on each copy waits for its destination alone. Nothing is sent here: see
`saf.engine.releasing`.

A message without a way out stays in its lane, and new messages wait behind it. A message that its
router cannot resolve, or for which a transform fails, becomes a dead letter. If the turn ends
early, the rest keeps its place, and the next turn continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.context import Context
from saf.engine.parts import inputs_of, share
from saf.engine.set_aside import SetAside
from saf.engine.source import chunks, read
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import lock_cursors
from saf.setaside import backoff, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Kind, Lane
from saf.setaside.lane_columns import (
    KIND,
    LANE,
    either,
    found_lanes,
    given_of,
    in_lanes,
    lane_of,
    lanes_of,
    route_lanes,
)
from saf.setaside.parking import ADDRESS


class ParkedLanes:
    """The lanes that hold messages of one task's shards."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._until = 0.0

    def begin(self, seconds: float) -> None:
        """Begin a turn of ``seconds``."""
        self._until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the turn is over, or the task stops: no further chunk is begun."""
        return self.context.stopping or time.monotonic() > self._until

    def hold(self, lanes: Collection[Lane], why: str) -> None:
        """Park new messages behind these lanes. Lanes of services are looked up instead."""
        for lane in lanes:
            if not lane.of_service:
                self.context.lanes.hold(lane, why)

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
            work, rules = self.context.work, self.context.rules
            query = parking.in_lanes(work.batch, destination, lanes, columns, found=found)
            yield from chunks(read(work, query), rules.chunk_rows, rules.chunk_bytes)

    def isolate(self, destination: str, rows: pa.Table, step: Callable[[pa.Table], bool]) -> bool:
        """Run a step for messages of lanes; a message that fails alone becomes a dead letter.

        A step returns whether to stop, and so does this. The lanes are in hand. If they were not
        for a while, messages that are gone are left out.
        """
        numbers, lanes = rows["parked_id"], rows.select(LANE)
        gone: set[int] = set()
        """Messages that an earlier attempt has committed durably: they have left this lane."""

        def undo() -> None:
            ids = numbers.to_pylist()
            here = self.context.source(
                lambda source: parking.still(source, destination, given_of(lanes), ids)
            )
            gone.update(number for number in ids if number not in here)

        def bury(message: pa.Table, error: str) -> bool:
            if message["parked_id"][0].as_py() not in gone:
                set_aside = self.aside(destination)
                set_aside.bury_as_stored(message, error)
                self.settle(message, set_aside)
            return False

        def step_if_here(part: pa.Table) -> bool:
            if gone:
                out = pc.is_in(part["parked_id"], pa.array(list(gone), pa.int64()))
                part = part.filter(pc.invert(out))
            return step(part) if part.num_rows else False

        if self.context.source.has_let_slip():
            undo()
        return isolate(rows, step_if_here, bury, undo)

    def aside(self, destination: str = "") -> SetAside:
        """Return an empty `SetAside` for messages of a chunk of lanes."""
        return SetAside(
            work=self.context.work,
            from_lanes=True,
            destination=destination,
            max_bytes=self.context.rules.max_bytes,
        )

    def settle(self, rows: pa.Table, set_aside: SetAside) -> None:
        """Take messages out of their lane, unless they stay there."""

        def settle(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.context.work.batch)
            gone = set_aside.write_from_lanes(source, rows["parked_id"].to_pylist())
            set_aside.count_left_out(source, among=gone)
            self.context.write(source)
            fail_point("unpark")

        self.context.source(settle)
        self.context.written()
        set_aside.written()
        self.context.receipts.of(None).dead += set_aside.dead_letters
        fail_point("unpark_commit")

    def postpone(self, failed: Mapping[Lane, SafError]) -> None:
        """Note that attempts at lanes have failed, and park new messages behind these lanes."""
        if failed:
            subscription_id = self.context.work.batch.subscription_id
            for lane, error in failed.items():
                self.hold([lane], str(error))
            self.context.source(lambda source: backoff.postpone(source, subscription_id, failed))

    def succeed(self, lanes: Collection[Lane]) -> None:
        """Note that the tried messages of lanes are gone, so their backoff starts again."""
        if lanes:
            subscription_id = self.context.work.batch.subscription_id
            self.context.source(lambda source: backoff.succeeded(source, subscription_id, lanes))


class FindingRoutes:
    """Moves one task's parked messages to where routes lead now."""

    def __init__(self, context: Context, parked: ParkedLanes) -> None:
        self.context = context
        self.parked = parked

    def find(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Move messages that waited for a route to where routes lead now; return their new
        lanes."""
        if not lanes:
            return set()
        routable, in_time = self._routable(lanes), True
        found, left = set[Lane](), dict[Lane, Lane]()
        step = partial(self._find_routes, found, left)
        needed = (
            [*selected(self.context.rules.max_bytes)]
            if self.context.resolver
            else ["id", "shard", *ADDRESS]
        )
        columns = [
            "parked_id",
            *LANE,
            sql.SQL("id AS log_id"),
            *parking.as_log(needed, found=False),
        ]
        with self.context.source.in_hand(""):
            for rows in self.parked.read("", routable, columns, found=False):
                if self.parked.isolate("", rows, step) or self.parked.over:
                    in_time = False
                    break
        self._stay(lanes if in_time else [lane for lane in lanes if lane not in routable], left)
        if not in_time:
            self.parked.succeed(routable)
        return found

    def _routable(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Return the lanes in which some message may have a way out.

        A lane names its service, so lanes without a way out need not be read.
        """
        unrouted = [lane for lane in lanes if lane.unrouted]
        brokers = [lane.broker and lane.broker.bytes for lane in unrouted]
        rows = self.context.matcher.route(
            pa.table(
                {
                    "number": pa.array(range(len(unrouted)), pa.int64()),
                    "to_service": pa.array([lane.subject for lane in unrouted], pa.string()),
                    "to_broker": pa.array(brokers, pa.binary()),
                }
            )
        )
        routers = pa.array(
            [router.service for router in self.context.work.routes.routers], pa.string()
        )
        mask = pc.or_(rows["route"].is_valid(), pc.is_in(rows["to_service"], routers))
        others = {lane for lane in lanes if not lane.unrouted}
        return others.union(unrouted[n] for n in rows.filter(mask)["number"].to_pylist())

    def _stay(self, lanes: Sequence[Lane], left: Mapping[Lane, Lane]) -> None:
        """Note that the messages left in these lanes have no way out; ``left`` tells why."""
        here = self.context.source(lambda s: parking.occupied(s, self.context.work.batch, lanes))
        obstacle = self.context.resolver.obstacle
        self.parked.postpone({lane: obstacle(left.get(lane, lane)) for lane in here})
        self.context.lanes.untried.update(lane for lane in lanes if lane not in here)

    def _find_routes(self, found: set[Lane], left: dict[Lane, Lane], rows: pa.Table) -> bool:
        """Move messages to where routes lead now; return whether the rest has to wait.

        ``found`` gets the lanes that they moved to. ``left`` gets, for each lane of messages that
        are sent again, the lane in which the first one left would wait for a route.
        """
        if "body" in rows.column_names and rows["body"].null_count:
            set_aside = self.parked.aside()
            readable = set_aside.bury_unread(rows)
            self.parked.settle(rows.filter(pc.is_null(rows["body"])), set_aside)
            rows = readable
        rows, untransformed = self._transformed(rows)
        resolution = self.context.resolver.resolve(rows)
        for unresolved, error in resolution.dead:
            # a message that its router cannot resolve leaves its lane
            set_aside = self.parked.aside()
            set_aside.bury(unresolved, "", "unresolved", error)
            self.parked.settle(unresolved, set_aside)
        routed = self.context.matcher.route(resolution.rows)
        routable = routed["route"].is_valid()
        for waiting in (resolution.waiting, routed.filter(pc.invert(routable))):
            for lane, first in _first_left(waiting):
                left.setdefault(lane, first)
        routed = routed.filter(routable)
        found |= self._move(share(routed, self.context.matcher.matches, self.context.source.choose))
        return untransformed

    def _transformed(self, rows: pa.Table) -> tuple[pa.Table, bool]:
        """Return messages before the first that has to wait for its router's transform.

        Also return whether there is one. Results of messages that were sent to a router
        are kept before the messages are redirected.
        """
        if not self.context.transforming.routers:
            return rows, False
        source_session, set_aside = self.context.source, self.parked.aside()
        rows, why = self.context.transforming.ready(rows, source_session, routed=False)
        routers = pa.array(self.context.transforming.routers, pa.string())
        inputs = rows.filter(pc.is_in(rows["to_service"], routers))
        fit = self.context.transforming.bury_at_fault(inputs, set_aside)
        if set_aside:
            bad = inputs_of(inputs, fit, but=True)
            self.parked.settle(bad, set_aside)
            rows = inputs_of(rows, bad, but=True)
        self.context.transforming.keep(fit, source_session)
        return rows, why is not None

    def _move(self, rows: pa.Table) -> set[Lane]:
        to = list(self._copies(rows))
        lanes = {lane_of(row, name) for name, _, copies in to for row in copies}
        gone = {row["parked_id"] for _, _, copies in to for row in copies}
        subscription_id = self.context.work.batch.subscription_id

        def move(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.context.work.batch)
            parking.touch(source, subscription_id, lanes, "has found a route")
            for destination, quality, copies in to:
                parking.copy(source, destination, quality, copies)
            parking.unpark(source, sorted(gone))
            fail_point("routed")

        if to:
            self.context.source(move)
        return lanes

    def _copies(self, rows: pa.Table) -> Iterator[tuple[str, str | None, list[dict[str, Any]]]]:
        """Yield each destination and quality, with the messages that go there and their new
        lanes."""
        waited_for_route = pc.equal(rows[KIND], str(Kind.ROUTE))
        rows = in_lanes(rows, found_lanes(either(waited_for_route, route_lanes(rows), rows)))
        by_destination: dict[tuple[str, str | None], list[int]] = {}
        for number in pc.unique(rows["route"]).to_pylist():
            match = self.context.matcher.matches[number]
            for route in match.routes:
                if match.to_all or route.destination in self.context.rules.qualities:
                    by_destination.setdefault((route.destination, route.quality), []).append(number)
        for (destination, quality), numbers in by_destination.items():
            part = rows.filter(pc.is_in(rows["route"], pa.array(numbers, pa.int32())))
            yield destination, quality, part.select(["parked_id", *LANE, *ADDRESS]).to_pylist()


def _first_left(rows: pa.Table | None) -> Iterator[tuple[Lane, Lane]]:
    """Yield lanes of messages sent again, each with the lane that its first message would wait in.

    That lane names the service, which a lane of messages sent again does not.
    """
    if rows is None:
        return
    for kind in (Kind.RETRY, Kind.REPLAY):
        first = rows.filter(pc.equal(rows[KIND], str(kind))).slice(0, 1)
        for lane in lanes_of(route_lanes(first))[0]:
            yield Lane(kind=kind), lane
