"""Sending: the parts of a chunk, each stored at its destination, parked in its lanes, or buried.

Parts that wait are set aside before anything is stored, so that they are written at the source
first. If another part were stored before them, a crash would leave them below the watermark,
unwritten: once their lane is open, they would count as stored.

Parts that are sent at most once go last, after every step that could raise for a message. The
attempt is recorded at the source, durably, before it is made, because it is not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.engine.destination_sessions import obstacle
from saf.engine.earlier_task import EarlierTask
from saf.engine.held_lanes import HeldLanes
from saf.engine.parts import Part
from saf.engine.resolving import Resolver
from saf.engine.set_aside import SetAside
from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing
from saf.engine.work import ForwardingRules, Work
from saf.errors import SafError
from saf.log.cursor import advance, attempt, attempted
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside import backoff
from saf.setaside.lane import Lane


@dataclass(kw_only=True)
class Sending:
    """Sends the parts of one task's chunks."""

    work: Work
    rules: ForwardingRules
    source_session: SourceSession
    lanes: HeldLanes
    resolver: Resolver
    storing: Storing
    earlier: EarlierTask

    def send(self, parts: Sequence[Part], position: int, set_aside: SetAside) -> None:
        """Send the parts of a chunk that ends at a position; put what cannot go in ``set_aside``.

        Raises:
            SafError: the only destination is down, so parking would gain nothing.
        """
        at_most_once = [part for part in parts if part.quality == AT_MOST_ONCE]
        others = [part for part in parts if part.quality != AT_MOST_ONCE]
        for part in [part for part in others if not self._waits(part, set_aside)]:
            # the storing of another part may have held its lane since
            if not self._waits(part, set_aside):
                self.storing.store(part, set_aside)
        for part in self._attempted(at_most_once, position, set_aside):
            self.storing.store_once(part, set_aside)
        self._stay_open(set_aside)

    def _attempted(
        self, parts: Sequence[Part], position: int, set_aside: SetAside
    ) -> Sequence[Part]:
        """Record that parts are about to be sent at most once; return those not tried before."""
        if not parts:
            return parts
        batch = self.work.batch
        before = self.source_session(lambda source: attempted(source, batch))
        parts = self.earlier.unattempted(parts, before, set_aside)
        parts = [part for part in parts if not self._waits(part, set_aside)]
        if not parts:
            return parts
        set_aside.write_ahead(self.source_session)
        before = self.source_session(lambda source: attempt(source, batch, position))
        # another run of this task has already tried the attempts that are recorded now
        return self.earlier.unattempted(parts, before, set_aside)

    def _waits(self, part: Part, set_aside: SetAside) -> bool:
        """Park a part that cannot go, or waits behind others in its lanes; return whether it
        waits."""
        for lane in part.lanes:
            if lane not in self.lanes.held and (obstacle := self._obstacle(part, lane)):
                set_aside.failed[lane] = obstacle
                self.lanes.hold(lane, str(obstacle))
        # its lane waits; or the part is not in the destination's own lane, so it is behind others
        waits = not part.main or Lane(destination=part.waits_at) in self.lanes.held
        if waits:
            set_aside.wait(part)
        return waits

    def _obstacle(self, part: Part, lane: Lane) -> SafError | None:
        """Return why messages cannot leave a lane; None if they can."""
        if part.destination is None:
            return self.resolver.obstacle(lane)
        return obstacle(self.rules, part.destination, part.quality)

    def _stay_open(self, set_aside: SetAside) -> None:
        """Raise, instead of parking, if the only destination is down.

        The messages of this chunk that it has stored are done: the position moves past them. If
        this is not possible, because an earlier message waits, all waiting messages are parked.
        """
        lane = Lane(destination=self.work.alone or "")
        if lane not in set_aside.failed or not set_aside.parked:
            return
        error, batch = set_aside.failed[lane], self.work.batch
        taken, first = set_aside.taken, set_aside.waits_from()
        if taken and (first is None or taken > first):
            return

        def stay(source: psycopg.Connection[Any]) -> None:
            if taken and first is not None:
                advance(source, batch, first - 1)
            moving = [lane] if taken else []
            backoff.postpone(source, batch.subscription_id, {lane: error}, moving)
            self.storing.brake.write(source)

        self.source_session(stay)
        raise error
