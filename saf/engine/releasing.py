"""Releasing: due parked messages are delivered before new ones.

Messages that have waited for a route, or for their router, first move to lanes of the destinations
that routes lead to now (`saf.engine.finding_routes`).

Lanes of a destination are released together, by their rank (`saf.setaside.backoff.rank`): one
ordered read, and chunks that each go to the destination in one transaction, whatever lanes their
messages are in. An obstacle for one lane keeps back only that lane's messages.

Messages of healthy lanes must not wait for long. So after `RELEASE_SECONDS`, and at least one
chunk, the task continues with new messages. The next cycle releases the rest, after the lanes that
had no turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.destination_sessions import nowhere
from saf.engine.finding_routes import FindingRoutes
from saf.engine.parked_lanes import HeldLanes, ParkedLanes
from saf.engine.parts import Part
from saf.engine.set_aside import MAY_HAVE_LEFT, SetAside
from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing
from saf.engine.transforming import Transforming
from saf.engine.work import ForwardingRules, Receipts, Work
from saf.errors import ConfigurationError, SafError, Unavailable
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import lock_cursors
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside import backoff, dropped, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Kind, Lane, given, service_lane
from saf.setaside.lane_columns import (
    KIND,
    LANE,
    is_in,
    lanes_of,
)
from saf.setaside.parking import Backoff

SENT_AGAIN = (Kind.REPLAY, Kind.FOUND_REPLAY)
"""Kinds of lanes whose messages are sent even if they have expired since: they replace messages
that a destination has lost, and their reader decides."""

RELEASE_SECONDS = 5.0
"""Seconds after which no further chunk is begun; the current chunk is finished."""


@dataclass(kw_only=True)
class Releasing:
    """Delivers one task's parked messages."""

    work: Work
    rules: ForwardingRules
    source_session: SourceSession
    lanes: HeldLanes
    receipts: Receipts
    storing: Storing
    transforming: Transforming
    parked: ParkedLanes
    finding_routes: FindingRoutes

    def release_all(self) -> None:
        """Deliver the due messages of these shards in the lanes of the work."""
        self.parked.begin(RELEASE_SECONDS)
        if self.work.of_services:
            self._bury_unrouted()
        for lane in self.work.waiting:
            if not lane.due:
                self.lanes.hold(lane.own, lane.error)
        due = {lane.own: lane for lane in self.work.waiting if lane.due}
        found = self.finding_routes.find([lane for lane in due if not lane.destination])
        if found:
            subscription_id = self.work.batch.subscription_id
            now = self.source_session(lambda source: backoff.named(source, subscription_id, found))
            due |= {lane.own: lane for lane in now if lane.due}
        routed = backoff.in_turn(lane for lane in due.values() if lane.destination)
        for number, ((destination, _), group) in enumerate(groupby(routed, _group)):
            lanes = [lane.own for lane in group]
            if number and (self.parked.over or self.storing.stopping):
                self.parked.hold(lanes, "others had their turn")
            else:
                with self.source_session.in_hand(destination):
                    self._release(destination, lanes)

    def forget_untried(self) -> None:
        """Forget lanes that had no messages here, and that got no new ones."""
        if self.lanes.untried:
            subscription_id, untried = self.work.batch.subscription_id, self.lanes.untried
            self.source_session(lambda source: backoff.forget(source, subscription_id, untried))

    def _bury_unrouted(self) -> None:
        """Make dead letters of messages that expired without a route and were sent nowhere."""

        def bury(source: psycopg.Connection[Any]) -> int:
            lock_cursors(source, self.work.batch)
            return dropped.bury_unrouted(source, self.work.batch)

        dead = dropped.AT_ONCE
        while dead == dropped.AT_ONCE:
            dead = self.source_session(bury)
            self.receipts.of(None).dead += dead
        fail_point("unrouted_expired")

    def _release(self, destination: str, lanes: Sequence[Lane]) -> None:
        """Deliver the messages of these shards in some lanes of a destination."""
        blocked = self._blocked(destination, lanes)
        self.parked.postpone(blocked)
        free, tried = set(lanes) - blocked.keys(), set[Lane]()
        left = free - self._behind_replay(destination, free)
        for rows in self._parked(destination, left):
            if tried and (self.parked.over or self.storing.stopping):
                self.parked.succeed(tried & left)
                self.parked.hold(left, "others had their turn")
                return
            tried.update(lanes_of(rows, destination)[0])
            self.parked.isolate(destination, rows, partial(self._deliver, destination, left))
            if not left:
                return
        for lane in left & tried:
            self.lanes.open(lane)
        self.parked.succeed(left & tried)
        self.lanes.untried |= left - tried

    def _blocked(self, destination: str, lanes: Sequence[Lane]) -> dict[Lane, SafError]:
        """Return the lanes that cannot leave, and why: no match, or older messages wait
        elsewhere."""
        if destination not in self.rules.qualities:
            return dict.fromkeys(lanes, nowhere(destination))
        main = Lane(destination=destination)
        of_services = [other for other in lanes if other.kind in (Kind.SERVICE, Kind.FOUND_ROUTE)]
        if main in self.lanes.held:
            return {lane: _behind(lane, main, self.lanes.held[main]) for lane in of_services}
        known_by = {
            lane: service_lane(destination, lane.subject) for lane in of_services if lane.found
        }
        held = self._held({*known_by.values()})
        return {
            lane: _behind(lane, older, held[older])
            for lane, older in known_by.items()
            if older in held
        }

    def _behind_replay(self, destination: str, lanes: Collection[Lane]) -> set[Lane]:
        """Let a destination's own lane wait behind a replay; return the lanes that wait.

        A replay that has failed goes first at its next attempt. A replay that the open batch has
        not passed yet goes in the next cycle; this is not a failure.
        """
        main = Lane(destination=destination)
        replay = Lane(destination=destination, kind=Kind.REPLAY)
        if main not in lanes or replay not in self.lanes.held or not self._held({replay}):
            return set()
        subscription_id = self.work.batch.subscription_id
        for lane in self.source_session(lambda s: backoff.named(s, subscription_id, {replay})):
            if lane.due:
                self.parked.hold([main], lane.error)
            else:
                self.parked.postpone({main: _behind(main, replay, lane.error)})
        return {main}

    def _held(self, lanes: Collection[Lane]) -> Mapping[Lane, str]:
        batch = self.work.batch
        if not lanes:
            return {}
        return self.source_session(
            lambda source: backoff.held(source, batch.subscription_id, batch.shards, lanes)
        )

    def _deliver(self, destination: str, left: set[Lane], rows: pa.Table) -> None:
        """Deliver a chunk, and take delivered messages out of their lane.

        Only messages of the lanes ``left`` are delivered; lanes that fail are removed from it.
        """
        rows, why = self.transforming.ready(rows.filter(is_in(rows, left)), self.source_session)
        if rows.num_rows:
            self._deliver_ready(destination, left, rows)
        if why is not None and left:
            problem = ConfigurationError(why)
            self.parked.hold(left, why)
            if why in self.transforming.problems.values():
                self.parked.postpone(dict.fromkeys(left, problem))
            left.clear()

    def _deliver_ready(self, destination: str, left: set[Lane], rows: pa.Table) -> None:
        set_aside = self.parked.aside(destination)
        at_most_once: list[Part] = []
        for part in self._fit(destination, rows, set_aside):
            if part.quality == AT_MOST_ONCE:
                at_most_once.append(part)
            elif destination in set_aside.down:
                set_aside.wait(part)
            else:
                self.storing.store(part, set_aside)
        if destination in set_aside.down or self.storing.brake.engaged(destination):
            for part in at_most_once:
                set_aside.wait(part)
            at_most_once = []
        sent_once = [
            number for part in at_most_once for number in part.rows["parked_id"].to_pylist()
        ]
        later = pc.is_in(rows["parked_id"], pa.array(sent_once, pa.int64()))
        others = rows.filter(pc.invert(later))
        if others.num_rows or set_aside:
            self.parked.settle(others, set_aside)
        for lane, error in set_aside.failed.items():
            self.parked.hold([lane], str(error))
        left.difference_update(set_aside.failed)
        if set_aside.down:
            self.parked.postpone(dict.fromkeys(left, next(iter(set_aside.failed.values()))))
            left.clear()
        for part in at_most_once:
            self._deliver_once(part)

    def _fit(self, destination: str, rows: pa.Table, set_aside: SetAside) -> Iterator[Part]:
        """Yield deliverable parts by quality; bury messages too large, in doubt or expired."""
        kind = rows[KIND][0].as_py()
        rows = set_aside.bury_unread(rows)
        rows = self.transforming.bury_at_fault(rows, set_aside)
        self.transforming.keep(rows, self.source_session)
        if kind == Kind.DOUBT:
            set_aside.bury(rows, destination, *MAY_HAVE_LEFT)
            return
        for part in self._qualities(destination, rows):
            fresh = part if kind in SENT_AGAIN else self._unexpired(part, set_aside)
            if fresh.rows.num_rows:
                yield fresh

    def _unexpired(self, part: Part, set_aside: SetAside) -> Part:
        """Return a part without expired messages; bury those that the destination does not have.

        A destination that cannot tell is down, and the whole part waits.
        """
        expired_ones = set_aside.expired(part.rows)
        if expired_ones is None:
            return part
        never = part.rows.filter(expired_ones)
        if part.quality != AT_MOST_ONCE:  # a message sent at most once has left its lane
            try:
                never = self.storing.not_stored(part, never, set_aside)
            except SafError:
                return part  # it waits now, or storing raises the same error
        set_aside.bury(never, part.waits_at, "expired", dropped.EXPIRED)
        gone = pc.is_in(part.rows["parked_id"], never["parked_id"].combine_chunks())
        return replace(part, rows=part.rows.filter(pc.invert(gone)))

    def _deliver_once(self, part: Part) -> None:
        """Deliver a part at most once, after every step that could raise."""
        self._doubt(part)
        set_aside = self.parked.aside()
        isolate(
            part.rows,
            lambda rows: self.storing.store_once(replace(part, rows=rows), set_aside),
            lambda message, error: set_aside.bury(message, part.waits_at, "rejected", error),
        )
        self.parked.settle(part.rows, set_aside)

    def _qualities(self, destination: str, rows: pa.Table) -> Iterator[Part]:
        """Yield messages by their quality of service.

        Messages that an operator parked again, or that were parked while their destination was
        unknown, have none: they get the quality that their route names now.
        """
        if rows.num_rows and rows[KIND][0].as_py() == Kind.MAIN:
            self.lanes.look(self.source_session, self.work.batch, rows)
            rows = rows.drop_columns(list(LANE))
        qualities = rows["quality"]
        if qualities.null_count:
            by_route = self.finding_routes.matcher.quality(rows, destination)
            default = self.rules.qualities[destination]
            qualities = pc.coalesce(qualities, by_route, pa.scalar(default))
        for quality in pc.unique(qualities).to_pylist():
            group = rows.filter(pc.equal(qualities, quality))
            yield Part(destination=destination, quality=quality, rows=group, waits_at=destination)

    def _parked(self, destination: str, lanes: Collection[Lane]) -> Iterator[pa.Table]:
        found = any(lane.found for lane in lanes)
        log = parking.as_log([*selected(self.rules.max_bytes), "batch"], found=found)
        columns = [*log, "opened_at", "parked_id", *LANE, "quality", sql.SQL("id AS log_id")]
        return self.parked.read(destination, lanes, columns, found=found)

    def _doubt(self, part: Part) -> None:
        """Note durably that messages are about to be sent that must not be sent again.

        They wait in a lane from which nothing is sent. If they stay there because this process ends
        before they leave, they become dead letters.
        """
        lane = Lane(destination=part.waits_at, kind=Kind.DOUBT)
        subscription_id = self.work.batch.subscription_id
        ids = part.rows["parked_id"].to_pylist()

        def doubt(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.work.batch)
            parking.touch(source, subscription_id, [lane], "sent at most once")
            parking.move(source, lane.destination, given([lane] * len(ids)), ids)
            fail_point("unpark")

        self.source_session(doubt)
        self.lanes.untried.add(lane)  # soon empty, unless it has other messages
        fail_point("unpark_commit")


def _group(lane: Backoff) -> tuple[str, int]:
    return lane.destination, backoff.rank(lane)


def _behind(lane: Lane, older: Lane, why: str) -> Unavailable:
    return Unavailable(str(lane), f"behind {older}: {why}")
