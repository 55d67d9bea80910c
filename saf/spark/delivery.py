"""Delivery: what a Spark task does with the messages that it reads.

First the parked messages whose time has come, lane by lane; then the batch. Per chunk, in the
order of the ids:

0. routers: to whom each message is really addressed; routes that share: which one it takes. What
   is to be remembered of both is written at the source, durably, before anything is sent
1. at_most_once routes: record the attempt there, the same
2. one transaction per destination; committed, durable, before the next step
3. one transaction at the source: move the position, and with it set aside what could not go

What is set aside before step 2 has ended is written at the source before a watermark passes it:
otherwise a crash before step 3 would leave it below the watermark, where it looks stored.

What stands in the way of some messages delays only those: a destination that is down, a missing
route or service parks them (see `saf.parking`), a message that is rejected, expired or too large
becomes a dead letter (see `saf.dead`), found among its neighbours by halving. While the only
destination is down, the batch stays open instead.

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

from saf import parking
from saf.cursor import advance, attempt, hold
from saf.destinations.postgresql import beyond
from saf.errors import Ahead, Fenced, Rejected, SafError, Unavailable, UsageError
from saf.failpoints import fail_point
from saf.parking import MAIN, Lane
from saf.spark.answers import Answers
from saf.spark.aside import Aside
from saf.spark.at_source import AtSource
from saf.spark.chunks import chunks
from saf.spark.lanes import Lanes
from saf.spark.receipts import Receipts
from saf.spark.releasing import Releasing
from saf.spark.resolving import Resolver
from saf.spark.sharing import share
from saf.spark.sorting import Part, sort, unroutable
from saf.spark.storing import Storing, nowhere
from saf.spark.wayfinder import Wayfinder
from saf.spark.work import Policy, Receipt, Work
from saf.ways import AT_MOST_ONCE

EXPECTED = (Unavailable, Rejected, Fenced, Ahead, UsageError)


class Delivery:
    """One task: the remaining messages of one batch, and the parked ones of its shards."""

    def __init__(
        self, number: int, work: Work, policy: Policy, answers: Answers | None = None
    ) -> None:
        self.work = work
        self.wayfinder = Wayfinder(work.routes)
        self.policy = policy
        self.receipts = Receipts(number)
        self.lanes = Lanes()
        self.at_source = AtSource(work, policy.attempts)
        self.resolver = Resolver(work.routes.routers, self.wayfinder, self.at_source, answers)
        self.storing = Storing(work, policy, self.at_source, self.lanes, self.receipts)
        self._set_aside: dict[str, pa.Array] = {}
        """Ids beyond the position that a task before this one has set aside, by destination."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        summary = self.receipts.of(None)
        releasing = Releasing(
            self.work,
            self.resolver,
            self.wayfinder,
            self.policy,
            self.at_source,
            self.lanes,
            self.receipts,
            self.storing,
        )
        try:
            self._find_set_aside()
            releasing.release_all()
            for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
                if self._forward(rows):
                    summary.stopped = True
                    break
            else:
                summary.complete = True
                releasing.forget_untried()
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            self.storing.close()
            self.at_source.close()
        return list(self.receipts)

    def _forward(self, rows: pa.Table) -> bool:
        """Steps 1 to 3 for one chunk; return whether the task should stop."""
        position = int(rows["id"][-1].as_py())
        aside = Aside(work=self.work)
        rows = aside.bury_unfit(self._without(rows, ""), self.policy.max_bytes)
        resolution = self.resolver.resolve(rows, self.lanes.held)
        for some, error in resolution.dead:
            aside.bury(some, "", "unresolved", error)
        rows = self._not_set_aside(self.wayfinder.route(resolution.rows))
        rows = share(rows, self.wayfinder.ways, self.at_source.choose)
        parts = [
            replace(part, rows=self._without(part.rows, part.lane.destination))
            for part in sort(rows, self.wayfinder.ways, self.policy.qualities, self.lanes.held)
        ]
        if resolution.waiting is not None:
            parts += unroutable(resolution.waiting)
        attempted = self._attempt(parts, position)
        for part in parts:
            self._send(part, position, attempted, aside)
        self._stay_open(aside)

        def settle(source: psycopg.Connection[Any]) -> bool:
            # once, also where the answer to the commit before got lost; not only here is that seen
            # to, because `Aside.write` leaves out what is there already, and `advance` fences
            new = bool(aside) and hold(source, self.work.batch) < position
            stop = advance(source, self.work.batch, position)
            if new:
                aside.write(source)
            fail_point("mark_forwarded")
            return stop

        stop = self.at_source(settle)
        fail_point("mark_commit")
        aside.written()
        summary = self.receipts.of(None)
        summary.parked += aside.parked_messages
        summary.dead += aside.dead_letters
        return stop

    def _send(self, part: Part, position: int, attempted: dict[int, int], aside: Aside) -> None:
        """Step 2 for one part; or park it, behind those of its lane that wait."""
        obstacle: SafError | None = None
        if part.destination is None:
            obstacle = self.resolver.obstacle(part.lane)
        elif part.destination not in self.policy.destinations:
            obstacle = nowhere(part.destination)
        if obstacle is not None and part.lane not in self.lanes.held:
            aside.failed[part.lane] = obstacle
            self.lanes.hold(part.lane, obstacle)
        number = self.work.batch.number
        if part.quality == AT_MOST_ONCE:
            marks = {shard: (number, before) for shard, before in attempted.items()}
            part = replace(part, rows=beyond(part.rows, number, marks))
        if self._waits(part):
            aside.parked.append(part)
        elif part.quality == AT_MOST_ONCE:
            self.storing.store_once(part, aside)
        else:
            self.storing.store(part, (number, position), aside)

    def _attempt(self, parts: Sequence[Part], position: int) -> dict[int, int]:
        """Step 1; return, by shard, up to which id messages had been attempted before."""
        once = [part for part in parts if part.quality == AT_MOST_ONCE]
        if not once:
            return {}
        if all(self._waits(part) for part in once):
            position = 0  # nothing more is sent now; what was sent before must not be parked
        return self.at_source(lambda source: attempt(source, self.work.batch, position))

    def _waits(self, part: Part) -> bool:
        """Its lane does; or it is not the destination's own, so it is behind others."""
        return part.lane.lane != MAIN or part.lane in self.lanes.held

    def _stay_open(self, aside: Aside) -> None:
        """Raise, instead of parking, while the only destination is down."""
        alone = Lane(destination=self.work.alone or "")
        if alone in aside.failed:
            error, subscription_id = aside.failed[alone], self.work.batch.subscription_id
            self.at_source(
                lambda source: parking.postpone(source, subscription_id, alone, str(error))
            )
            raise error

    def _find_set_aside(self) -> None:
        """What was set aside before a crash is not sent, and new messages wait behind it."""
        batch = self.work.batch
        ids: dict[str, list[int]] = defaultdict(list)
        for id_, destination, lane in self.at_source(lambda s: parking.set_aside(s, batch)):
            ids[destination].append(id_)
            if lane is not None:
                self.lanes.hold(lane, Unavailable(str(lane), "behind others"))
        self._set_aside = {name: pa.array(some, pa.int64()) for name, some in ids.items()}

    def _not_set_aside(self, rows: pa.Table) -> pa.Table:
        """The rows of which anything is left to do: of a topic, some copy may be."""
        if not self._set_aside:
            return rows
        topics = [number for number, way in enumerate(self.wayfinder.ways) if way.to_all]
        copies = pc.is_in(rows["route"], pa.array(topics, pa.int32()))
        aside = pa.concat_arrays(list(self._set_aside.values()))
        return rows.filter(pc.or_(copies, pc.invert(pc.is_in(rows["id"], aside))))

    def _without(self, rows: pa.Table, destination: str) -> pa.Table:
        """The rows that are not set aside for a destination."""
        if destination not in self._set_aside:
            return rows
        return rows.filter(pc.invert(pc.is_in(rows["id"], self._set_aside[destination])))
