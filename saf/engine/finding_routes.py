"""Finding routes: the way out for messages that wait for a route, or for their router.

`FindingRoutes` moves them once a route exists. They move to lanes of the destinations that routes
lead to; a topic's message moves as one copy per destination. Each chunk is one transaction, and the
messages keep their place in the order. From then on each copy waits for its destination alone.
Nothing is sent here.

A message without a way out stays in its lane, and new messages wait behind it. A message that its
router cannot resolve, or for which a transform fails, becomes a dead letter. If the turn ends
early, the rest keeps its place, and the next turn continues.

Load sharing: where several routes share messages, `share` chooses one for each message, new or
parked. Messages without a key take the routes in turn by their ids, so a batch that is read again
goes the same way. Messages with a key take the route that their key has chosen
(`saf.routing.route_choices`); a chunk asks once, with each key once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.context import Context
from saf.engine.parked_lanes import ParkedLanes
from saf.engine.transforming import inputs_of
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import lock_cursors
from saf.routing.matching import Match
from saf.routing.route_choices import Asker
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

Choose = Callable[[Mapping[Asker, Sequence[str]]], Mapping[Asker, str]]
"""`saf.routing.route_choices.choose`, committed."""


class FindingRoutes:
    """Moves one task's parked messages to where routes lead now."""

    def __init__(self, context: Context, parked: ParkedLanes) -> None:
        self.context = context
        self.parked = parked
        self._untransformed = False
        """Whether some messages have no result of their router's transform yet."""
        self._left: dict[Lane, Lane] = {}
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

    def _stay(self, lanes: Sequence[Lane]) -> None:
        """Note that the messages left in these lanes have no way out."""
        here = self.context.source(lambda s: parking.occupied(s, self.context.work.batch, lanes))
        obstacle = self.context.resolver.obstacle
        self.parked.postpone({lane: obstacle(self._left.get(lane, lane)) for lane in here})
        self.context.lanes.untried.update(lane for lane in lanes if lane not in here)

    def _find_routes(self, found: set[Lane], rows: pa.Table) -> None:
        """Move messages to where routes lead now, and add to ``found`` the lanes they moved to."""
        if self._untransformed:
            return
        if "body" in rows.column_names and rows["body"].null_count:
            set_aside = self.parked.aside()
            readable = set_aside.bury_unread(rows)
            self.parked.settle(rows.filter(pc.is_null(rows["body"])), set_aside)
            rows = readable
        resolution = self.context.resolver.resolve(self._transformed(rows))
        for unresolved, error in resolution.dead:
            # a message that its router cannot resolve leaves its lane
            set_aside = self.parked.aside()
            set_aside.bury(unresolved, "", "unresolved", error)
            self.parked.settle(unresolved, set_aside)
        routed = self.context.matcher.route(resolution.rows)
        routable = routed["route"].is_valid()
        self._note_left(resolution.waiting)
        self._note_left(routed.filter(pc.invert(routable)))
        routed = routed.filter(routable)
        found |= self._move(share(routed, self.context.matcher.matches, self.context.source.choose))

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
        if not self.context.transforming.routers:
            return rows
        source_session, set_aside = self.context.source, self.parked.aside()
        rows, why = self.context.transforming.ready(rows, source_session, led_on=False)
        self._untransformed = why is not None
        routers = pa.array(self.context.transforming.routers, pa.string())
        inputs = rows.filter(pc.is_in(rows["to_service"], routers))
        fit = self.context.transforming.bury_at_fault(inputs, set_aside)
        if set_aside:
            bad = inputs_of(inputs, fit, but=True)
            self.parked.settle(bad, set_aside)
            rows = inputs_of(rows, bad, but=True)
        self.context.transforming.keep(fit, source_session)
        return rows

    def _move(self, rows: pa.Table) -> set[Lane]:
        to = list(self._copies(rows))
        lanes = {_lane(name, row) for name, _, copies in to for row in copies}
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


def _lane(destination: str, row: Mapping[str, Any]) -> Lane:
    return Lane(
        destination=destination,
        kind=Kind(row["kind"]),
        subject=row["subject"],
        broker=broker_of(row["broker"]),
    )


def share(rows: pa.Table, matches: Sequence[Match], choose: Choose) -> pa.Table:
    """Give each row one route in the column ``route``, in place of several that share."""
    shared = [
        n for n in pc.unique(rows["route"]).to_pylist() if n is not None and matches[n].shared
    ]
    if not shared:
        return rows
    single = {
        match.routes[0]: number for number, match in enumerate(matches) if len(match.routes) == 1
    }
    route = rows["route"].to_numpy(zero_copy_only=False)
    taken = pc.fill_null(rows["route"], -1).to_numpy().copy()
    keyed = pc.is_valid(rows["key"]).to_numpy()
    first, indices = _distinct(rows.select(["to_service", "to_broker", "key"]))
    among = {
        place: matches[int(route[row])]
        for place, row in enumerate(first)
        if keyed[row] and route[row] in shared
    }
    askers = dict(zip(among, _askers(rows.take(first[list(among)])), strict=True))
    chosen = choose({askers[p]: match.destinations for p, match in among.items()}) if among else {}
    numbers = np.full(len(first), -1)
    for place, match in among.items():
        member = match.destinations.index(chosen[askers[place]])
        numbers[place] = single[match.routes[member]]
    for number in shared:
        mask = taken == number
        members = np.array([single[member_route] for member_route in matches[number].routes])
        taken = np.where(mask & ~keyed, members[rows["id"].to_numpy() % len(members)], taken)
        taken = np.where(mask & keyed, numbers[indices], taken)
    column = pa.array(taken.astype(np.int32), mask=taken < 0)
    return rows.set_column(rows.column_names.index("route"), "route", column)


def _distinct(columns: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first row of each distinct value, in order, and each row's index among them."""
    codes = np.zeros(columns.num_rows, np.int64)
    for column in columns.columns:
        if column.null_count < len(column):
            encoded = column.combine_chunks().dictionary_encode()
            numbers = pc.fill_null(encoded.indices, -1).to_numpy() + 1
            codes = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)[
                1
            ]
    _, first, indices = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[indices]


def _askers(rows: pa.Table) -> list[Asker]:
    brokers = [str(UUID(bytes=item)) if item else None for item in rows["to_broker"].to_pylist()]
    named = zip(rows["to_service"].to_pylist(), brokers, rows["key"].to_pylist(), strict=True)
    return [Asker(*item) for item in named]
