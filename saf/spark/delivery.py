"""Delivery: the last step of the pipeline, inside the Spark task.

Per chunk of messages, in the order of their ids:

1. at_most_once routes: record the attempt at the source, durably, before anything is sent
2. one transaction per destination; committed, durable, before the next step
3. move the position at the source

A crash anywhere loses nothing: the next run reads the same batch from the last position, and
the destination's watermark drops what it has. A task never raises for what an operator can wait
out or mend (destination down, no route, fenced): it ends there and says so in its receipt, and
its batch stays open. Receipts, one per task and destination, are all that reaches the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.cursor import Batch, advance, attempt
from saf.database import Dsn, unavailable_if_lost
from saf.destinations import Chunk, Destination, Stored
from saf.destinations.postgresql import PostgresInbox, beyond
from saf.errors import ConfigurationError, Fenced, Rejected, Unavailable, Unroutable, UsageError
from saf.failpoints import fail_point
from saf.retry import while_unavailable
from saf.routes import AT_MOST_ONCE, EXACTLY_ONCE, Route
from saf.spark.columns import arrow_type, unpack
from saf.spark.source import FAILED
from saf.spark.work import Policy, Receipt, Work

T = TypeVar("T")

_RECEIPT = {
    "work": "int",
    "destination": "string",
    "messages": "long",
    "dropped": "long",
    "complete": "boolean",
    "stopped": "boolean",
    "error_kind": "string",
    "error": "string",
}
RECEIPT_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _RECEIPT.items())
_RECEIPT_ARROW = pa.schema([(name, arrow_type(kind)) for name, kind in _RECEIPT.items()])

EXPECTED = (Unavailable, Unroutable, Rejected, Fenced, UsageError)


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
    """One task: the remaining messages of one batch."""

    number: int
    work: Work
    routes: Sequence[Route]
    policy: Policy
    receipts: dict[str | None, Receipt] = field(default_factory=dict)
    _open: dict[str, Destination] = field(default_factory=dict)
    _source: psycopg.Connection[Any] | None = None

    def run(self, batches: Iterable[pa.RecordBatch]) -> list[Receipt]:
        """Deliver chunk by chunk until the end, an error or a request to stop."""
        summary = self._receipt(None)
        try:
            for rows in chunks(batches, self.policy.chunk_rows, self.policy.chunk_bytes):
                if self._forward(rows):
                    summary.stopped = True
                    break
            else:
                summary.complete = True
        except EXPECTED as error:
            summary.error_kind, summary.error = type(error).__name__, str(error)
        finally:
            for destination in self._open.values():
                destination.close()
            if self._source is not None:
                self._source.close()
        return list(self.receipts.values())

    def _forward(self, rows: pa.Table) -> bool:
        """Steps 1 to 3 for one chunk; return whether the task should stop."""
        position = int(rows["id"][-1].as_py())
        if position == FAILED:
            raise Unavailable(f"broker {self.work.broker!r}", rows["body"][-1].as_py().decode())
        parts = self._parts(rows)
        attempted: dict[int, int] = {}
        if any(quality == AT_MOST_ONCE for _, quality in parts):
            attempted = self._at_source(attempt, position)
        for (name, quality), part in parts.items():
            chunk = Chunk(
                source=self.work.source,
                batch=self.work.batch,
                rows=beyond(part, attempted) if quality == AT_MOST_ONCE else part,
                position=position,
            )
            self._store(name, chunk, quality)
        stop = self._at_source(_mark, position)
        fail_point("mark_commit")
        return stop

    def _parts(self, rows: pa.Table) -> dict[tuple[str, str], pa.Table]:
        """The chunk's messages by destination and quality, each part in order.

        All that goes to one destination is one part, whatever routes it took: the watermark
        there says of a whole chunk that it is stored.
        """
        choice = rows["route"]
        if choice.null_count:
            lost = rows.filter(pc.is_null(choice))
            raise Unroutable(lost["to_service"][0].as_py())
        ways: dict[tuple[str, str], list[int]] = {}
        for number in pc.unique(choice).to_pylist():
            route = self.routes[number]
            quality = route.quality or self._known(route.destination)[1]
            ways.setdefault((route.destination, quality), []).append(number)
        rows = unpack(rows.drop_columns(["route"]))
        if len(ways) == 1:
            return dict.fromkeys(ways, rows)
        return {
            way: rows.filter(pc.is_in(choice, pa.array(numbers, choice.type)))
            for way, numbers in ways.items()
        }

    def _store(self, name: str, chunk: Chunk, quality: str) -> None:
        def store() -> Stored:
            return self._destination(name).store(chunk, exactly_once=quality == EXACTLY_ONCE)

        # an at_most_once chunk may have left although the answer got lost
        attempts = 1 if quality == AT_MOST_ONCE else self.policy.attempts
        stored = while_unavailable(attempts, store)
        receipt = self._receipt(name)
        receipt.messages += stored.messages
        receipt.dropped += stored.dropped

    def _at_source(self, write: Callable[..., T], position: int) -> T:
        """Write the batch's mark at the source, in a transaction of its own."""

        def transaction() -> T:
            with unavailable_if_lost(f"broker {self.work.broker!r}"):
                if self._source is None or self._source.closed:
                    self._source = self.work.dsn.connect(role="mark", autocommit=True)
                with self._source.transaction():
                    return write(self._source, self.work.batch, position)

        return while_unavailable(self.policy.attempts, transaction)

    def _destination(self, name: str) -> Destination:
        if name not in self._open:
            destination = PostgresInbox(name, self._known(name)[0])
            self._open[name] = destination
            for other, known in self._open.items():
                if other != name and known.identity() == destination.identity():
                    raise ConfigurationError(
                        f"destinations {other!r} and {name!r} are the same broker: one watermark "
                        "cannot serve both, so keep one of them in saf.toml"
                    )
        return self._open[name]

    def _known(self, name: str) -> tuple[Dsn, str]:
        if name not in self.policy.destinations:
            raise Unavailable(
                f"destination {name!r}",
                f"a route names it, but saf.toml has no [destinations.{name}]",
            )
        return self.policy.destinations[name]

    def _receipt(self, destination: str | None) -> Receipt:
        return self.receipts.setdefault(
            destination, Receipt(work=self.number, destination=destination)
        )


def _mark(connection: psycopg.Connection[Any], batch: Batch, position: int) -> bool:
    stop = advance(connection, batch, position)
    fail_point("mark_forwarded")
    return stop


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
