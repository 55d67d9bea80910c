"""What one task knows of the lanes of its shards (see `saf.parking`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from saf.errors import SafError
from saf.parking import REPLAY, Lane


@dataclass
class Lanes:
    """Which lanes new messages park in, and which nobody has tried yet."""

    held: dict[Lane, str] = field(default_factory=dict)
    """New messages have to park in these, and why."""
    untried: set[Lane] = field(default_factory=set)
    """Their time has come, but they had nothing of these shards to try."""

    def hold(self, lane: Lane, error: SafError) -> None:
        """New messages park behind those of this lane; all for a destination behind a replay."""
        self.held[lane] = str(error)
        if lane.lane == REPLAY:
            self.held[Lane(destination=lane.destination)] = str(error)
