"""What one task knows of the lanes of its shards (see `saf.setaside.lane`)."""

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
    """Which lanes new messages park in, and which nobody has tried yet.

    Of a destination's lanes that is known all along. Of the lanes of services there may be any
    number, so it is looked up for each chunk, of those that the chunk is for.
    """

    held: dict[Lane, str] = field(default_factory=dict)
    """New messages have to park in these, and why."""
    ahead: set[Lane] = field(default_factory=set)
    """They have messages that the batch itself had set aside, before a crash: those stay until the
    position has passed them, and what comes after them in the batch has to stay behind them."""
    untried: set[Lane] = field(default_factory=set)
    """Their time has come, but they had nothing of these shards to try."""
    of_services: bool = False
    """There may be lanes of services."""

    def hold(self, lane: Lane, why: str) -> None:
        """New messages park behind those of this lane; all for a destination behind a replay."""
        self.held[lane] = why
        self.of_services |= lane.of_service
        if lane.kind == Kind.REPLAY:
            self.held[Lane(destination=lane.destination)] = why

    def open(self, lane: Lane) -> None:
        """Nothing of these shards is in the lane any more, unless the batch has put it there."""
        if lane in self.ahead:
            return
        if Lane(destination=lane.destination, kind=Kind.REPLAY) not in self.held:
            self.held.pop(lane, None)

    def look(self, source_session: SourceSession, batch: Batch, *messages: pa.Table) -> None:
        """Find the lanes of the services that some messages are for; others' are not held then."""
        if self.of_services:
            older = {lane for rows in messages for lane in _older(rows)}
            found = source_session(
                lambda source: backoff.held(source, batch.subscription_id, batch.shards, older)
            )
            mine = {lane: why for lane, why in self.held.items() if not lane.of_service}
            self.held = mine | found

    def services(self, destination: str) -> frozenset[str]:
        """Those whose messages wait for the destination to know them."""
        mine = [lane for lane in self.held if lane.destination == destination]
        return frozenset(lane.subject for lane in mine if lane.kind == Kind.SERVICE)


def _older(rows: pa.Table) -> set[Lane]:
    """All lanes in which older messages for the same services may wait, at any destination."""
    routes, _ = lanes_of(route_lanes(rows))
    found = (found_lane("", lane) for lane in routes)
    return {*routes, *found, *(service_lane("", lane.subject) for lane in routes)}
