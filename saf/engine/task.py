"""The task: delivers the messages of one item of work, in Spark or elsewhere.

Due parked messages come first, lane by lane; then the batch. Per chunk, ordered by id:

0. Find the results of transforms, the services that messages for routers are really addressed to,
   and the route that each message takes where routes share. Results to remember are written at the
   source, durably, before anything is sent.
1. One transaction per destination; committed and durable before the next step.
2. at_most_once routes: record the attempt at the source, durably; then send (`saf.engine.sending`).
3. One transaction at the source: move the position, or close the batch with its last chunk; and set
   aside what could not go.

If messages are set aside while others are still to be stored, they are written at the source first.
Otherwise a crash before step 3 would leave them below the watermark, where they count as stored.

An obstacle delays only the messages that it is about. A destination that is down, and a missing
route or service, park them (see `saf.setaside.parking`). A message that is rejected, expired or too
large becomes a dead letter (see `saf.setaside.dead`); halving finds it among its neighbours. While
the only destination is down, the batch stays open instead.

A crash loses nothing: the next run reads the same batch from the last position, and the
destination's watermark drops what the destination has. A task never raises for a problem that an
operator can wait out or repair: it ends, and its receipt names the problem. Receipts, one per task
and destination, are all that reaches the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from saf.engine.chunks import chunks, with_last
from saf.engine.destination_sessions import DestinationSessions
from saf.engine.earlier_task import EarlierTask
from saf.engine.finding_routes import FindingRoutes
from saf.engine.held_lanes import HeldLanes
from saf.engine.load_sharing import share
from saf.engine.matcher import Matcher
from saf.engine.parked_lanes import ParkedLanes
from saf.engine.parts import split
from saf.engine.pulse import Pulse
from saf.engine.receipts import Receipts
from saf.engine.releasing import Releasing
from saf.engine.resolving import Answers, Resolver
from saf.engine.sending import Sending
from saf.engine.set_aside import SetAside
from saf.engine.source_session import SourceSession
from saf.engine.storing import Storing
from saf.engine.transforming import Transforming
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Ahead, Behind, Fenced, Rejected, Restored, Unavailable, UsageError
from saf.failpoints import fail_point
from saf.log.cursor import advance, finish, is_finished, learn_set_aside, lock_cursors
from saf.setaside.isolation import isolate

BEATS = 6
"""Signs of life that a task gives per lease: twice as many as the lease's renewals."""

EXPECTED = (Unavailable, Rejected, Fenced, Ahead, Behind, UsageError)


