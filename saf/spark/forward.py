"""The forwarder: cycles of open, read, route, deliver, close, over any number of source brokers.

The driver holds leases and opens and closes batches; messages never pass through it. Tasks read,
deliver and mark (`saf.spark.source`, `saf.spark.delivery`). Whatever goes wrong for one broker
or one destination is noted in the `Summary`, and the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from saf.config import Settings
from saf.database import check_schema, unavailable_if_lost
from saf.errors import Fenced, SafError, Unavailable, UsageError
from saf.maintenance import purge_by_rules
from saf.spark.broker import SourceBroker
from saf.spark.summary import Summary
from saf.spark.work import Policy, Receipt, Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger("saf.forward")

TICK_SECONDS = 0.2
PURGE_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """How far the cycle in hand is, in messages; shown to people."""

    done: int
    total: int


class Forwarder:
    """Forwards the outboxes of all configured brokers.

    ``spark`` is called for the session when there is work, and not before: a run that finds
    nothing costs no Spark. Its argument says whether the work is much.
    """

    def __init__(
        self,
        settings: Settings,
        spark: Callable[[bool], SparkSession],
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        options = settings.forwarder
        self.options = options
        self.start_spark = spark
        self.progress = progress
        self.summary = Summary()
        self.brokers = [
            SourceBroker(
                name,
                broker.dsn,
                lease_seconds=options.lease_seconds,
                declared=settings.declared,
            )
            for name, broker in settings.brokers.items()
        ]
        self.policy = Policy(
            destinations={n: (d.dsn, d.quality) for n, d in settings.destinations.items()},
            chunk_rows=options.chunk_rows,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.max_bytes,
            attempts=options.attempts,
        )
        self.purge = settings.purge
        self._purge_at = 0.0
        self._stop = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saf-spark")

    def stop(self) -> None:
        """Finish the chunks in hand and end. Safe to call from a signal handler."""
        self._stop = True

    def drain(self) -> Summary:
        """Forward everything that was committed before the call, and end.

        What is committed meanwhile goes along as long as the cycles stay full, so a run under
        steady load ends too.
        """
        started = time.monotonic()
        try:
            while not self._stop:
                before = self.summary.forwarded
                worked = self.cycle()
                full = self.summary.forwarded - before >= self.options.chunk_rows
                more = full or any(broker.resumed for broker in self.brokers)
                if not worked or not more or self.summary.problems:
                    break
            self.summary.idle = not any(broker.shards for broker in self.brokers)
            self._note_waiting()
            self._purge()
        finally:
            self._leave()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def loop(self, report: Callable[[Summary], None]) -> Summary:
        """Cycle until `stop`, with a pause after a cycle that found nothing or met a problem.

        ``report`` gets a summary of each cycle that did something.
        """
        whole = Summary()
        started = time.monotonic()
        try:
            while not self._stop:
                self.summary = Summary()
                began = time.monotonic()
                worked = self.cycle()
                self._note_waiting()
                self.summary.seconds = time.monotonic() - began
                if worked or self.summary.problems:
                    report(self.summary)
                whole.add(self.summary)
                if not worked:
                    self._purge()
                if not worked or self.summary.problems:
                    self._pause(self.options.interval_seconds)
        finally:
            self._leave()
        whole.stopped = True
        whole.seconds = time.monotonic() - started
        return whole

    def cycle(self) -> bool:
        """Forward what is pending now, once; return whether there was anything to do."""
        found: list[Work] = []
        much = False
        for broker in self.brokers:
            try:
                broker.tend()
                found += broker.open_work(self.options.default_destination)
                much |= broker.much
            except (Unavailable, UsageError) as error:
                self._problem(broker.name, error)
                broker.forget_connection()
        if not found:
            return False
        self.summary.cycles += 1
        spark = self._session(much)
        # asked anew each time: a cluster's executors come and go
        tasks = self.options.tasks or spark.sparkContext.defaultParallelism
        parts = max(1, tasks // len(found)) if much else 1
        work = [part for item in found for part in item.split(parts)]
        self._settle(work, self._run(spark, work))
        return True

    def _session(self, much: bool) -> SparkSession:
        """The session; while it starts, the leases are kept."""
        session = self._pool.submit(self.start_spark, much)
        while not wait_for([session], timeout=TICK_SECONDS).done:
            self._each(SourceBroker.renew)
        return session.result()

    def _run(self, spark: SparkSession, work: Sequence[Work]) -> list[Receipt]:
        """The Spark job; meanwhile, leases are renewed and a wish to stop is passed on."""
        job = self._pool.submit(self._receipts, spark, work)
        show = self._start_progress(work)
        told = False
        while not wait_for([job], timeout=TICK_SECONDS).done:
            if self._stop and not told:
                told = True
                self._each(SourceBroker.stop)
            self._each(SourceBroker.renew)
            if show:
                show()
        return _result(job)

    def _receipts(self, spark: SparkSession, work: Sequence[Work]) -> list[Receipt]:
        # Arrow and Spark take a second to import, which a run that finds nothing saves
        from saf.spark.delivery import deliver
        from saf.spark.receipts import RECEIPT_SCHEMA
        from saf.spark.source import messages

        pending = messages(spark, work, self.policy.max_bytes)
        receipts = pending.mapInArrow(deliver(work, self.policy), RECEIPT_SCHEMA)
        return [Receipt(**row.asDict()) for row in receipts.collect()]

    def _settle(self, work: Sequence[Work], receipts: Sequence[Receipt]) -> None:
        complete: set[int] = set()
        for receipt in receipts:
            if receipt.destination is not None:
                self._count(receipt)
                continue
            if receipt.complete:
                complete.add(receipt.work)
            self.summary.stopped |= receipt.stopped
            self.summary.parked += receipt.parked
            self.summary.dead += receipt.dead
            name = work[receipt.work].broker
            if receipt.error_kind == Fenced.__name__:
                log.info("taken_over", broker=name, detail=receipt.error)
            elif receipt.error_kind is not None and receipt.error is not None:
                self._note(name, receipt.error_kind, receipt.error)
        for broker in self.brokers:
            mine = [
                work[number] for number in sorted(complete) if work[number].broker == broker.name
            ]
            try:
                broker.close(mine)
                self.summary.batches += len({item.batch.number for item in mine})
            except Fenced as error:
                log.info("taken_over", broker=broker.name, detail=str(error))
            except Unavailable as error:
                self._problem(broker.name, error)
                broker.forget_connection()

    def _count(self, receipt: Receipt) -> None:
        assert receipt.destination is not None  # noqa: S101 - for the type checker
        counts = self.summary.by_destination
        counts[receipt.destination] = counts.get(receipt.destination, 0) + receipt.messages
        self.summary.forwarded += receipt.messages
        self.summary.dropped += receipt.dropped

    def _start_progress(self, work: Sequence[Work]) -> Callable[[], None] | None:
        """A function that reports how far the work is; None if nobody watches."""
        if self.progress is None:
            return None
        report = self.progress
        spans: list[tuple[SourceBroker, int, int, int]] = []
        for broker in self.brokers:
            mine = [item for item in work if item.broker == broker.name]
            if mine:
                spans.append((broker, *broker.count(mine)))
        total = sum(count for _, count, _, _ in spans)

        def show() -> None:
            done = 0.0
            for broker, count, lowest, highest in spans:
                share = (broker.position() - lowest) / max(highest - lowest, 1)
                done += count * min(max(share, 0.0), 1.0)
            report(Progress(int(done), total))

        return show

    def _note_waiting(self) -> None:
        for broker in self.brokers:
            try:
                self.summary.waiting += [
                    {
                        "broker": broker.name,
                        "lane": str(lane.key),
                        "attempts": lane.attempts,
                        "next_attempt_at": lane.next_attempt_at.isoformat(),
                        "error": lane.error,
                    }
                    for lane in broker.still_waiting()
                ]
            except Unavailable as error:
                self._problem(broker.name, error)
                broker.forget_connection()

    def _purge(self) -> None:
        """Purge the source brokers, now and then; leases are kept meanwhile."""
        if self._stop or time.monotonic() < self._purge_at:
            return
        self._purge_at = time.monotonic() + PURGE_EVERY_SECONDS
        job = self._pool.submit(self._purge_all)
        while not wait_for([job], timeout=TICK_SECONDS).done:
            self._each(SourceBroker.renew)
        job.result()

    def _purge_all(self) -> None:
        for broker in self.brokers:
            try:
                with (
                    unavailable_if_lost(f"broker {broker.name!r}"),
                    broker.dsn.connect(role="purge", autocommit=True) as connection,
                ):
                    check_schema(connection)
                    purge_by_rules(connection, broker.dsn, self.purge)
            except SafError as error:
                # no reason to fail: a forwarder need not have the right, and `saf purge` says why
                log.debug("not_purged", broker=broker.name, error=str(error))

    def _each(self, action: Callable[[SourceBroker], None]) -> None:
        for broker in self.brokers:
            try:
                action(broker)
            except Unavailable as error:
                log.warning("unavailable", broker=broker.name, error=str(error))

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(min(TICK_SECONDS, max(0.0, until - time.monotonic())))

    def _problem(self, broker: str, error: SafError) -> None:
        self._note(broker, type(error).__name__, str(error))

    def _note(self, broker: str, kind: str, error: str) -> None:
        problem = {"broker": broker, "kind": kind, "error": error}
        if problem not in self.summary.problems:
            self.summary.problems.append(problem)

    def _leave(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for broker in self.brokers:
            broker.leave()


def _result(job: Future[list[Receipt]]) -> list[Receipt]:
    """The receipts, or what went wrong with the job itself in one readable error."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        return job.result()
    except (Py4JError, PySparkException, ConnectionError, EOFError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise SafError(
            f"the Spark job failed: {lines[0] if lines else type(error).__name__}. Its batches "
            "stay open and are forwarded by the next run"
        ) from error
