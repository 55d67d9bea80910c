"""Finding routes: move messages that waited for a route, or for their router, once one exists.

They move to lanes of the destinations that routes lead to; a topic's message moves as one copy per
destination. Each chunk is one transaction, and the messages keep their place in the order. From
then on each copy waits for its destination alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.load_sharing import share
from saf.engine.matcher import Matcher
from saf.engine.parked_lanes import ParkedLanes
from saf.engine.resolving import Resolver
from saf.engine.transforming import Transforming, inputs_of
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import lock_cursors
from saf.setaside import parking
from saf.setaside.lane import Kind, Lane
from saf.setaside.lane_columns import (
    KIND,
    LANE,
    broker_of,
    either,
    found_lanes,
    in_lanes,
    lanes_of,
    route_lanes,
)
from saf.setaside.parking import ADDRESS


@dataclass(kw_only=True)
class FindingRoutes:
    """Moves one task's parked messages to where routes lead now."""

    resolver: Resolver
    matcher: Matcher
    parked: ParkedLanes
    transforming: Transforming
    _untransformed: bool = field(init=False, default=False)
    """Whether some messages have no result of their router's transform yet."""
    _left: dict[Lane, Lane] = field(init=False, default_factory=dict)
    """For each lane of messages sent again, the lane that the first one left would wait in."""

    def find(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Move messages that waited for a route to where routes lead now; return their new
        lanes."""
        if not lanes:
            return set()
        found: set[Lane] = set()
        routable = self._led(lanes)
        in_time, self._untransformed = True, False
        self._left.clear()
        needed = (
            [*selected(self.parked.rules.max_bytes)] if self.resolver else ["id", "shard", *ADDRESS]
        )
        columns = [
            "parked_id",
            *LANE,
            sql.SQL("id AS log_id"),
            *parking.as_log(needed, found=False),
        ]
        with self.parked.source_session.in_hand(""):
            for rows in self.parked.read("", routable, columns, found=False):
                self.parked.isolate("", rows, partial(self._find_routes, found))
                if self.parked.over or self._untransformed:
                    in_time = False
                    break
        self._stay(lanes if in_time else [lane for lane in lanes if lane not in routable])
        if not in_time:
            self.parked.succeed(routable)
        return found

    def _led(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Return the lanes in which some message may have a way out.

        A lane names its service, so lanes without a way out need not be read.
        """
        unrouted = [lane for lane in lanes if lane.unrouted]
        brokers = [lane.broker and lane.broker.bytes for lane in unrouted]
        rows = self.matcher.route(
            pa.table(
                {
                    "number": pa.array(range(len(unrouted)), pa.int64()),
                    "to_service": pa.array([lane.subject for lane in unrouted], pa.string()),
                    "to_broker": pa.array(brokers, pa.binary()),
                }
            )
        )
        routers = pa.array(
            [router.service for router in self.parked.work.routes.routers], pa.string()
        )
        mask = pc.or_(rows["route"].is_valid(), pc.is_in(rows["to_service"], routers))
        others = {lane for lane in lanes if not lane.unrouted}
        return others.union(unrouted[n] for n in rows.filter(mask)["number"].to_pylist())

    def _stay(self, lanes: Sequence[Lane]) -> None:
        """Note that the messages left in these lanes have no way out."""
        here = self.parked.source_session(
            lambda s: parking.occupied(s, self.parked.work.batch, lanes)
        )
        obstacle = self.resolver.obstacle
        self.parked.postpone({lane: obstacle(self._left.get(lane, lane)) for lane in here})
        self.parked.lanes.untried.update(lane for lane in lanes if lane not in here)

    def _find_routes(self, found: set[Lane], rows: pa.Table) -> None:
        """Move messages to where routes lead now, and add to ``found`` the lanes they moved to."""
        if self._untransformed:
            return
        if "body" in rows.column_names and rows["body"].null_count:
            set_aside = self.parked.aside()
            readable = set_aside.bury_unread(rows)
            self.parked.settle(rows.filter(pc.is_null(rows["body"])), set_aside)
            rows = readable
        resolution = self.resolver.resolve(self._transformed(rows))
        for unresolved, error in resolution.dead:
            # a message that its router cannot resolve leaves its lane
            set_aside = self.parked.aside()
            set_aside.bury(unresolved, "", "unresolved", error)
            self.parked.settle(unresolved, set_aside)
        routed = self.matcher.route(resolution.rows)
        routable = routed["route"].is_valid()
        self._note_left(resolution.waiting)
        self._note_left(routed.filter(pc.invert(routable)))
        routed = routed.filter(routable)
        found |= self._move(share(routed, self.matcher.matches, self.parked.source_session.choose))

    def _note_left(self, rows: pa.Table | None) -> None:
        """Note the service that a message waits for, if the message's lane does not name it."""
        if rows is None:
            return
        for kind in (Kind.RETRY, Kind.REPLAY):
            first = rows.filter(pc.equal(rows[KIND], str(kind))).slice(0, 1)
            for lane in lanes_of(route_lanes(first))[0]:
                self._left.setdefault(Lane(kind=kind), lane)

    def _transformed(self, rows: pa.Table) -> pa.Table:
        """Return messages before the first that has to wait for the transform of its router.

        Results of messages that were sent to a router are kept before the messages are redirected.
        """
        if not self.transforming.routers:
            return rows
        source_session, set_aside = self.parked.source_session, self.parked.aside()
        rows, why = self.transforming.ready(rows, source_session, led_on=False)
        self._untransformed = why is not None
        routers = pa.array(self.transforming.routers, pa.string())
        inputs = rows.filter(pc.is_in(rows["to_service"], routers))
        fit = self.transforming.bury_at_fault(inputs, set_aside)
        if set_aside:
            bad = inputs_of(inputs, fit, but=True)
            self.parked.settle(bad, set_aside)
            rows = inputs_of(rows, bad, but=True)
        self.transforming.keep(fit, source_session)
        return rows

    def _move(self, rows: pa.Table) -> set[Lane]:
        to = list(self._copies(rows))
        lanes = {_lane(name, row) for name, _, copies in to for row in copies}
        gone = {row["parked_id"] for _, _, copies in to for row in copies}
        subscription_id = self.parked.work.batch.subscription_id

        def move(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.parked.work.batch)
            parking.touch(source, subscription_id, lanes, "has found a route")
            for destination, quality, copies in to:
                parking.copy(source, destination, quality, copies)
            parking.unpark(source, sorted(gone))
            fail_point("routed")

        if to:
            self.parked.source_session(move)
        return lanes

    def _copies(self, rows: pa.Table) -> Iterator[tuple[str, str | None, list[dict[str, Any]]]]:
        """Yield each destination and quality, with the messages that go there and their new
        lanes."""
        waited_for_route = pc.equal(rows[KIND], str(Kind.ROUTE))
        rows = in_lanes(rows, found_lanes(either(waited_for_route, route_lanes(rows), rows)))
        by_destination: dict[tuple[str, str | None], list[int]] = {}
        for number in pc.unique(rows["route"]).to_pylist():
            match = self.matcher.matches[number]
            for route in match.routes:
                if match.to_all or route.destination in self.parked.rules.qualities:
                    by_destination.setdefault((route.destination, route.quality), []).append(number)
        for (destination, quality), numbers in by_destination.items():
            part = rows.filter(pc.is_in(rows["route"], pa.array(numbers, pa.int32())))
            yield destination, quality, part.select(["parked_id", *LANE, *ADDRESS]).to_pylist()


def _lane(destination: str, row: Mapping[str, Any]) -> Lane:
    return Lane(
        destination=destination,
        kind=Kind(row["kind"]),
        subject=row["subject"],
        broker=broker_of(row["broker"]),
    )
