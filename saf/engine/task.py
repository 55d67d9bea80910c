"""The task: the delivery of one item of work, in Spark or elsewhere.

Due parked messages come first, lane by lane; then the batch. Per chunk, ordered by id:

0. Find the results of transforms, the services that messages for routers are really addressed to,
   and the route that each message takes where routes share. Results to remember are written at the
   source, durably, before anything is sent.
1. One transaction per destination; committed and durable before the next step.
2. at_most_once routes: record the attempt at the source, durably; then send.
3. One transaction at the source: move the position, or close the batch with its last chunk; and set
   aside what could not go.

An obstacle delays only the messages that it is about. A destination that is down, and a missing
route or service, park them (see `saf.setaside.parking`). A message that is rejected, expired or too
large becomes a dead letter (see `saf.setaside.dead`); halving finds it among its neighbours. While
the only destination is down, the batch stays open instead.

A crash loses nothing: the next run reads the same batch from the last position, and the
destination's watermark drops what the destination has. Two rules make this true of messages that
are set aside, and of messages that are sent at most once:

- Parts that wait are set aside before anything is stored, and are written at the source before
  other parts are stored. Otherwise a crash before step 3 would leave them below the watermark,
  unwritten: once their lane is open, they would count as stored.
- Parts that are sent at most once go last, after every step that could raise for a message. The
  attempt is recorded before it is made, because it is not repeated.

The next run finds the work of an earlier task on the batch (`EarlierTask`). Messages that it set
aside beyond the position are not sent, and new messages wait behind them. Messages that it tried to
send at most once are not sent again. The earlier task may still be alive: Spark starts a second run
of a task that is slow.

A task never raises for a problem that an operator can wait out or repair: it ends, and its receipt
names the problem. Receipts, one per task and destination, are all that reaches the driver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.engine.context import Context
from saf.engine.destination_sessions import obstacle
from saf.engine.parts import Part, share, split
from saf.engine.pulse import Pulse
from saf.engine.releasing import Releasing
from saf.engine.set_aside import MAY_HAVE_LEFT, SetAside
from saf.engine.source import chunks, with_last
from saf.engine.storing import Storing
from saf.engine.work import Receipt
from saf.errors import (
    Ahead,
    Behind,
    Fenced,
    Paused,
    Rejected,
    Restored,
    SafError,
    Unavailable,
    UsageError,
)
from saf.failpoints import fail_point
from saf.log.cursor import (
    advance,
    attempt,
    attempted,
    finish,
    is_finished,
    learn_set_aside,
    lock_cursors,
)
from saf.routing.matching import AT_MOST_ONCE, Match
from saf.setaside import backoff, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Lane

BEATS = 6
"""Signs of life that a task gives per lease: twice as many as the lease's renewals."""

EXPECTED = (Unavailable, Rejected, Fenced, Ahead, Behind, Paused, UsageError)
"""Errors that end a task, and that its receipt names."""


