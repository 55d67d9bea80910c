"""Delivery: the last step of the pipeline, inside the Spark task.

First the parked messages whose time has come, lane by lane; then the batch. Per chunk, in the
order of the ids:

1. at_most_once routes: record the attempt at the source, durably, before anything is sent
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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import adbc_driver_manager.dbapi as adbc
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from saf import parking
from saf.cursor import advance, attempt, hold
from saf.database import unavailable_if_lost
from saf.destinations import Chunk, Destination
from saf.destinations.postgresql import PostgresInbox, beyond
from saf.errors import (
    Ahead,
    ConfigurationError,
    Fenced,
    Rejected,
    SafError,
    Unavailable,
    UnknownService,
    Unroutable,
    UsageError,
)
from saf.failpoints import fail_point
from saf.parking import REPLAY, ROUTE, Backoff, Lane
from saf.retry import while_unavailable
from saf.routes import AT_MOST_ONCE, EXACTLY_ONCE, Route, choose_route
from saf.spark.aside import Aside
from saf.spark.columns import arrow_type, selected, unpack
from saf.spark.sorting import Part, of_route_lane, service_lane, sort
from saf.spark.source import FAILED, read
from saf.spark.work import Policy, Receipt, Work

T = TypeVar("T")

_RECEIPT = {
    "work": "int",
    "destination": "string",
    "messages": "long",
    "dropped": "long",
    "parked": "long",
    "dead": "long",
    "complete": "boolean",
    "stopped": "boolean",
    "error_kind": "string",
    "error": "string",
}
RECEIPT_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _RECEIPT.items())
_RECEIPT_ARROW = pa.schema([(name, arrow_type(kind)) for name, kind in _RECEIPT.items()])

EXPECTED = (Unavailable, Rejected, Fenced, Ahead, UsageError)


def deliver(
    work: Sequence[Work], routes: Sequence[Route], policy: Policy
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for mapInArrow: messages in, receipts out."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # exists inside a task only

        context = TaskContext.get()
        assert context is not None  # noqa: S101 - for the type checker
        # the pipeline is narrow, so the partition's number is the work item's
        number = context.partitionId()
        receipts = Delivery(number, work[number], routes, policy).run(batches)
        yield pa.RecordBatch.from_pylist(
            [asdict(receipt) for receipt in receipts], schema=_RECEIPT_ARROW
        )

    return task


@dataclass
class Delivery:
    """One task: the remaining messages of one batch, and the parked ones of its shards."""

    number: int
    work: Work
    routes: Sequence[Route]
    policy: Policy
    receipts: dict[str | None, Receipt] = field(default_factory=dict)
    _held: dict[Lane, str] = field(default_factory=dict)
    """Lanes that new messages have to park in, and why."""
    _untried: set[Lane] = field(default_factory=set)
    """Lanes whose time has come, but that had nothing of these shards to try."""
    _set_aside: pa.Array = field(default_factory=lambda: pa.array([], pa.int64()))
    """Ids beyond the position that a task before this one has set aside."""
    _open: dict[str, Destination] = field(default_factory=dict)
    _identities: dict[str, str] = field(default_factory=dict)
    _source: psycopg.Connection[Any] | None = None

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        summary = self._receipt(None)
        try:
            self._find_set_aside()
            for lane in self.work.waiting:
                self._try_lane(lane)
            for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
                if self._forward(rows):
                    summary.stopped = True
                    break
            else:
                summary.complete = True
                for untried in self._untried:
                    self._forget(untried)
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            for destination in self._open.values():
                destination.close()
            if self._source is not None:
                self._source.close()
        return list(self.receipts.values())

    # New messages

    def _forward(self, rows: pa.Table) -> bool:
        """Steps 1 to 3 for one chunk; return whether the task should stop."""
        position = int(rows["id"][-1].as_py())
        if position == FAILED:
            raise Unavailable(f"broker {self.work.broker!r}", rows["body"][-1].as_py().decode())
        aside = Aside(work=self.work)
        if len(self._set_aside):
            rows = rows.filter(pc.invert(pc.is_in(rows["id"], self._set_aside)))
        rows = aside.bury_unfit(unpack(rows), self.policy.max_bytes)
        parts = sort(rows, self.routes, self._qualities, self._held)
        attempted = self._attempt(parts, position)
        for part in parts:
            if part.destination is None:
                service, _ = of_route_lane(part.lane)
                aside.failed[part.lane] = Unroutable(service)
                self._hold(part.lane, Unroutable(service))
            if part.quality == AT_MOST_ONCE:
                part = replace(part, rows=self._fresh(part, attempted))  # noqa: PLW2901 - less of it
            if part.lane in self._held:
                aside.parked.append(part)
            elif part.quality == AT_MOST_ONCE:
                self._store_once(part, aside)
            else:
                self._store(part, (self.work.batch.number, position), aside)
        alone = Lane(destination=self.work.alone or "")
        if alone in aside.failed:
            self._at_source(lambda source: self._postpone(source, alone, aside.failed[alone]))
            raise aside.failed[alone]

        def settle(source: psycopg.Connection[Any]) -> bool:
            # once, also where the answer to the commit before got lost
            new = bool(aside) and hold(source, self.work.batch) < position
            stop = advance(source, self.work.batch, position)
            if new:
                aside.write(source)
            fail_point("mark_forwarded")
            return stop

        stop = self._at_source(settle)
        fail_point("mark_commit")
        aside.written()
        self._count(aside, parked=aside.parked_messages)
        return stop

    def _find_set_aside(self) -> None:
        """What was set aside before a crash is not sent, and new messages wait behind it."""
        batch = self.work.batch
        found = self._at_source(lambda source: parking.set_aside(source, batch))
        self._set_aside = pa.array([id_ for id_, _ in found], pa.int64())
        for _, lane in found:
            if lane is not None:
                self._hold(lane, Unavailable(str(lane), "behind others"))

    def _write_ahead(self, aside: Aside) -> None:
        """Before a watermark moves: what is set aside so far."""
        if aside.ahead:

            def write(source: psycopg.Connection[Any]) -> None:
                hold(source, self.work.batch)
                aside.write_ahead(source)

            self._at_source(write)
            aside.written()
            fail_point("set_aside")

    def _attempt(self, parts: Sequence[Part], position: int) -> dict[int, int]:
        """Step 1; return, by shard, up to which id messages had been attempted before."""
        once = [part for part in parts if part.quality == AT_MOST_ONCE]
        if not once:
            return {}
        if all(part.lane in self._held for part in once):
            position = 0  # nothing more is sent now; what was sent before must not be parked
        return self._at_source(lambda source: attempt(source, self.work.batch, position))

    def _fresh(self, part: Part, attempted: dict[int, int]) -> pa.Table:
        number = self.work.batch.number
        marks = {shard: (number, position) for shard, position in attempted.items()}
        return beyond(part.rows, number, marks)

    # Parked messages

    def _try_lane(self, lane: Backoff) -> None:
        """Deliver a lane's messages of these shards, if its time has come."""
        if not lane.due:
            self._hold(lane.key, Unavailable(str(lane), lane.error))
            return
        tried = False
        for rows in self._parked(lane):
            tried = True
            aside = Aside(work=self.work, lane=lane.key)
            for part in self._ways(lane, rows):
                if part.destination is None:
                    aside.failed[lane.key] = Unroutable(of_route_lane(lane)[0])
                if lane.key in aside.failed:
                    aside.parked.append(part)
                elif part.quality == AT_MOST_ONCE:
                    self._settle_lane(part.rows, Aside(work=self.work, lane=lane.key))
                    self._store_once(part, aside)
                else:
                    self._store(part, _mark(part.rows), aside)
            self._settle_lane(rows, aside)
            self._count(aside)
            if lane.key in aside.failed:
                self._hold(lane.key, aside.failed[lane.key])
                return
        if tried:
            self._at_source(lambda source: self._succeeded(source, lane.key))
        else:
            self._untried.add(lane.key)

    def _parked(self, lane: Backoff) -> Iterator[pa.Table]:
        batch = self.work.batch
        everything = [
            *parking.as_log(selected(None)),
            "parked_id",
            "batch",
            "quality",
            sql.SQL("id AS log_id"),
        ]
        query = parking.in_lane(batch, lane.key, everything)
        try:
            batches = read(self.work.dsn, query)
            for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
                yield unpack(rows)
        except adbc.Error as error:
            reason = self.work.dsn.redact(str(error))
            raise Unavailable(f"broker {self.work.broker!r}", reason) from None

    def _ways(self, lane: Backoff, rows: pa.Table) -> Iterator[Part]:
        """Where a lane's messages go now, by their quality of service."""
        destination: str | None = lane.destination
        routed = None
        if lane.lane.startswith(ROUTE):
            route = choose_route(self.work.routes, *of_route_lane(lane))
            destination, routed = (route.destination, route.quality) if route else (None, None)
        if destination not in self._qualities:
            yield Part(lane=lane.key, destination=None, quality=None, rows=rows)
            return
        default = routed or self._qualities[destination]
        qualities = pc.fill_null(rows["quality"], default)
        for quality in pc.unique(qualities).to_pylist():
            mine = rows.filter(pc.equal(qualities, quality))
            yield Part(lane=lane.key, destination=destination, quality=quality, rows=mine)

    def _settle_lane(self, rows: pa.Table, aside: Aside) -> None:
        def settle(source: psycopg.Connection[Any]) -> None:
            hold(source, self.work.batch)
            aside.write_from_lane(source, rows["parked_id"].to_pylist())
            fail_point("unpark")

        self._at_source(settle)
        fail_point("unpark_commit")

    def _forget(self, lane: Lane) -> None:
        subscription_id = self.work.batch.subscription_id
        self._at_source(lambda source: parking.forget(source, subscription_id, lane))

    def _postpone(self, source: psycopg.Connection[Any], lane: Lane, error: SafError) -> None:
        parking.postpone(source, self.work.batch.subscription_id, lane, str(error))

    def _succeeded(self, source: psycopg.Connection[Any], lane: Lane) -> None:
        parking.succeeded(source, self.work.batch.subscription_id, lane)

    def _hold(self, lane: Lane, error: SafError) -> None:
        """New messages park behind those of this lane; all for a destination behind a replay."""
        self._held[lane] = str(error)
        if lane.lane == REPLAY:
            self._held[Lane(destination=lane.destination)] = str(error)

    # Both

    def _store(self, part: Part, mark: tuple[int, int], aside: Aside) -> None:
        """Step 2 for one part, up to its mark; what does not go is in ``aside``."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        self._write_ahead(aside)
        chunk = Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=part.rows,
            number=mark[0],
            position=mark[1],
            lane=part.lane.lane,
        )
        name, exactly_once = part.destination, part.quality == EXACTLY_ONCE
        try:
            stored = while_unavailable(
                self.policy.attempts,
                lambda: self._destination(name).store(chunk, exactly_once=exactly_once),
            )
        except Unavailable as error:
            aside.failed[part.lane] = error
            aside.parked.append(part)
            self._hold(part.lane, error)
        except UnknownService as error:
            self._store_known(part, mark, aside, error)
        except Fenced as error:
            # a newer owner than the source itself knows of: raises Fenced, or is not so
            self._at_source(lambda source: hold(source, self.work.batch))
            raise Ahead(f"destination {name!r}", error.shards) from None
        except Rejected as error:
            if part.rows.num_rows == 1:
                aside.bury(part.rows, name, "rejected", str(error))
                return
            half = part.rows.num_rows // 2
            first = replace(part, rows=part.rows.slice(0, half))
            self._store(first, _mark(first.rows, mark[0]), aside)
            self._store_or_park(replace(part, rows=part.rows.slice(half)), mark, aside)
        else:
            self._receipt(name).messages += stored.messages
            self._receipt(name).dropped += stored.dropped
            if part.lane in self._untried:
                self._untried.discard(part.lane)
                aside.opened.add(part.lane)

    def _store_or_park(self, part: Part, mark: tuple[int, int], aside: Aside) -> None:
        if part.lane in self._held:
            aside.parked.append(part)
        else:
            self._store(part, mark, aside)

    def _store_known(
        self, part: Part, mark: tuple[int, int], aside: Aside, error: UnknownService
    ) -> None:
        """Store the rest of a part, some of whose services the destination does not know."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        services = part.rows["to_service"]
        for service in error.services:
            rows = part.rows.filter(pc.equal(services, service))
            lane = part.lane if part.lane.lane else service_lane(part.destination, service)
            aside.failed[lane] = error
            aside.parked.append(replace(part, lane=lane, rows=rows))
            self._hold(lane, error)
        known = pc.invert(pc.is_in(services, pa.array(error.services)))
        rest = replace(part, rows=part.rows.filter(known))
        if rest.rows.num_rows:
            self._store(rest, mark, aside)

    def _store_once(self, part: Part, aside: Aside) -> None:
        """Step 2 at most once: what may have left is not sent again, and said to be dead."""
        assert part.destination is not None  # noqa: S101 - the caller's to see to
        if not part.rows.num_rows:
            return
        number, position = _mark(part.rows, self.work.batch.number)
        chunk = Chunk(
            source=self.work.source,
            batch=self.work.batch,
            rows=part.rows,
            number=number,
            position=position,
            lane=part.lane.lane,
        )
        try:
            stored = self._destination(part.destination).store(chunk, exactly_once=False)
        except (Unavailable, UnknownService, Rejected) as error:
            aside.bury(part.rows, part.destination, "unavailable", str(error))
        else:
            self._receipt(part.destination).messages += stored.messages

    @property
    def _qualities(self) -> dict[str, str]:
        return {name: quality for name, (_, quality) in self.policy.destinations.items()}

    def _destination(self, name: str) -> Destination:
        destination = self._open.setdefault(
            name, PostgresInbox(name, self.policy.destinations[name][0])
        )
        if name not in self._identities:
            identity = destination.identity()
            for other, known in self._identities.items():
                if known == identity:
                    raise ConfigurationError(
                        f"destinations {other!r} and {name!r} are the same broker: one watermark "
                        "cannot serve both, so keep one of them in saf.toml"
                    )
            self._identities[name] = identity
        return destination

    def _at_source(self, write: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Write at the source, in a transaction of its own; tried again, so it has to bear that."""

        def transaction() -> T:
            with unavailable_if_lost(f"broker {self.work.broker!r}"):
                if self._source is None or self._source.closed:
                    self._source = self.work.dsn.connect(role="mark", autocommit=True)
                with self._source.transaction():
                    return write(self._source)

        return while_unavailable(self.policy.attempts, transaction)

    def _count(self, aside: Aside, parked: int = 0) -> None:
        receipt = self._receipt(None)
        receipt.parked += parked
        receipt.dead += aside.dead_letters

    def _receipt(self, destination: str | None) -> Receipt:
        return self.receipts.setdefault(
            destination, Receipt(work=self.number, destination=destination)
        )


def _mark(rows: pa.Table, number: int = 0) -> tuple[int, int]:
    """(batch, position) of the last row; ``number`` is the batch of rows that do not say."""
    if "batch" in rows.column_names:
        number = int(rows["batch"][-1].as_py())
    return number, int(rows["id"][-1].as_py())


def chunks(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[pa.Table]:
    """Arrow batches gathered, and cut where they are long, into tables of bounded size.

    A table has at most ``max_rows`` rows, and ends with the batch that reaches ``max_bytes``.
    Rows without an id are padding (see `saf.spark.source`) and left out.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for padded in batches:
        batch = padded.filter(padded["id"].is_valid()) if padded["id"].null_count else padded
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, max_rows - rows)
            start += part.num_rows
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows >= max_rows or size >= max_bytes:
                yield pa.Table.from_batches(held)
                held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)
