"""Parked lanes: the parked messages of one task's shards.

`ParkedLanes` takes messages out of their lanes, wherever they go next. It reads them lane by lane,
in order and in chunks, and runs a step for each chunk. Settled messages leave their lane in a
transaction that only the owner of the shards can commit. Until then the lanes are in hand
(`saf.setaside.in_hand`), so that no operator decides about a message that is on its way.

A message for which the step raises even when alone becomes a dead letter. Where messages go is not
decided here: the steps are those of `saf.engine.finding_routes` and `saf.engine.releasing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf.engine.context import Context
from saf.engine.set_aside import SetAside
from saf.engine.source import chunks, read
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.log.cursor import lock_cursors
from saf.setaside import backoff, parking
from saf.setaside.isolation import isolate
from saf.setaside.lane import Lane
from saf.setaside.lane_columns import LANE, given_of


class ParkedLanes:
    """The lanes that hold messages of one task's shards."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._until = 0.0

    def begin(self, seconds: float) -> None:
        """Begin a turn of ``seconds``."""
        self._until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the turn is over: no further chunk is begun."""
        return time.monotonic() > self._until

    def hold(self, lanes: Collection[Lane], why: str) -> None:
        """Park new messages behind these lanes. Lanes of services are looked up instead."""
        for lane in lanes:
            if not lane.of_service:
                self.context.lanes.hold(lane, why)

    def read(
        self,
        destination: str,
        lanes: Collection[Lane],
        columns: Sequence[str | sql.Composable],
        *,
        found: bool,
    ) -> Iterator[pa.Table]:
        """Read the lanes' messages of these shards in chunks, each lane in order."""
        if lanes:
            work, rules = self.context.work, self.context.rules
            query = parking.in_lanes(work.batch, destination, lanes, columns, found=found)
            yield from chunks(read(work, query), rules.chunk_rows, rules.chunk_bytes)

    def isolate(self, destination: str, rows: pa.Table, step: Callable[[pa.Table], None]) -> None:
        """Run a step for messages of lanes; a message that fails alone becomes a dead letter.

        The lanes are in hand. If they were not for a while, messages that are gone are left out.
        """
        numbers, lanes = rows["parked_id"], rows.select(LANE)
        gone: set[int] = set()
        """Messages that an earlier attempt has committed durably: they have left this lane."""

        def undo() -> None:
            ids = numbers.to_pylist()
            here = self.context.source(
                lambda source: parking.still(source, destination, given_of(lanes), ids)
            )
            gone.update(number for number in ids if number not in here)

        def remaining(part: pa.Table) -> pa.Table:
            if not gone:
                return part
            out = pc.is_in(part["parked_id"], pa.array(list(gone), pa.int64()))
            return part.filter(pc.invert(out))

        def bury(message: pa.Table, error: str) -> None:
            if message["parked_id"][0].as_py() not in gone:
                set_aside = self.aside(destination)
                set_aside.bury_as_stored(message, error)
                self.settle(message, set_aside)

        def make(part: pa.Table) -> None:
            left = remaining(part)
            if left.num_rows:
                step(left)

        if self.context.source.let_slip():
            undo()
        isolate(rows, make, bury, undo)

    def aside(self, destination: str = "") -> SetAside:
        """Return an empty `SetAside` for messages of a chunk of lanes."""
        return SetAside(
            work=self.context.work,
            from_lanes=True,
            destination=destination,
            max_bytes=self.context.rules.max_bytes,
        )

    def settle(self, rows: pa.Table, set_aside: SetAside) -> None:
        """Take messages out of their lane, unless they stay there."""

        def settle(source: psycopg.Connection[Any]) -> None:
            lock_cursors(source, self.context.work.batch)
            gone = set_aside.write_from_lanes(source, rows["parked_id"].to_pylist())
            set_aside.count_left_out(source, among=gone)
            self.context.write(source)
            fail_point("unpark")

        self.context.source(settle)
        self.context.written()
        set_aside.written()
        self.context.receipts.of(None).dead += set_aside.dead_letters
        fail_point("unpark_commit")

    def postpone(self, failed: Mapping[Lane, SafError]) -> None:
        """Note that attempts at lanes have failed, and park new messages behind these lanes."""
        if failed:
            subscription_id = self.context.work.batch.subscription_id
            for lane, error in failed.items():
                self.hold([lane], str(error))
            self.context.source(lambda source: backoff.postpone(source, subscription_id, failed))

    def succeed(self, lanes: Collection[Lane]) -> None:
        """Note that the tried messages of lanes are gone, so their backoff starts again."""
        if lanes:
            subscription_id = self.context.work.batch.subscription_id
            self.context.source(lambda source: backoff.succeeded(source, subscription_id, lanes))
