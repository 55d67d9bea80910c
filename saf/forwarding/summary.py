"""The summary: what a run of the forwarder reports, to operators and to programs.

`Summary` has the results of the run, with the exit code.

*Metrics.* `receipts`, `cycle` and `problem` count for the metrics of this process. Tasks may run on
other machines, and count nothing there: their receipts contain the counts.

*Progress.* A `Meter` shows the progress of the running tasks to operators who watch. It asks in a
separate thread with its own connections. So when it counts a deep backlog, and reads the whole
backlog to do so, it delays neither leases nor tasks. If it fails, the forwarder continues and
nothing is shown. The forwarder leaves out sources with limited connections, because they have none
to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from threading import Event, Thread
from typing import Any

import psycopg

from saf import errors
from saf.database import Dsn, fetch
from saf.engine.work import Receipt, Work, add_services
from saf.errors import Fenced, SafError, Unavailable, UsageError
from saf.log.cursor import Batch, join_splits
from saf.log.shards import NEWEST
from saf.telemetry import metrics as m
from saf.telemetry.logger import Log
from saf.telemetry.metrics import count, counting, observe

log = Log("saf.forward")

LOOK_SECONDS = 0.5
LEAVE_SECONDS = 1.0
"""Seconds to wait for a meter at its end, if a source does not answer."""

# A shard that has another batch, or none open, has completed this one
POSITIONS = f"""
SELECT avg(CASE WHEN open IS NOT NULL AND batch = %(batch)s THEN least(position, %(highest)s)
           ELSE %(highest)s END)::float8
FROM {NEWEST} AS c WHERE shard = ANY (%(shards)s)
"""


@dataclass
class Summary:
    """Results of a run. Counts are messages."""

    forwarded: int = 0
    dropped: int = 0
    """Messages delivered again, and dropped by a watermark."""
    left_out: int = 0
    """Messages that a transform has left out, counted for each destination."""
    early: dict[str, int] = field(default_factory=dict)
    """By destination, messages that it got before their deliver_at, because it holds none."""
    parked: int = 0
    """Messages set aside until a destination, a route or a service exists or answers."""
    dead: int = 0
    """Messages set aside for an operator."""
    refused: int = 0
    """Held messages that were due, and that the database refused to move."""
    locked: int = 0
    """Held messages that are due, and that other sessions have locked."""
    by_broker: dict[str, int] = field(default_factory=dict)
    """By source, messages that its destinations have now, counted for each destination."""
    by_destination: dict[str, int] = field(default_factory=dict)
    by_service: dict[str, dict[str, int]] = field(default_factory=dict)
    """By destination, messages by service that it has now: ``forwarded`` and ``dropped`` ones. So
    messages that a killed run had stored, without reporting them, are reported by the next run."""
    received: int = 0
    """Messages of sources that were stored in inboxes."""
    by_source: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    cycles: int = 0
    seconds: float = 0.0
    stopped: bool = False
    idle: bool = False
    """Whether other forwarders hold all shards of all brokers."""
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Some lanes: ``broker``, ``lane``, ``kind``, ``subject``, ``attempts``, ``next_attempt_at``,
    ``error``."""
    waiting_lanes: int = 0
    """Number of lanes that wait."""
    down: list[str] = field(default_factory=list)
    """Destinations that do not answer, or refuse everything."""
    problems: list[dict[str, str]] = field(default_factory=list)
    """Problems: ``broker``, ``kind`` (an error's class) and ``error``."""

    @property
    def exit_code(self) -> int:
        """0: done or nothing to do; 75: try again later; 2: an operator must act; 1: other.

        Messages that wait for a route or a service block no others, and the next run does not help
        them: that is 0. Messages for a destination that is down are 75.
        """
        codes = {getattr(errors, problem["kind"]).exit_code for problem in self.problems}
        for code in (SafError.exit_code, UsageError.exit_code):
            if code in codes:
                return int(code)
        return Unavailable.exit_code if codes or self.down else 0

    def add(self, cycle: Summary) -> None:
        """Add the counts of another summary."""
        self.forwarded += cycle.forwarded
        self.dropped += cycle.dropped
        self.left_out += cycle.left_out
        self.parked += cycle.parked
        self.dead += cycle.dead
        self.refused += cycle.refused
        self.locked = cycle.locked
        self.received += cycle.received
        self.batches += cycle.batches
        self.cycles += cycle.cycles
        for name, messages in cycle.early.items():
            self.early[name] = self.early.get(name, 0) + messages
        for own, others in (
            (self.by_broker, cycle.by_broker),
            (self.by_destination, cycle.by_destination),
            (self.by_source, cycle.by_source),
        ):
            for name, messages in others.items():
                own[name] = own.get(name, 0) + messages
        for name, services in cycle.by_service.items():
            self.add_services(name, services)

    def add_services(self, destination: str, services: Mapping[str, int]) -> None:
        """Add messages by service that a destination has now."""
        if services:
            add_services(self.by_service.setdefault(destination, {}), services)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as a dict, for one line of JSON."""
        rate = self.forwarded / self.seconds if self.seconds else 0.0
        return {
            **asdict(self),
            "seconds": round(self.seconds, 3),
            "messages_per_second": round(rate, 1),
            "exit_code": self.exit_code,
        }


def receipts(work: Sequence[Work], found: Sequence[Receipt]) -> None:
    """Count the results of a cycle's tasks."""
    if not counting():
        return
    for receipt in found:
        broker = work[receipt.work].broker
        if receipt.error_kind == Fenced.__name__:
            count(m.FENCED, broker=broker)
        for state, messages in (("parked", receipt.parked), ("dead", receipt.dead)):
            if messages:
                count(m.SET_ASIDE, messages, broker=broker, state=state)
        if receipt.destination is None:
            continue
        labels = {"broker": broker, "destination": receipt.destination}
        count(m.FORWARDED, receipt.messages, **labels)
        count(m.RETRIED, receipt.retried, **labels)
        count(m.REPEATED, receipt.dropped, **labels)
        for service, messages in receipt.services.items():
            count(m.DELIVERED, messages, **labels, service=service)
        observe(m.CHUNK_SECONDS, receipt.chunk_seconds, destination=receipt.destination)
        observe(m.CHUNK_MESSAGES, receipt.chunk_messages, destination=receipt.destination)