class Task:
    """One task: it forwards the rest of one batch, and the parked messages of its shards.

    With ``partly``, it gets only the first messages of the rest, and another task continues. With
    ``closes``, it closes the batch with the last chunk. Otherwise its driver does, because a task
    that may run twice has to find the batch open.
    """

    def __init__(self, context: Context, *, closes: bool = False, partly: bool = False) -> None:
        self.context = context
        self.closes = closes
        self.partly = partly
        self.read = 0
        """The last id of the previous chunk."""
        self.end: int | None = None
        """The last id of the batch, once its last chunk is in hand."""
        self.earlier = EarlierTask(context)
        self.storing = Storing(context)

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        context, summary = self.context, self.context.receipts.of(None)
        work, rules = context.work, context.rules
        releasing = Releasing(context, self.storing)
        patience = work.dsn.bounds.chunk_seconds
        try:
            with Pulse(context.source.beat, work.lease_seconds / BEATS, patience):
                self.earlier.find_set_aside()
                if not self.closes:  # its batch may have been read before an earlier task's work
                    context.source.find(lambda source: learn_set_aside(source, work.batch))
                releasing.release_all()
                cut = chunks(batches, rules.chunk_rows, rules.chunk_bytes)
                for rows, last in (
                    with_last(cut) if self.closes else ((part, False) for part in cut)
                ):
                    self._refuse_doubled(rows)
                    self.end = int(rows["id"][-1].as_py()) if last else None
                    stop = isolate(rows, self._forward, self._bury, self.earlier.find_set_aside)
                    if stop and not summary.closed:
                        summary.stopped = True
                        break
                else:
                    summary.complete, summary.stopped = not self.partly, self.partly
                    releasing.forget_untried()
                    if error := context.to_repair:
                        summary.error_kind, summary.error = type(error).__name__, str(error)
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            for receipt in context.receipts:
                if receipt.destination is not None:
                    receipt.rejecting = context.brake.counts().get(receipt.destination, 0)
            context.destinations.close()
            context.source.close()
        return list(context.receipts)

    def _forward(self, read: pa.Table) -> bool:
        """Run steps 0 to 3 for one chunk, a name for each state; return whether to stop.

        read -> fit -> resolved -> routed -> shared -> parts, sent or set aside -> settled
        """
        context, position = self.context, int(read["id"][-1].as_py())
        source, transforming = context.source, context.transforming
        set_aside = SetAside(work=context.work, position=position)
        fit = set_aside.bury_unfit(self.earlier.fresh(read), context.rules.max_bytes)
        transforming.read_results(fit, source)
        fit = transforming.bury_at_fault(fit, set_aside)
        transforming.keep(fit, source)
        context.find_held(fit)
        resolution = context.resolver.resolve(fit, context.lanes.held)
        resolved = resolution.rows
        if context.resolver:
            context.find_held(fit, resolved)
        for rows, error in resolution.dead:
            set_aside.bury(rows, "", "unresolved", error)
        matches = context.matcher.matches
        routed = self.earlier.unfinished(context.matcher.route(resolved), matches)
        shared = share(routed, matches, source.choose)
        parts = [
            replace(part, rows=self.earlier.fresh(part.rows, part.destination))
            for part in split(
                shared, matches, context.rules.qualities, context.lanes.held, resolution.waiting
            )
        ]
        self._send(parts, set_aside)
        return self._settle(set_aside, position)

    def _refuse_doubled(self, rows: pa.Table) -> None:
        """Reject rows with the same id, because marks cannot tell them apart."""
        ids = rows["id"].to_numpy()
        repeats = np.flatnonzero(np.diff(ids, prepend=self.read) == 0)
        if repeats.size:
            why = f"saf.outbox has several messages with id {ids[repeats[0]]}"
            work = self.context.work
            raise Restored(work.dsn.database, f"broker {work.broker!r}", [why])
        self.read = int(ids[-1])

    def _send(self, parts: Sequence[Part], set_aside: SetAside) -> None:
        """Send the parts of a chunk: each is stored, parked in its lanes, or buried.

        Raises:
            SafError: the only destination is down or paused, so parking would gain nothing.
        """
        at_most_once = [part for part in parts if part.quality == AT_MOST_ONCE]
        others = [part for part in parts if part.quality != AT_MOST_ONCE]
        for part in [part for part in others if not self._waits(part, set_aside)]:
            # the storing of another part may have held its lane since
            if not self._waits(part, set_aside):
                self.storing.deliver(part, set_aside)
        for part in self._attempted(at_most_once, set_aside):
            self.storing.deliver(part, set_aside)
        self._stay_open(set_aside)

    def _attempted(self, parts: Sequence[Part], set_aside: SetAside) -> Sequence[Part]:
        """Record that parts are about to be sent at most once; return those not tried before."""
        if not parts:
            return parts
        source, batch = self.context.source, self.context.work.batch
        before = source(lambda connection: attempted(connection, batch))
        parts = self.earlier.unattempted(parts, before, set_aside)
        parts = [part for part in parts if not self._waits(part, set_aside)]
        if not parts:
            return parts
        set_aside.write_ahead(source)
        before = source(lambda connection: attempt(connection, batch, set_aside.position))
        # another run of this task has already tried the attempts that are recorded now
        return self.earlier.unattempted(parts, before, set_aside)

    def _waits(self, part: Part, set_aside: SetAside) -> bool:
        """Park a part that cannot go, or waits behind others in its lanes; return whether it
        waits."""
        lanes = self.context.lanes
        for lane in part.lanes:
            if lane not in lanes.held and (obstacle := self._obstacle(part, lane)):
                set_aside.fail([lane], obstacle)
                lanes.hold(lane, str(obstacle))
        # its lane waits; or the part is not in the destination's own lane, so it is behind others
        waits = not part.main or Lane(destination=part.destination) in lanes.held
        if waits:
            set_aside.wait(part)
        return waits

    def _obstacle(self, part: Part, lane: Lane) -> SafError | None:
        """Return why messages cannot leave a lane; None if they can."""
        if not part.destination:
            return self.context.resolver.obstacle(lane)
        return self.context.paused(part.destination) or obstacle(
            self.context.rules, part.destination, part.quality
        )

    def _stay_open(self, set_aside: SetAside) -> None:
        """Raise, instead of parking, if the only destination is down or paused.

        The messages of this chunk that it has stored are done: the position moves past them. If
        this is not possible, because an earlier message waits, all waiting messages are parked.
        """
        lane, batch = Lane(destination=self.context.work.alone or ""), self.context.work.batch
        if lane not in set_aside.failed or not set_aside.parked:
            return
        error, taken, first = set_aside.failed[lane], set_aside.taken, set_aside.waits_from()
        if taken and (first is None or taken > first):
            return

        def stay(source: psycopg.Connection[Any]) -> None:
            if taken and first is not None:
                advance(source, batch, first - 1)
            moving = [lane] if taken else []
            backoff.postpone(source, batch.subscription_id, {lane: error}, moving)
            self.context.brake.write(source)

        self.context.source(stay)
        raise error

    def _settle(self, set_aside: SetAside, position: int) -> bool:
        """Run step 3: move the position, or close the batch; return whether to stop."""

        ends, attempts = position == self.end, count()

        def settle(source: psycopg.Connection[Any]) -> bool:
            # done once, even if the answer to an earlier commit was lost. `SetAside.write` and
            # `advance` ensure this too: the first skips messages that are set aside already, the
            # second fences
            batch = self.context.work.batch
            if next(attempts) and ends and is_finished(source, batch):
                return False
            before = lock_cursors(source, batch) if set_aside else position
            stop = finish(source, batch) if ends else advance(source, batch, position)
            self.context.write(source)
            set_aside.write(source, before)
            set_aside.count_left_out(source, beyond=before)
            fail_point("mark_forwarded")
            return stop

        stop = self.context.source(settle)
        fail_point("mark_commit")
        self.context.written()
        set_aside.written()
        summary = self.context.receipts.of(None)
        summary.parked += set_aside.parked_messages
        summary.dead += set_aside.dead_letters
        summary.closed |= ends
        return stop

    def _bury(self, message: pa.Table, error: str) -> bool:
        """Make a dead letter of a single message for which a step has raised; move past it."""
        position = int(message["id"][0].as_py())
        set_aside = SetAside(work=self.context.work, position=position)
        set_aside.bury(self.earlier.fresh(message), "", "rejected", error)
        return self._settle(set_aside, position)


