"""Releasing: parked messages whose time has come, before the new ones, lane by lane.

Those that have waited for a route, or for their router, first move to lanes of the destinations
that routes lead to now, a topic's as a copy for each, in one transaction and with the place in the
order that they had. From then on each waits for its destination alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf import parking
from saf.cursor import hold
from saf.errors import SafError, Unavailable
from saf.failpoints import fail_point
from saf.isolation import isolate
from saf.parking import ADDRESS, FOUND, ROUTE, SERVICE, Backoff, Lane
from saf.spark.aside import Aside
from saf.spark.at_source import AtSource
from saf.spark.chunks import chunks, mark
from saf.spark.columns import selected
from saf.spark.lanes import Lanes
from saf.spark.receipts import Receipts
from saf.spark.resolving import Resolver
from saf.spark.sharing import share
from saf.spark.sorting import Part, by_address, found_lane, of_route_lane, route_lane, service_lane
from saf.spark.source import read
from saf.spark.storing import Storing, nowhere
from saf.spark.wayfinder import Wayfinder
from saf.spark.work import Policy, Work
from saf.ways import AT_MOST_ONCE, Route


@dataclass
class Releasing:
    """The parked messages of one task's shards."""

    work: Work
    resolver: Resolver
    wayfinder: Wayfinder
    policy: Policy
    at_source: AtSource
    lanes: Lanes
    receipts: Receipts
    storing: Storing

    def release_all(self) -> None:
        """Deliver what the lanes of the work hold of these shards, if their time has come."""
        lanes = self.work.waiting
        moved = [self._route(lane) for lane in lanes if lane.due and not lane.destination]
        if any(moved):
            subscription_id = self.work.batch.subscription_id
            lanes = self.at_source(lambda source: parking.waiting(source, subscription_id))
        of_services = [lane.key for lane in lanes if lane.of_service]
        self.lanes.occupied |= self._occupied(of_services)
        for lane in lanes:
            if lane.due or not lane.of_service or lane.key in self.lanes.occupied:
                self.release(lane)

    def release(self, lane: Backoff) -> None:
        """Deliver a lane's messages of these shards, if its time has come."""
        if not lane.due:
            self.lanes.hold(lane.key, Unavailable(str(lane), lane.error))
            return
        tried, failed = False, set[Lane]()
        for rows in self._parked(lane):
            tried = True
            release = partial(self._release, lane, failed)
            isolate(rows, release, partial(self._bury, lane, "rejected"))
            if failed:
                return
        subscription_id = self.work.batch.subscription_id
        if tried:
            self.lanes.open(lane.key)
            self.at_source(lambda source: parking.succeeded(source, subscription_id, lane.key))
        else:
            self.lanes.untried.add(lane.key)

    def _release(self, lane: Backoff, failed: set[Lane], rows: pa.Table) -> None:
        """Deliver some of a lane's messages, unless earlier ones of it have ``failed``."""
        if failed:
            return
        aside = Aside(work=self.work, lane=lane.key)
        for part in self._qualities(lane, aside.bury_unread(rows)):
            if obstacle := self._obstacle(part):
                aside.failed[lane.key] = obstacle
            if lane.key in aside.failed:
                aside.parked.append(part)
            elif part.quality == AT_MOST_ONCE:
                self._settle(part.rows, Aside(work=self.work, lane=lane.key))
                self.storing.store_once(part, aside)
            else:
                self.storing.store(part, mark(part.rows), aside)
        self._settle(rows, aside)
        self.receipts.of(None).dead += aside.dead_letters
        if lane.key in aside.failed:
            self.lanes.hold(lane.key, aside.failed[lane.key])
            failed.add(lane.key)

    def forget_untried(self) -> None:
        """Lanes that had nothing here, and to which nothing new went either."""
        subscription_id = self.work.batch.subscription_id

        def forget(source: psycopg.Connection[Any]) -> None:
            for lane in self.lanes.untried:
                parking.forget(source, subscription_id, lane)

        if self.lanes.untried:
            self.at_source(forget)

    def _occupied(self, lanes: Sequence[Lane]) -> set[Lane]:
        """Those that have messages of these shards.

        Others' are none that new ones have to wait for. And they must not: what this task repeats
        may be stored already, which only the watermark of the lane that it went by can tell.
        """
        if not lanes:
            return set()
        return self.at_source(lambda source: parking.occupied(source, self.work.batch, lanes))

    def _route(self, lane: Backoff) -> bool:
        """Move what has waited for a route to where routes lead now; whether that was anything."""
        needed = [*selected(None)] if self.resolver else ["id", "shard", *ADDRESS]
        columns = ["parked_id", sql.SQL("id AS log_id"), *parking.as_log(needed, lane.key)]
        batches = read(self.work, parking.in_lane(self.work.batch, lane.key, columns))
        moved: list[Lane] = []
        for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
            find_routes = partial(self._find_routes, lane, moved)
            isolate(rows, find_routes, partial(self._bury, lane, "rejected"))
        return bool(moved)

    def _find_routes(self, lane: Backoff, moved: list[Lane], rows: pa.Table) -> None:
        """Move some of a lane's messages to where routes lead, and note that in ``moved``."""
        if "body" in rows.column_names and rows["body"].null_count:
            aside = Aside(work=self.work, lane=lane.key)
            readable = aside.bury_unread(rows)
            self._settle(rows.filter(pc.is_null(rows["body"])), aside)
            self.receipts.of(None).dead += aside.dead_letters
            rows = readable
        resolution = self.resolver.resolve(rows)
        for some, error in resolution.dead:
            self._bury(lane, "unresolved", some, error)
        routed = self.wayfinder.route(resolution.rows)
        routed = routed.filter(routed["route"].is_valid())
        if self._move(lane, share(routed, self.wayfinder.ways, self.at_source.choose)):
            moved.append(lane.key)

    def _bury(self, lane: Backoff, reason: str, rows: pa.Table, error: str) -> None:
        """What can go nowhere leaves the lane, and is a dead letter."""
        aside = Aside(work=self.work, lane=lane.key)
        aside.bury(rows, lane.destination, reason, error)
        self._settle(rows, aside)
        self.receipts.of(None).dead += aside.dead_letters

    def _move(self, lane: Backoff, rows: pa.Table) -> bool:
        known, subscription_id = self.policy.qualities, self.work.batch.subscription_id
        to: list[tuple[Route, Lane, pa.Table]] = []
        for number in pc.unique(rows["route"]).to_pylist():
            mine = rows.filter(pc.equal(rows["route"], number))
            way = self.wayfinder.ways[number]
            for waits, some in _by_lane(lane.key, mine):
                to += [
                    (route, found_lane(route.destination, waits), some)
                    for route in way.routes
                    if way.to_all or route.destination in known
                ]

        def move(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            for route, found, some in to:
                addresses = some.select(["parked_id", *ADDRESS]).to_pylist()
                parking.copy(source, subscription_id, found, route.quality, addresses)
            gone = [number for _, _, some in to for number in some["parked_id"].to_pylist()]
            parking.unpark(source, gone)
            fail_point("routed")

        if to:
            self.at_source(move)
        return bool(to)

    def _parked(self, lane: Backoff) -> Iterator[pa.Table]:
        log = parking.as_log([*selected(None), "batch"], lane.key)
        everything = [*log, "parked_id", "quality", sql.SQL("id AS log_id")]
        batches = read(self.work, parking.in_lane(self.work.batch, lane.key, everything))
        return chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes)

    def _qualities(self, lane: Backoff, rows: pa.Table) -> Iterator[Part]:
        """A lane's messages by their quality of service."""
        if lane.destination not in self.policy.qualities:
            yield Part(lane=lane.key, destination=None, quality=None, rows=rows)
            return
        qualities = pc.fill_null(rows["quality"], self.policy.qualities[lane.destination])
        for quality in pc.unique(qualities).to_pylist():
            mine = rows.filter(pc.equal(qualities, quality))
            yield Part(lane=lane.key, destination=lane.destination, quality=quality, rows=mine)

    def _obstacle(self, part: Part) -> SafError | None:
        """Why messages cannot leave their lane: no way, or older ones that wait in another."""
        if part.destination is None:
            there = part.lane.destination
            return nowhere(there) if there else self.resolver.obstacle(part.lane)
        older = []
        if part.lane.lane.startswith((SERVICE, FOUND + ROUTE)):
            older.append(Lane(destination=part.destination))
        if part.lane.lane.startswith(FOUND + ROUTE):
            service, _ = of_route_lane(part.lane)
            older.append(service_lane(part.destination, service))
        for lane in older:
            if lane in self.lanes.held:
                return Unavailable(str(part.lane), f"behind {lane}: {self.lanes.held[lane]}")
        return None

    def _settle(self, rows: pa.Table, aside: Aside) -> None:
        """Take what has gone out of its lane."""

        def settle(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            aside.write_from_lane(source, rows["parked_id"].to_pylist())
            fail_point("unpark")

        self.at_source(settle)
        fail_point("unpark_commit")


def _by_lane(lane: Lane, rows: pa.Table) -> Iterator[tuple[Lane, pa.Table]]:
    """Messages that have found a route, by the lanes that new ones for their service look at."""
    if not lane.lane.startswith(ROUTE):
        yield lane, rows
        return
    for (service, broker), mine in by_address(rows):
        yield route_lane(service, UUID(bytes=broker) if broker else None), mine