def cycle(seconds: float, messages: int) -> None:
    """Count a cycle that had something to do."""
    observe(m.CYCLES, seconds)
    observe(m.CYCLE_MESSAGES, messages)


def problem(broker: str, kind: str) -> None:
    """Count a problem."""
    count(m.PROBLEMS, broker=broker, kind=kind)


@dataclass(frozen=True)
class Progress:
    """Progress of the current cycle, in messages; shown to operators."""

    done: int
    total: int


class Meter:
    """Reports the progress of some work while its block runs."""

    def __init__(self, report: Callable[[Progress], None], work: Iterable[Work]) -> None:
        self._report = report
        self._batches: dict[Dsn, list[Work]] = {}
        for item in work:
            self._batches.setdefault(item.dsn, []).append(item)
        self._complete = False
        self._over = Event()
        self._thread = Thread(target=self._watch, name="saf-meter", daemon=True)

    def complete(self) -> None:
        """Note that all of the work is done; its positions show this only roughly."""
        self._complete = True

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LEAVE_SECONDS)

    def _watch(self) -> None:
        try:
            with ExitStack() as stack:
                spans = []
                for dsn, items in self._batches.items():
                    connection = stack.enter_context(dsn.connect(role="watch", autocommit=True))
                    batches = join_splits(item.batch for item in items)
                    spans += [Span(batch, connection) for batch in batches]
                total = sum(span.count for span in spans)
                while not self._over.wait(LOOK_SECONDS):
                    self._report(Progress(int(sum(span.done() for span in spans)), total))
                if self._complete:
                    self._report(Progress(total, total))
        except Exception as error:  # only the display fails: one line is enough
            log.info("progress_not_shown", error=f"{type(error).__name__}: {error}")


@dataclass
class Span:
    """A batch in progress: its remaining messages' number, lowest id and highest id."""

    batch: Batch
    connection: psycopg.Connection[Any]
    count: int = field(init=False)
    lowest: int = field(init=False)
    highest: int = field(init=False)

    def __post_init__(self) -> None:
        query = f"SELECT count(*), min(id), max(id) FROM ({self.batch.rows(['id'])}) AS batch"
        ((self.count, lowest, highest),) = fetch(self.connection, query)
        self.lowest, self.highest = lowest or 0, highest or 0

    def done(self) -> float:
        """Estimate how many of the messages are forwarded, by the positions reached."""
        params = {
            "subscription_id": self.batch.subscription_id,
            "batch": self.batch.number,
            "shards": self.batch.shards,
            "highest": self.highest,
        }
        ((position,),) = fetch(self.connection, POSITIONS, params)
        share = ((position or 0) - self.lowest) / max(self.highest - self.lowest, 1)
        return self.count * min(max(share, 0.0), 1.0)
