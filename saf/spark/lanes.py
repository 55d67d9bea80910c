"""What one task knows of the lanes of its shards (see `saf.parking`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from saf.errors import SafError
from saf.parking import REPLAY, SERVICE, Lane


@dataclass
class Lanes:
    """Which lanes new messages park in, and which nobody has tried yet."""

    held: dict[Lane, str] = field(default_factory=dict)
    """New messages have to park in these, and why."""
    occupied: set[Lane] = field(default_factory=set)
    """They have messages of these shards, whether their time has come or not."""
    ahead: set[Lane] = field(default_factory=set)
    """They have messages that the batch itself had set aside, before a crash: those stay until the
    position has passed them, and what comes after them in the batch has to stay behind them."""
    untried: set[Lane] = field(default_factory=set)
    """Their time has come, but they had nothing of these shards to try."""

    def hold(self, lane: Lane, error: SafError) -> None:
        """New messages park behind those of this lane; all for a destination behind a replay."""
        self.held[lane] = str(error)
        self.occupied.add(lane)
        if lane.lane == REPLAY:
            self.held[Lane(destination=lane.destination)] = str(error)

    def open(self, lane: Lane) -> None:
        """Nothing of these shards is in the lane any more, unless the batch has put it there."""
        if lane in self.ahead:
            return
        self.occupied.discard(lane)
        if Lane(destination=lane.destination, lane=REPLAY) not in self.held:
            self.held.pop(lane, None)

    def services(self, destination: str) -> frozenset[str]:
        """Those whose messages wait for the destination to know them."""
        mine = [lane.lane for lane in self.occupied if lane.destination == destination]
        return frozenset(name.removeprefix(SERVICE) for name in mine if name.startswith(SERVICE))