class EarlierTask:
    """The work of earlier tasks on one batch.

    Call `find_set_aside` first, and after a step has raised.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._set_aside: dict[str, pa.Array] = {}
        """For each destination, the ids beyond the position that are already set aside."""

    def find_set_aside(self) -> None:
        """Find the messages that are set aside, and hold their lanes."""
        ids: dict[str, list[int]] = defaultdict(list)
        lanes, batch = self._context.lanes, self._context.work.batch
        found = self._context.source.find(lambda source: parking.set_aside(source, batch))
        for id_, destination, lane in found:
            ids[destination].append(id_)
            if lane is not None:
                lanes.hold(lane, "behind others")
                lanes.ahead.add(lane)
        self._set_aside = {name: pa.array(numbers, pa.int64()) for name, numbers in ids.items()}

    def fresh(self, rows: pa.Table, destination: str = "") -> pa.Table:
        """Return the messages not set aside for a destination; if empty, for all destinations."""
        if destination not in self._set_aside:
            return rows
        return rows.filter(pc.invert(pc.is_in(rows["id"], self._set_aside[destination])))

    def unfinished(self, routed: pa.Table, matches: Sequence[Match]) -> pa.Table:
        """Return messages with anything left to do; keep a topic's, as some copy may be left."""
        if not self._set_aside:
            return routed
        topics = [number for number, match in enumerate(matches) if match.to_all]
        copies = pc.is_in(routed["route"], pa.array(topics, pa.int32()))
        set_aside = pa.concat_arrays(list(self._set_aside.values()))
        return routed.filter(pc.or_(copies, pc.invert(pc.is_in(routed["id"], set_aside))))

    def unattempted(
        self, parts: Iterable[Part], attempted: Mapping[int, int], set_aside: SetAside
    ) -> list[Part]:
        """Return parts without the messages that may have been sent at most once; bury these.

        ``attempted`` maps each shard to the id up to which sending has been attempted.
        """
        limits = np.zeros(max(attempted) + 1, np.int64)
        limits[list(attempted)] = list(attempted.values())
        left = []
        for part in parts:
            before = part.rows["id"].to_numpy() <= limits[part.rows["shard"].to_numpy()]
            if before.any():
                set_aside.bury(part.rows.filter(pa.array(before)), part.destination, *MAY_HAVE_LEFT)
                part = replace(part, rows=part.rows.filter(pa.array(~before)))  # noqa: PLW2901
            left.append(part)
        return [part for part in left if part.rows.num_rows]
