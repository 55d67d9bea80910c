"""Releasing: due parked messages are delivered before new ones.

Messages that have waited for a route, or for their router, first move to lanes of the destinations
that routes lead to now (`saf.engine.parked_lanes.FindingRoutes`).

Lanes of a destination are released together, by their rank (`saf.setaside.backoff.rank`): one
ordered read, and chunks that each go to the destination in one transaction, whatever lanes their
messages are in. An obstacle for one lane keeps back only that lane's messages.

Messages of healthy lanes must not wait for long. So after `RELEASE_SECONDS`, and at least one
chunk, the task continues with new messages. The next cycle releases the rest, after the lanes that
had no turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.context import Context
from saf.engine.destination_sessions import nowhere
from saf.engine.parked_lanes import FindingRoutes, ParkedLanes
from saf.engine.parts import Part, inputs_of
from saf.engine.set_aside import MAY_HAVE_LEFT, SetAside
from saf.engine.storing import Storing
from saf.errors import ConfigurationError, SafError, Unavailable
from saf.failpoints import fail_point
from saf.log.columns import selected
from saf.log.cursor import lock_cursors
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside import backoff, dropped, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Kind, Lane, given, service_lane
from saf.setaside.lane_columns import KIND, LANE, is_in, lanes_of
from saf.setaside.parking import Backoff

SENT_AGAIN = (Kind.REPLAY, Kind.FOUND_REPLAY)
"""Kinds of lanes whose messages are sent even if they have expired since: they replace messages
that a destination has lost, and their reader decides."""

RELEASE_SECONDS = 5.0
"""Seconds after which no further chunk is begun; the current chunk is finished."""


class Releasing:
    """Delivers one task's parked messages."""

    def __init__(self, context: Context, storing: Storing) -> None:
        self.context = context
        self.storing = storing
        self.parked = ParkedLanes(context)
        self.finding_routes = FindingRoutes(context, self.parked)

    def release_all(self) -> None:
        """Deliver the due messages of these shards in the lanes of the work."""
        self.parked.begin(RELEASE_SECONDS)
        context = self.context
        if context.work.of_services:
            self._bury_unrouted()
        for lane in context.work.waiting:
            if not lane.due:
                context.lanes.hold(lane.own, lane.error)
        due = {lane.own: lane for lane in context.work.waiting if lane.due}
        found = self.finding_routes.find([lane for lane in due if not lane.destination])
        if found:
            due |= {lane.own: lane for lane in self._named(found) if lane.due}
        routed = backoff.in_turn(lane for lane in due.values() if lane.destination)
        for number, ((destination, _), group) in enumerate(groupby(routed, _group)):
            lanes = [lane.own for lane in group]
            if number and self.parked.over:
                self.parked.hold(lanes, "others had their turn")
            else:
                with context.source.in_hand(destination):
                    self._release(destination, lanes)

    def forget_untried(self) -> None:
        """Forget lanes that had no messages here, and that got no new ones."""
        if untried := self.context.lanes.untried:
            subscription_id = self.context.work.batch.subscription_id
            self.context.source(lambda source: backoff.forget(source, subscription_id, untried))

    def _named(self, lanes: Collection[Lane]) -> Sequence[Backoff]:
        """Return what the source knows of lanes."""
        subscription_id = self.context.work.batch.subscription_id
        return self.context.source(lambda source: backoff.named(source, subscription_id, lanes))

    def _bury_unrouted(self) -> None:
        """Make dead letters of messages that expired without a route and were sent nowhere."""

        def bury(source: psycopg.Connection[Any]) -> int:
            lock_cursors(source, self.context.work.batch)
            return dropped.bury_unrouted(source, self.context.work.batch)

        dead = dropped.AT_ONCE
        while dead == dropped.AT_ONCE:
            dead = self.context.source(bury)
            self.context.receipts.of(None).dead += dead
        fail_point("unrouted_expired")

    def _release(self, destination: str, lanes: Sequence[Lane]) -> None:
        """Deliver the messages of these shards in some lanes of a destination."""
        blocked = self._blocked(destination, lanes)
        self.parked.postpone(blocked)
        free, tried = set(lanes) - blocked.keys(), set[Lane]()
        left = free - self._behind_replay(destination, free)
        for rows in self._parked(destination, left):
            paused = self.context.paused(destination)
            used_up = self.context.used_up.get(destination)
            if tried and (paused or used_up or self.parked.over):
                self.parked.succeed(tried & left)
                self.parked.hold(left, used_up or "others had their turn")
                if paused:
                    self.parked.postpone(dict.fromkeys(left, paused))
                return
            tried.update(lanes_of(rows, destination)[0])
            if self.parked.isolate(destination, rows, partial(self._deliver, destination, left)):
                break
        for lane in left & tried:
            self.context.lanes.emptied(lane)
        self.parked.succeed(left & tried)
        self.context.lanes.untried |= left - tried

    def _blocked(self, destination: str, lanes: Sequence[Lane]) -> dict[Lane, SafError]:
        """Return the lanes that cannot leave, and why: no match, a pause, or older messages wait
        elsewhere."""
        if paused := self.context.paused(destination):
            return dict.fromkeys(lanes, paused)
        if destination not in self.context.rules.qualities:
            return dict.fromkeys(lanes, nowhere(destination))
        main, held = Lane(destination=destination), self.context.lanes.held
        older = {
            lane: main if main in held else service_lane(destination, lane.subject)
            for lane in lanes
            if lane.kind in (Kind.SERVICE, Kind.FOUND_ROUTE) and (main in held or lane.found)
        }
        if main not in held:
            held = self.context.held_among({*older.values()})
        return {
            lane: _behind(lane, other, held[other])
            for lane, other in older.items()
            if other in held
        }

    def _behind_replay(self, destination: str, lanes: Collection[Lane]) -> set[Lane]:
        """Let a destination's own lane wait behind a replay; return the lanes that wait.

        A replay that has failed goes first at its next attempt. A replay that the open batch has
        not passed yet goes in the next cycle; this is not a failure.
        """
        main = Lane(destination=destination)
        replay = Lane(destination=destination, kind=Kind.REPLAY)
        held = main in lanes and replay in self.context.lanes.held
        if not held or not self.context.held_among({replay}):
            return set()
        for lane in self._named({replay}):
            if lane.due:
                self.parked.hold([main], lane.error)
            else:
                self.parked.postpone({main: _behind(main, replay, lane.error)})
        return {main}

    def _deliver(self, destination: str, left: set[Lane], read: pa.Table) -> bool:
        """Deliver a chunk, and take settled messages out of their lanes; a name for each state.

        read -> ready -> fit -> parts, stored or set aside -> settled -> sent at most once

        Only messages of the lanes ``left`` are delivered; lanes that fail are removed from it.
        Return whether none is left.
        """
        transforming, source = self.context.transforming, self.context.source
        ready, why = transforming.ready(read.filter(is_in(read, left)), source)
        if ready.num_rows:
            set_aside = self.parked.aside(destination)
            fit = transforming.bury_at_fault(set_aside.bury_unread(ready), set_aside)
            transforming.keep(fit, source)
            at_most_once = self._deliver_parts(destination, fit, set_aside) if fit.num_rows else []
            settled = ready
            for part in at_most_once:
                settled = inputs_of(settled, part.rows, but=True)
            if settled.num_rows or set_aside:
                self.parked.settle(settled, set_aside)
            self._hold_failed(left, set_aside)
            for part in at_most_once:
                self._deliver_once(part, left)
        if why is not None and left:
            self.parked.hold(left, why)
            if why in transforming.problems.values():
                self.parked.postpone(dict.fromkeys(left, ConfigurationError(why)))
            left.clear()
        return not left

    def _deliver_parts(self, destination: str, rows: pa.Table, set_aside: SetAside) -> list[Part]:
        """Store messages of one rank, part by part.

        Return the parts that are to be sent at most once, after every step that could raise.
        """
        kind, brake = rows[KIND][0].as_py(), self.context.brake
        if kind == Kind.DOUBT:
            set_aside.bury(rows, destination, *MAY_HAVE_LEFT)
            return []
        at_most_once = []
        for waiting in self._parts(destination, rows):
            part = waiting if kind in SENT_AGAIN else self.storing.unexpired(waiting, set_aside)
            if part.quality == AT_MOST_ONCE:
                at_most_once.append(part)
            elif destination in set_aside.down:
                set_aside.wait(part)
            elif part.rows.num_rows:
                self.storing.deliver(part, set_aside)
        braked = brake.engaged(destination)
        if destination not in set_aside.down and not braked:
            return [part for part in at_most_once if part.rows.num_rows]
        for part in at_most_once:
            if braked:
                set_aside.fail(part.lanes, braked)
                set_aside.down.add(destination)
            set_aside.wait(part)
        return []

    def _hold_failed(self, left: set[Lane], set_aside: SetAside) -> None:
        """Park new messages behind lanes that have failed, and remove these from ``left``."""
        failed = set_aside.failed
        for lane, error in failed.items():
            self.parked.hold([lane], str(error))
        left.difference_update(failed)
        if set_aside.down:
            self.parked.postpone(dict.fromkeys(left, next(iter(failed.values()))))
            left.clear()

    def _deliver_once(self, part: Part, left: set[Lane]) -> None:
        """Deliver a part at most once, after every step that could raise.

        Remove lanes from ``left`` from which nothing more is to be sent now.
        """
        self._doubt(part)
        set_aside = self.parked.aside()
        isolate(
            part.rows,
            lambda rows: self.storing.deliver(replace(part, rows=rows), set_aside),
            lambda message, error: set_aside.bury(message, part.destination, "rejected", error),
        )
        self.parked.settle(part.rows, set_aside)
        self._hold_failed(left, set_aside)

    def _parts(self, destination: str, rows: pa.Table) -> Iterator[Part]:
        """Yield messages by their quality of service.

        Messages that an operator parked again, or that were parked while their destination was
        unknown, have none: they get the quality that their route names now.
        """
        if rows[KIND][0].as_py() == Kind.MAIN:
            self.context.find_held(rows)
            rows = rows.drop_columns(list(LANE))
        qualities = rows["quality"]
        if qualities.null_count:
            by_route = self.context.matcher.quality(rows, destination)
            default = self.context.rules.qualities[destination]
            qualities = pc.coalesce(qualities, by_route, pa.scalar(default))
        for quality in pc.unique(qualities).to_pylist():
            group = rows.filter(pc.equal(qualities, quality))
            yield Part(destination=destination, quality=quality, rows=group)

    def _parked(self, destination: str, lanes: Collection[Lane]) -> Iterator[pa.Table]:
        found = any(lane.found for lane in lanes)
        log = parking.as_log([*selected(self.context.rules.max_bytes), "batch"], found=found)
        columns = [*log, "opened_at", "parked_id", *LANE, "quality", sql.SQL("id AS log_id")]
        return self.parked.read(destination, lanes, columns, found=found)

    def _doubt(self, part: Part) -> None:
        """Note durably that messages are about to be sent that must not be sent again.

        They wait in a lane from which nothing is sent. If they stay there because this process ends
        before they leave, they become dead letters.
        """
        lane = Lane(destination=part.destination, kind=Kind.DOUBT)
        batch = self.context.work.batch
        ids = part.rows["parked_id"].to_pylist()

        def doubt(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, batch)
            parking.touch(source, batch.subscription_id, [lane], "sent at most once")
            parking.move(source, lane.destination, given([lane] * len(ids)), ids)
            fail_point("unpark")

        self.context.source(doubt)
        self.context.lanes.untried.add(lane)  # soon empty, unless it has other messages
        fail_point("unpark_commit")


def _group(lane: Backoff) -> tuple[str, int]:
    return lane.destination, backoff.rank(lane)


def _behind(lane: Lane, older: Lane, why: str) -> Unavailable:
    return Unavailable(str(lane), f"behind {older}: {why}")
