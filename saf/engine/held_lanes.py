"""What one task knows of the lanes of its shards (see `saf.setaside.parking`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from saf.engine.sorting import found_lanes, route_lanes, service_lanes
from saf.engine.source_session import SourceSession
from saf.log.cursor import Batch
from saf.setaside import backoff
from saf.setaside.parking import REPLAY, SERVICE, Lane


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
        if lane.lane == REPLAY:
            self.held[Lane(destination=lane.destination)] = why

    def open(self, lane: Lane) -> None:
        """Nothing of these shards is in the lane any more, unless the batch has put it there."""
        if lane in self.ahead:
            return
        if Lane(destination=lane.destination, lane=REPLAY) not in self.held:
            self.held.pop(lane, None)

    def look(self, source_session: SourceSession, batch: Batch, *messages: pa.Table) -> None:
        """Find the lanes of the services that some messages are for; others' are not held then."""
        if self.of_services:
            names = [name for rows in messages for name in _older(rows)]
            found = source_session(
                lambda source: backoff.held(source, batch.subscription_id, batch.shards, names)
            )
            mine = {lane: why for lane, why in self.held.items() if not lane.of_service}
            self.held = mine | found

    def services(self, destination: str) -> frozenset[str]:
        """Those whose messages wait for the destination to know them."""
        mine = [lane.lane for lane in self.held if lane.destination == destination]
        return frozenset(name.removeprefix(SERVICE) for name in mine if name.startswith(SERVICE))


def _older(rows: pa.Table) -> list[str]:
    """The names of all lanes in which older messages for the same services may wait."""
    routes = route_lanes(rows)
    names = [routes, found_lanes(routes), service_lanes(rows)]
    return [name for some in names for name in pc.unique(some).to_pylist()]
