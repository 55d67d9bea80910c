"""Delivery: what a Spark task does with the messages that it reads.

First the parked messages whose time has come, lane by lane; then the batch. Per chunk, in the
order of the ids:

0. routers: to whom each message is really addressed; routes that share: which one it takes. What
   is to be remembered of both is written at the source, durably, before anything is sent
1. one transaction per destination; committed, durable, before the next step
2. at_most_once routes: record the attempt at the source, durably; then send. After all that could
   raise for a message, because an attempt is not made again
3. one transaction at the source: move the position, and with it set aside what could not go

What is set aside while something is still to be stored is written at the source first: a crash
before step 3 would leave it below the watermark, where it looks stored.

What stands in the way of some messages delays only those: a destination that is down, a missing
route or service parks them (see `saf.setaside.parking`), a message that is rejected, expired or too
large becomes a dead letter (see `saf.setaside.dead`), found among its neighbours by halving. While
the only destination is down, the batch stays open instead.

A crash anywhere loses nothing: the next run reads the same batch from the last position, and
the destination's watermark drops what it has. A task never raises for what an operator can wait
out or mend: it ends there and says so in its receipt. Receipts, one per task and destination,
are all that reaches the driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.marks import place_name
from saf.destinations.places import beyond
from saf.engine.aside import MAY_HAVE_LEFT, Aside
from saf.engine.chunks import chunks
from saf.engine.held_lanes import HeldLanes
from saf.engine.load_sharing import share
from saf.engine.matcher import Matcher
from saf.engine.pulse import Pulse
from saf.engine.receipts import Receipts
from saf.engine.releasing import Releasing
from saf.engine.resolving import Answers, Resolver
from saf.engine.sorting import Part, sort, unroutable
from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing, obstacle
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Ahead, Behind, Fenced, Rejected, SafError, Unavailable, UsageError
from saf.failpoints import fail_point
from saf.log.cursor import advance, attempt, hold
from saf.routing.matching import AT_MOST_ONCE
from saf.setaside import backoff, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Lane

BEATS = 6
"""How often in a lease a task is heard of: twice as often as the lease is renewed."""

EXPECTED = (Unavailable, Rejected, Fenced, Ahead, Behind, UsageError)


class Delivery:
    """One task: the remaining messages of one batch, and the parked ones of its shards."""

    def __init__(
        self, number: int, work: Work, rules: ForwardingRules, answers: Answers | None = None
    ) -> None:
        self.work = work
        self.matcher = Matcher(work.routes)
        self.rules = rules
        self.receipts = Receipts(number)
        self.lanes = HeldLanes(of_services=work.of_services)
        self.source_session = SourceSession(work, rules.attempts)
        self.resolver = Resolver(work.routes.routers, self.matcher, self.source_session, answers)
        self.storing = Storing(work, rules, self.source_session, self.lanes, self.receipts)
        self._set_aside: dict[str, pa.Array] = {}
        """Ids beyond the position that are set aside already, by destination."""
        self._attempted: dict[int, int] | None = None
        """By shard, up to which id messages had been attempted before this task."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        summary = self.receipts.of(None)
        releasing = Releasing(
            self.work,
            self.resolver,
            self.matcher,
            self.rules,
            self.source_session,
            self.lanes,
            self.receipts,
            self.storing,
        )
        try:
            with self._pulse():
                self._find_set_aside()
                releasing.release_all()
                for rows in chunks(batches, self.rules.chunk_rows, self.rules.chunk_bytes):
                    if isolate(rows, self._forward, self._bury, self._find_set_aside):
                        summary.stopped = True
                        break
                else:
                    summary.complete = True
                    releasing.forget_untried()
                    if error := self.storing.to_repair:
                        summary.error_kind, summary.error = type(error).__name__, str(error)
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            self.storing.close()
            self.source_session.close()
        return list(self.receipts)

    def _pulse(self) -> Pulse:
        patience = self.work.dsn.bounds.chunk_seconds
        return Pulse(self.source_session.beat, self.work.lease_seconds / BEATS, patience)

    def _forward(self, rows: pa.Table) -> bool:
        """Steps 0 to 3 for one chunk; return whether the task should stop."""
        position = int(rows["id"][-1].as_py())
        aside = Aside(work=self.work)
        rows = aside.bury_unfit(self._without(rows, ""), self.rules.max_bytes)
        self.lanes.look(self.source_session, self.work.batch, rows)
        resolution = self.resolver.resolve(rows, self.lanes.held)
        if self.resolver:
            self.lanes.look(self.source_session, self.work.batch, rows, resolution.rows)
        for some, error in resolution.dead:
            aside.bury(some, "", "unresolved", error)
        rows = self._not_set_aside(self.matcher.route(resolution.rows))
        rows = share(rows, self.matcher.matches, self.source_session.choose)
        parts = [
            replace(part, rows=self._without(part.rows, part.waits_at))
            for part in sort(rows, self.matcher.matches, self.rules.qualities, self.lanes.held)
        ]
        if resolution.waiting is not None:
            parts.append(unroutable(resolution.waiting))
        once = [part for part in parts if part.quality == AT_MOST_ONCE]
        for part in parts:
            if part.quality != AT_MOST_ONCE and not self._parks(part, aside):
                self.storing.store(part, (self.work.batch.number, position), aside)
        if once:
            once = [self._not_attempted(part, aside) for part in once]
            self._send_once(once, position, aside)
        self._stay_open(aside)
        return self._settle(aside, position)

    def _settle(self, aside: Aside, position: int) -> bool:
        """Step 3; return whether the task should stop."""

        def settle(source: psycopg.Connection[Any]) -> bool:
            # once, also where the answer to the commit before got lost; not only here is that seen
            # to, because `Aside.write` leaves out what is there already, and `advance` fences
            new = bool(aside) and hold(source, self.work.batch) < position
            stop = advance(source, self.work.batch, position)
            self.storing.acknowledge(source)
            if new:
                aside.write(source)
            fail_point("mark_forwarded")
            return stop

        stop = self.source_session(settle)
        fail_point("mark_commit")
        self.storing.settled()
        aside.written()
        summary = self.receipts.of(None)
        summary.parked += aside.parked_messages
        summary.dead += aside.dead_letters
        return stop

    def _bury(self, message: pa.Table, error: str) -> bool:
        """Make a dead letter of the one message that a step has raised for, and go past it."""
        aside = Aside(work=self.work)
        aside.bury(self._without(message, ""), "", "rejected", error)
        return self._settle(aside, int(message["id"][0].as_py()))

    def _parks(self, part: Part, aside: Aside) -> bool:
        """Park a part that cannot go, behind those of its lanes that wait; whether it was one."""
        for lane in part.lanes:
            if lane not in self.lanes.held and (obstacle := self._obstacle(part, lane)):
                aside.failed[lane] = obstacle
                self.lanes.hold(lane, str(obstacle))
        # its lane waits; or it is not the destination's own, so it is behind others
        waits = not part.main or Lane(destination=part.waits_at) in self.lanes.held
        if waits:
            aside.wait(part)
        return waits

    def _obstacle(self, part: Part, lane: Lane) -> SafError | None:
        """Why messages have no way out of a lane."""
        if part.destination is None:
            return self.resolver.obstacle(lane)
        return obstacle(self.rules, part.destination, part.quality)

    def _send_once(self, parts: Sequence[Part], position: int, aside: Aside) -> None:
        """Step 2: at most once. What may have left before is not sent, and not parked either."""
        parts = [part for part in parts if not self._parks(part, aside)]
        if not parts:
            return
        aside.write_ahead(self.source_session)
        self.source_session(lambda source: attempt(source, self.work.batch, position))
        for part in parts:
            self.storing.store_once(part, aside)

    def _not_attempted(self, part: Part, aside: Aside) -> Part:
        """A part without what a task before this one may have sent, which is buried."""
        if self._attempted is None:
            self._attempted = self.source_session(
                lambda source: attempt(source, self.work.batch, 0)
            )
        number = self.work.batch.number
        marks = {
            (place_name(lane), shard): (number, before)
            for lane in part.lanes
            for shard, before in self._attempted.items()
        }
        fresh = beyond(part.rows, number, marks)
        if fresh.num_rows < part.rows.num_rows:
            left = pc.invert(pc.is_in(part.rows["id"], fresh["id"].combine_chunks()))
            aside.bury(part.rows.filter(left), part.waits_at, *MAY_HAVE_LEFT)
        return replace(part, rows=fresh)

    def _stay_open(self, aside: Aside) -> None:
        """Raise, instead of parking, while the only destination is down."""
        alone = Lane(destination=self.work.alone or "")
        if alone in aside.failed:
            error, subscription_id = aside.failed[alone], self.work.batch.subscription_id
            self.source_session(
                lambda source: backoff.postpone(source, subscription_id, {alone: str(error)})
            )
            raise error

    def _find_set_aside(self) -> None:
        """What was set aside before a crash is not sent, and new messages wait behind it."""
        batch = self.work.batch
        ids: dict[str, list[int]] = defaultdict(list)
        for id_, destination, lane in self.source_session(lambda s: parking.set_aside(s, batch)):
            ids[destination].append(id_)
            if lane is not None:
                self.lanes.hold(lane, "behind others")
                self.lanes.ahead.add(lane)
        self._set_aside = {name: pa.array(some, pa.int64()) for name, some in ids.items()}

    def _not_set_aside(self, rows: pa.Table) -> pa.Table:
        """The rows of which anything is left to do: of a topic, some copy may be."""
        if not self._set_aside:
            return rows
        topics = [number for number, match in enumerate(self.matcher.matches) if match.to_all]
        copies = pc.is_in(rows["route"], pa.array(topics, pa.int32()))
        aside = pa.concat_arrays(list(self._set_aside.values()))
        return rows.filter(pc.or_(copies, pc.invert(pc.is_in(rows["id"], aside))))

    def _without(self, rows: pa.Table, destination: str) -> pa.Table:
        """The rows that are not set aside for a destination."""
        if destination not in self._set_aside:
            return rows
        return rows.filter(pc.invert(pc.is_in(rows["id"], self._set_aside[destination])))
