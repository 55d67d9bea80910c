"""Held lanes: the lanes of its shards that a task knows (see `saf.setaside.lane`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from saf.engine.source_session import SourceSession
from saf.log.cursor import Batch
from saf.setaside import backoff
from saf.setaside.lane import Kind, Lane, found_lane, service_lane
from saf.setaside.lane_columns import lanes_of, route_lanes


@dataclass
class HeldLanes:
    """Lanes that new messages park in, and lanes not tried yet.

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