class Task:
    """One task: it forwards the rest of one batch, and the parked messages of its shards.

    With ``partly``, it gets only the first messages of the rest, and another task continues. With
    ``closes``, it closes the batch with the last chunk. Otherwise its driver does, because a task
    that may run twice has to find the batch open.
    """

    def __init__(
        self,
        number: int,
        work: Work,
        rules: ForwardingRules,
        answers: Answers | None = None,
        transforming: Transforming | None = None,
        *,
        closes: bool = False,
        partly: bool = False,
    ) -> None:
        self.work = work
        self.matcher = Matcher(work.routes)
        self.rules = rules
        self.receipts = Receipts(number)
        self.lanes = HeldLanes(of_services=work.of_services)
        self.source_session = SourceSession(work, rules.attempts)
        self.transforming = transforming or Transforming.of(work, rules)
        self.resolver = Resolver(
            work.routes.routers,
            self.matcher,
            self.source_session,
            answers,
            transforms={
                transform: self.transforming.problems.get(transform)
                for transform in rules.transforms
            },
        )
        self.destinations = DestinationSessions(work, rules, self.source_session)
        self.storing = Storing(
            work,
            rules,
            self.source_session,
            self.lanes,
            self.receipts,
            self.destinations,
            self.transforming,
        )
        self.closes = closes
        self.partly = partly
        self.read = 0
        """The last id of the previous chunk."""
        self.end: int | None = None
        """The last id of the batch, once its last chunk is in hand."""
        self.earlier = EarlierTask(work.batch, self.source_session, self.lanes)
        self.sending = Sending(
            work=work,
            rules=rules,
            source_session=self.source_session,
            lanes=self.lanes,
            resolver=self.resolver,
            storing=self.storing,
            earlier=self.earlier,
        )

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        summary = self.receipts.of(None)
        releasing = self._releasing()
        try:
            with self._pulse():
                self.earlier.look()
                if not self.closes:  # its batch may have been read before an earlier task's work
                    self.source_session.find(lambda s: learn_set_aside(s, self.work.batch))
                releasing.release_all()
                cut = chunks(batches, self.rules.chunk_rows, self.rules.chunk_bytes)
                for rows, last in (
                    with_last(cut) if self.closes else ((part, False) for part in cut)
                ):
                    self._refuse_doubled(rows)
                    self.end = int(rows["id"][-1].as_py()) if last else None
                    stop = isolate(rows, self._forward, self._bury, self.earlier.look)
                    if stop and not summary.closed:
                        summary.stopped = True
                        break
                else:
                    summary.complete, summary.stopped = not self.partly, self.partly
                    releasing.forget_untried()
                    if error := self.storing.to_repair:
                        summary.error_kind, summary.error = type(error).__name__, str(error)
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            for receipt in self.receipts:
                if receipt.destination is not None:
                    receipt.rejecting = self.storing.brake.counts().get(receipt.destination, 0)
            self.destinations.close()
            self.source_session.close()
        return list(self.receipts)

    def _releasing(self) -> Releasing:
        parked = ParkedLanes(
            work=self.work,
            rules=self.rules,
            source_session=self.source_session,
            lanes=self.lanes,
            receipts=self.receipts,
            destinations=self.destinations,
            brake=self.storing.brake,
        )
        return Releasing(
            work=self.work,
            rules=self.rules,
            source_session=self.source_session,
            lanes=self.lanes,
            receipts=self.receipts,
            storing=self.storing,
            transforming=self.transforming,
            parked=parked,
            finding_routes=FindingRoutes(
                resolver=self.resolver,
                matcher=self.matcher,
                parked=parked,
                transforming=self.transforming,
            ),
        )

    def _pulse(self) -> Pulse:
        patience = self.work.dsn.bounds.chunk_seconds
        return Pulse(self.source_session.beat, self.work.lease_seconds / BEATS, patience)

    def _forward(self, read: pa.Table) -> bool:
        """Run steps 0 to 3 for one chunk, a name for each state; return whether to stop.

        read -> fit -> resolved -> routed -> shared -> parts, sent or set aside -> settled
        """
        position = int(read["id"][-1].as_py())
        set_aside = SetAside(work=self.work, position=position)
        fit = set_aside.bury_unfit(self.earlier.fresh(read), self.rules.max_bytes)
        self.transforming.look(fit, self.source_session)
        fit = self.transforming.bury_at_fault(fit, set_aside)
        self.transforming.keep(fit, self.source_session)
        self.lanes.look(self.source_session, self.work.batch, fit)
        resolution = self.resolver.resolve(fit, self.lanes.held)
        resolved = resolution.rows
        if self.resolver:
            self.lanes.look(self.source_session, self.work.batch, fit, resolved)
        for rows, error in resolution.dead:
            set_aside.bury(rows, "", "unresolved", error)
        matches = self.matcher.matches
        routed = self.earlier.unfinished(self.matcher.route(resolved), matches)
        shared = share(routed, matches, self.source_session.choose)
        parts = [
            replace(part, rows=self.earlier.fresh(part.rows, part.waits_at))
            for part in split(
                shared, matches, self.rules.qualities, self.lanes.held, resolution.waiting
            )
        ]
        self.sending.send(parts, position, set_aside)
        return self._settle(set_aside, position)

    def _refuse_doubled(self, rows: pa.Table) -> None:
        """Reject rows with the same id, because marks cannot tell them apart."""
        ids = rows["id"].to_numpy()
        repeats = np.flatnonzero(np.diff(ids, prepend=self.read) == 0)
        if repeats.size:
            why = f"saf.outbox has several messages with id {ids[repeats[0]]}"
            raise Restored(self.work.dsn.database, f"broker {self.work.broker!r}", [why])
        self.read = int(ids[-1])

    def _settle(self, set_aside: SetAside, position: int) -> bool:
        """Run step 3: move the position, or close the batch; return whether to stop."""

        ends, attempts = position == self.end, count()

        def settle(source: psycopg.Connection[Any]) -> bool:
            # done once, even if the answer to an earlier commit was lost. `SetAside.write` and
            # `advance` ensure this too: the first skips messages that are set aside already, the
            # second fences
            batch = self.work.batch
            if next(attempts) and ends and is_finished(source, batch):
                return False
            before = lock_cursors(source, batch) if set_aside else position
            stop = finish(source, batch) if ends else advance(source, batch, position)
            self.destinations.acknowledge(source)
            self.storing.brake.write(source)
            set_aside.write(source, before)
            set_aside.count_left_out(source, beyond=before)
            fail_point("mark_forwarded")
            return stop

        stop = self.source_session(settle)
        fail_point("mark_commit")
        self.destinations.settled()
        self.storing.brake.written()
        set_aside.written()
        summary = self.receipts.of(None)
        summary.parked += set_aside.parked_messages
        summary.dead += set_aside.dead_letters
        summary.closed |= ends
        return stop

    def _bury(self, message: pa.Table, error: str) -> bool:
        """Make a dead letter of the one message for which a step has raised, and move past it."""
        position = int(message["id"][0].as_py())
        set_aside = SetAside(work=self.work, position=position)
        set_aside.bury(self.earlier.fresh(message), "", "rejected", error)
        return self._settle(set_aside, position)
