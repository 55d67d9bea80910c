"""Releasing: parked messages whose time has come, before the new ones, lane by lane."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf import parking
from saf.cursor import hold
from saf.errors import SafError, Unavailable, Unroutable
from saf.failpoints import fail_point
from saf.parking import ROUTE, SERVICE, Backoff, Lane
from saf.routes import AT_MOST_ONCE, choose_route
from saf.spark.aside import Aside
from saf.spark.at_source import AtSource
from saf.spark.chunks import chunks, mark
from saf.spark.columns import selected, unpack
from saf.spark.lanes import Lanes
from saf.spark.receipts import Receipts
from saf.spark.sorting import Part, of_route_lane, service_lane
from saf.spark.source import read
from saf.spark.storing import Storing
from saf.spark.work import Policy, Work


@dataclass
class Releasing:
    """The parked messages of one task's shards."""

    work: Work
    policy: Policy
    at_source: AtSource
    lanes: Lanes
    receipts: Receipts
    storing: Storing

    def release(self, lane: Backoff) -> None:
        """Deliver a lane's messages of these shards, if its time has come."""
        if not lane.due:
            self.lanes.hold(lane.key, Unavailable(str(lane), lane.error))
            return
        tried = False
        for rows in self._parked(lane):
            tried = True
            aside = Aside(work=self.work, lane=lane.key)
            for part in self._ways(lane, rows):
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
                return
        subscription_id = self.work.batch.subscription_id
        if tried:
            self.at_source(lambda source: parking.succeeded(source, subscription_id, lane.key))
        else:
            self.lanes.untried.add(lane.key)

    def forget_untried(self) -> None:
        """Lanes that had nothing here, and to which nothing new went either."""
        subscription_id = self.work.batch.subscription_id

        def forget(source: psycopg.Connection[Any]) -> None:
            for lane in self.lanes.untried:
                parking.forget(source, subscription_id, lane)

        if self.lanes.untried:
            self.at_source(forget)

    def _parked(self, lane: Backoff) -> Iterator[pa.Table]:
        everything = [
            *parking.as_log(selected(None)),
            "parked_id",
            "batch",
            "quality",
            sql.SQL("id AS log_id"),
        ]
        batches = read(self.work, parking.in_lane(self.work.batch, lane.key, everything))
        for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
            yield unpack(rows)

    def _ways(self, lane: Backoff, rows: pa.Table) -> Iterator[Part]:
        """Where a lane's messages go now, by their quality of service."""
        destination: str | None = lane.destination
        routed = None
        if lane.lane.startswith(ROUTE):
            route = choose_route(self.work.routes, *of_route_lane(lane))
            destination, routed = (route.destination, route.quality) if route else (None, None)
        if destination not in self.policy.qualities:
            yield Part(lane=lane.key, destination=None, quality=None, rows=rows)
            return
        default = routed or self.policy.qualities[destination]
        qualities = pc.fill_null(rows["quality"], default)
        for quality in pc.unique(qualities).to_pylist():
            mine = rows.filter(pc.equal(qualities, quality))
            yield Part(lane=lane.key, destination=destination, quality=quality, rows=mine)

    def _obstacle(self, part: Part) -> SafError | None:
        """Why messages cannot leave their lane: no way, or older ones that wait in another."""
        service, _ = of_route_lane(part.lane)
        if part.destination is None:
            return Unroutable(service)
        older = []
        if part.lane.lane.startswith((ROUTE, SERVICE)):
            older.append(Lane(destination=part.destination))
        if part.lane.lane.startswith(ROUTE):
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
