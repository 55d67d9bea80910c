"""The forwarder: cycles of open, read, route, deliver, close, over any number of source brokers.

The driver holds leases, and opens and closes batches; messages never pass through it. Tasks, which
a `saf.forwarding.runner` runs, read, deliver and mark (`saf.engine.source`, `saf.engine.task`).
Problems of one broker or one destination are noted in the `Summary`, and the others continue.

*Little and deep.* A cycle is one job of the runner, and ends when its last task does. No broker
should wait for another's deep backlog. So deep backlogs leave one slot free, and while tasks work
on them the driver runs cycles of little work beside them. If another backlog turns out to be deep,
or there is only one slot, then after ``turn_seconds`` the driver asks the running tasks to end
after their chunk, as in `stop`. Their batches stay open, and the next cycle continues all backlogs
from their positions. While no broker waits, nothing is interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import Semaphore, Thread
from typing import TypeVar

from saf.config import Settings
from saf.database.background import Background
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Fenced, JobFailed, SafError, SparkGone, Unavailable
from saf.forwarding import summary
from saf.forwarding.broker import Here, SourceBroker
from saf.forwarding.purging import Purging
from saf.forwarding.roster import Roster
from saf.forwarding.runner import BEGIN_SECONDS, SILENT_LEASES, Runner, Vigil
from saf.forwarding.sources import Sources
from saf.forwarding.summary import Meter, Progress, Summary
from saf.forwarding.surveys import plan, surveyed, tasks_within
from saf.setaside.backoff import SHOWN
from saf.telemetry.logger import Log

log = Log("saf.forward")

T = TypeVar("T")

SPARK_GONE = SparkGone.__name__

AT_ONCE = 8
"""Visits that forward little work at a time."""
ALONE_SECONDS = 0.25
"""Time for which a visit may continue with little work, if there is no other source."""

TICK_SECONDS = 0.2
RUNNER_THREADS = 3
"""Threads for a job, for another one beside it, and for questions to the runner."""
CANCEL_SECONDS = 10.0
"""Seconds that a runner may take to end a job that was given up."""
TELL_SECONDS = 1.0
"""Seconds between stop requests to tasks that could not be reached before."""


@dataclass(frozen=True)
class Beside:
    """Little work that is done beside a job of deep backlogs, and the limit of its tasks."""

    little: Sequence[Work]
    cap: int | None


class Forwarder:
    """Forwards the outboxes of all configured brokers.

    ``runner`` runs the work. It is started only when there is work. ``progress`` watches the
    running tasks; ``sources``, how many sources a drain has visited, and how many there are.
    """

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        *,
        progress: Callable[[Progress], None] | None = None,
        sources: Callable[[int, int], object] | None = None,
    ) -> None:
        options = settings.forwarder
        self.options = options
        self.runner = runner
        self.progress = progress
        self.summary = Summary()
        self.roster = Roster(settings, self._problem, runner.let_go)
        if sources is not None:
            self.roster.watch = sources
        self.beat: Callable[[bool], object] = lambda _: None
        """Called after a loop's cycles that forwarded, or found nothing at all brokers."""
        limits = [d.max_connections for d in settings.destinations.values() if d.max_connections]
        self.most = min(limits, default=None)
        """Maximum tasks at a time, so that no destination gets too many connections."""
        self.cycles = 0
        self.rules = ForwardingRules(
            destinations=dict(settings.destinations),
            chunk_rows=options.chunk_rows,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.max_bytes,
            attempts=options.attempts,
            max_rejected=options.max_rejected,
            transforms={transform.service: transform.function for transform in settings.transforms},
            not_deterministic=frozenset(
                transform.service
                for transform in settings.transforms
                if not transform.deterministic
            ),
        )
        self.purging = Purging(settings.purge)
        self.sources = Sources(settings)
        self._fleets = bool(settings.fleets)
        self._failed_job: JobFailed | None = None
        """This cycle's job if it failed; `_failed_at` has the brokers that it was for."""
        self._failed_at: set[str] = set()
        self._stop = False
        self._background = Background(RUNNER_THREADS, "saf-runner")
        self._turns = Semaphore(AT_ONCE)

    def stop(self) -> None:
        """Finish the current chunks and end. Safe to call from a signal handler."""
        self._stop = self.roster.stopped = True

    def drain(self) -> Summary:
        """Forward everything that was committed before the call, and end.

        Messages committed during the run are forwarded too as long as cycles stay full. So a run
        under steady load ends too.
        """
        started = time.monotonic()
        failed_jobs = 0
        self.sources.start(once=True)
        try:
            while not self._stop:
                before = self.summary.forwarded
                try:
                    worked = self.cycle()
                except SparkGone as error:
                    self._note_spark_gone(error)
                    break
                failed_jobs = failed_jobs + 1 if self._failed_job else 0
                if 0 < failed_jobs < self.options.attempts:
                    self._pause(self.options.interval_seconds)
                    continue
                if self._failed_job:
                    failed_jobs = 0
                    self._leave_to_another_run()
                full = self.summary.forwarded - before >= self.options.chunk_rows
                brokers = self.roster.well()
                more = full or any(
                    b.resumed or b.unfinished or b.lanes_left or b.held_left for b in brokers
                )
                if not (worked and more) and not self.roster.waiting:
                    break
            self._note_failed_job()
            brokers = list(self.roster.brokers.values())
            self.summary.idle = bool(brokers) and all(broker.idle for broker in brokers)
            self._note_waiting()
            if not self._stop:
                self.purging.start(self.roster.well())
            self._finish_purges()
            self.sources.finish(lambda: self._stop)
            self._note_arrived()
        finally:
            self._leave()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def loop(self, report: Callable[[Summary], None]) -> Summary:
        """Cycle until `stop`, with a pause after a cycle that found nothing or had a problem.

        Pauses grow up to ``interval_seconds`` while nothing is found. ``report`` gets a summary of
        each cycle that did something.
        """
        whole = Summary()
        started = time.monotonic()
        self.roster.once = False
        self.sources.start(once=False)
        try:
            while not self._stop:
                self.summary = Summary()
                began = time.monotonic()
                try:
                    worked = self.cycle()
                except SparkGone as error:
                    self._note_spark_gone(error)
                    self._stop = True
                    worked = False
                self._note_failed_job()
                self._note_waiting()
                failed = bool(self.summary.problems)  # a source's problem delays no outbox
                worked |= self._note_arrived()
                self.summary.seconds = time.monotonic() - began
                if worked or self.summary.problems or self.summary.refused:
                    report(self.summary)
                whole.add(self.summary)
                if not self._stop:
                    self.purging.start(self.roster.well())
                if worked or self.roster.all_well or not (self.roster.brokers or self._fleets):
                    self.beat(worked)
                if failed:
                    self._pause(self.options.interval_seconds)
                elif not worked:
                    self._pause(self.roster.rest_seconds)
            self._finish_purges()
        finally:
            self._leave()
        whole.stopped = True
        whole.problems = [
            problem for problem in self.summary.problems if problem["kind"] == SPARK_GONE
        ]
        whole.seconds = time.monotonic() - started
        return whole

    def cycle(self) -> bool:
        """Forward all pending messages once; return whether there were any."""
        began, before = time.monotonic(), self.summary.forwarded
        self._failed_job = None
        self._failed_at.clear()
        found, forwarded = self._visit()
        if not found or self._stop:
            if forwarded:
                self.summary.cycles += 1
                summary.cycle(time.monotonic() - began, self.summary.forwarded - before)
            return forwarded
        self._answer(lambda: self.runner.start(found), within=BEGIN_SECONDS)
        # asked in each cycle, because a cluster's executors come and go
        slots = self.options.tasks or self._slots()
        room = slots if self.most is None else min(slots, self.most)
        limited = room < slots
        many = {item.broker for item in found if item.much}
        if many and len(self.roster.brokers) > 1 and room > 1:
            deep = [item for item in found if item.broker in many]
            little = [item for item in found if item.broker not in many]
            beside = Beside(little, cap=1 if limited else None)
            self._work(deep, room - 1, cap=room - 1, beside=beside)
        else:
            self._work(found, room, cap=room if limited else None)
        self.roster.rest()
        summary.cycle(time.monotonic() - began, self.summary.forwarded - before)
        return True

    def _visit(self, but: Sequence[SourceBroker] = ()) -> tuple[list[Work], bool]:
        """Visit the brokers; return the work, and whether visits have forwarded any."""
        sources, keep = len(self.roster.brokers), not self.roster.once
        limited = self.most is not None or self._limits()  # idle connections would count, too
        self.roster.here = None
        if not limited and self.runner.is_here(sources):
            seconds = ALONE_SECONDS if sources == 1 and keep else 0.0
            self.roster.here = Here(rules=self.rules, turns=self._turns, seconds=seconds, keep=keep)
        found = self.roster.visit(self.options.default_destination, but)
        self.summary.stopped |= self._stop and self.roster.waiting  # a visit has not ended
        forwarded = self.roster.take_forwarded()
        for item, receipts in forwarded:
            summary.receipts([item], receipts)
            for receipt in receipts:
                if receipt.destination is not None:
                    self._count(item.broker, receipt)
            self.summary.batches += 1
            self.roster.brokers[item.broker].unfinished = False
        return found, bool(forwarded)

    def _work(
        self,
        found: Sequence[Work],
        slots: int,
        *,
        cap: int | None,
        beside: Beside | None = None,
    ) -> None:
        """Run one job and settle its results; run cycles of little work ``beside`` it."""
        self.summary.cycles += 1
        self.cycles += 1
        last_turn = {name: broker.last_turn for name, broker in self.roster.brokers.items()}
        limits = self._limits()
        work = plan(found, slots, limits=limits, cap=cap, last_turn=last_turn)
        if not self.roster.once and self.most is None and not limits:
            # in a loop; if connections are limited, idle ones would count too
            work = [replace(item, keep=True, among_others=len(work) > 1) for item in work]
        for broker in self._at_work(work):
            broker.last_turn = self.cycles
        vigil = Vigil(work)
        for broker in self._at_work(work):
            broker.vigil = vigil
        job = self._background.submit(lambda: self._job(work, vigil, limits))
        left_out = len(self._at_work(found)) > len(self._at_work(work))
        try:
            with self._meter(work) as meter:
                receipts = self._run(work, job, vigil, beside, left_out=left_out)
                if meter and sum(receipt.complete for receipt in receipts) == len(work):
                    meter.complete()
        except JobFailed as error:
            log.warning("job_failed", error=error.reason)
            self._failed_job = error
            self._failed_at |= {item.broker for item in work}
            receipts = None
        finally:
            for broker in self._at_work(work):
                broker.vigil = None
        if receipts is not None:
            self._settle(work, receipts, _shards(found))

    def _job(self, work: list[Work], vigil: Vigil, limits: Mapping[str, int]) -> list[Receipt]:
        """Have the runner run the items; runs in the background."""
        # a source with limited connections has none to spare for surveys
        with surveyed(work, but=limits, meanwhile=vigil.hear) as items:
            return self.runner.run(items, self.rules, vigil.group)

    def _limits(self) -> dict[str, int]:
        return {
            name: tasks_within(broker.max_connections)
            for name, broker in self.roster.brokers.items()
            if broker.max_connections
        }

    def _slots(self) -> int:
        return self._answer(self.runner.slots, SILENT_LEASES * self.options.lease_seconds)

    def _answer(self, question: Callable[[], T], within: float) -> T:
        """Ask the runner something in the background, and keep the leases while waiting.

        After a stop request, wait at most one lease.

        Raises:
            Unavailable: the runner has not answered within ``within`` seconds, and is given up.
        """
        asked, began = self._background.submit(question), time.monotonic()
        stopped = False
        while not wait_for([asked], timeout=TICK_SECONDS).done:
            waited = time.monotonic() - began
            if self._stop and not stopped:
                stopped, within = True, min(within, waited + self.options.lease_seconds)
            if waited > within:
                self.runner.abandon()
                raise Unavailable("Spark", f"it has not answered for {within:.0f} s: it hangs")
            self._renew()
        return asked.result()

    def _run(
        self,
        work: Sequence[Work],
        job: Future[list[Receipt]],
        vigil: Vigil,
        beside: Beside | None,
        *,
        left_out: bool,
    ) -> list[Receipt]:
        """Wait for a job; while waiting, renew leases and pass on stop requests."""
        working = self._at_work(work)
        deep = self._at_work(item for item in work if item.much)
        began = visited_at = asked = time.monotonic()
        gave_way, notified = False, set[str]()
        stopped_at, tell_at = None, began
        if beside and beside.little:
            self._work(beside.little, 1, cap=beside.cap)
        while not wait_for([job], timeout=TICK_SECONDS).done:
            now = time.monotonic()
            if self._stop:
                stopped_at = stopped_at or now
            elif deep and not gave_way and now - visited_at > self.options.interval_seconds:
                waits = self._look_beside(working, beside) or left_out
                if waits and now - began > self.options.turn_seconds:
                    gave_way = True
                visited_at = time.monotonic()
            if (stopped_at or gave_way) and now >= tell_at:
                self._tell_to_stop(working if stopped_at else deep, notified)
                tell_at = now + TELL_SECONDS
            self._renew()
            if not vigil.heard and now - asked > self.options.lease_seconds:
                # a task may have to wait for executors, but Spark itself must answer
                self._slots()
                asked = time.monotonic()
            if error := vigil.given_up:
                return self._give_up(job, vigil, error)
            if stopped_at and not vigil.heard and now - stopped_at > self.options.lease_seconds:
                # no task is running yet that could see the request
                self.summary.stopped = True
                error = Unavailable("Spark", "it does not end a job that has not begun: it hangs")
                return self._cancel(job, vigil, error) or []
        if gave_way:
            self.roster.each(SourceBroker.take_back_stop, deep)
        return job.result()

    def _give_up(
        self, job: Future[list[Receipt]], vigil: Vigil, error: Unavailable
    ) -> list[Receipt]:
        """End a job that hangs. Its batches stay open, and its brokers are skipped for a while.

        Raises:
            Unavailable: the runner itself does not answer any more.
        """
        receipts = self._cancel(job, vigil, error)
        if receipts is not None:
            return receipts
        for name in vigil.brokers:
            self._note(name, type(error).__name__, str(error))
            self.roster.failed(name)
        return []

    def _cancel(
        self, job: Future[list[Receipt]], vigil: Vigil, error: Unavailable
    ) -> list[Receipt] | None:
        """Cancel a job; return its receipts if it has ended normally after all.

        Raises:
            Unavailable: the ``error``, because the runner does not answer any more.
        """
        Thread(target=self.runner.cancel, args=[vigil.group], daemon=True).start()
        if not wait_for([job], timeout=CANCEL_SECONDS).done:
            self.runner.abandon()
            raise error
        return job.result() if job.exception() is None else None

    def _tell_to_stop(self, brokers: Iterable[SourceBroker], notified: set[str]) -> None:
        """Ask brokers' tasks to end after their chunk; add the brokers that were asked to
        ``notified``."""

        def tell(broker: SourceBroker) -> None:
            broker.stop()
            notified.add(broker.name)

        self.roster.each(
            tell, [source for source in brokers if source.name not in notified], quiet=True
        )

    def _look_beside(self, working: Sequence[SourceBroker], beside: Beside | None) -> bool:
        """Forward the little work of other brokers; return whether any broker has to wait."""
        if len(self.roster.brokers) == 1:
            return False
        others, _ = self._visit(but=working)
        little = [item for item in others if beside is not None and not item.much]
        # a slow broker would be asked again, and be too late again
        self.roster.give_back(item for item in others if beside is None or item.much)
        if beside is None or not little:
            return bool(others)
        self._work(little, 1, cap=beside.cap)
        self.roster.rest(but=working)
        return len(others) > len(little)

    def _at_work(self, work: Iterable[Work]) -> list[SourceBroker]:
        names = dict.fromkeys(item.broker for item in work)
        return [self.roster.brokers[name] for name in names]

    def _renew(self) -> None:
        due = [broker for broker in self.roster.brokers.values() if broker.renewal_due]
        if due:
            self.roster.each(SourceBroker.renew, due, quiet=True)

    def _settle(
        self, work: Sequence[Work], receipts: Sequence[Receipt], whole: Mapping[str, int]
    ) -> None:
        summary.receipts(work, receipts)
        complete: dict[str, list[Work]] = {item.broker: [] for item in work}
        open_: dict[str, list[Work]] = {item.broker: [] for item in work}
        failed: set[str] = set()
        waits: set[str] = set()
        for receipt in receipts:
            name = work[receipt.work].broker
            if (
                receipt.parked
                or receipt.down
                or (receipt.destination is None and not receipt.complete)
            ):
                waits.add(name)
            if receipt.destination is not None:
                self._count(name, receipt)
                continue
            if receipt.complete:
                complete[name].append(work[receipt.work])
                if not receipt.closed:
                    open_[name].append(work[receipt.work])
            self.summary.stopped |= receipt.stopped and self._stop
            self.summary.parked += receipt.parked
            self.summary.dead += receipt.dead
            if receipt.error_kind == Fenced.__name__:
                log.info("taken_over", broker=name, detail=receipt.error)
            elif receipt.error_kind is not None and receipt.error is not None:
                self._note(name, receipt.error_kind, receipt.error)
                if not receipt.complete:
                    failed.add(name)
        for name in complete:
            group = [entry for entry in receipts if work[entry.work].broker == name]
            self.roster.brokers[name].note(group)
        done = _shards(item for group in complete.values() for item in group)
        for name, shards in whole.items():
            self.roster.brokers[name].unfinished = done[name] < shards
        self.roster.each(
            lambda broker: broker.close(
                open_[broker.name],
                waits=broker.name in waits,
                transformed=bool(self.rules.transforms),
            ),
            self._at_work(work),
        )
        self.summary.batches += sum(
            len({item.batch.number for item in group}) for group in complete.values()
        )
        if self.roster.once:
            for name in failed:
                self.roster.failed(name)

    def _count(self, broker: str, receipt: Receipt) -> None:
        assert receipt.destination is not None  # noqa: S101 - for the type checker
        if arrived := receipt.messages + receipt.dropped:
            brokers = self.summary.by_broker
            brokers[broker] = brokers.get(broker, 0) + arrived
        counts = self.summary.by_destination
        counts[receipt.destination] = counts.get(receipt.destination, 0) + receipt.messages
        self.summary.add_services(receipt.destination, receipt.services)
        self.summary.forwarded += receipt.messages
        self.summary.dropped += receipt.dropped
        self.summary.left_out += receipt.left_out
        if receipt.early:
            early = self.summary.early
            early[receipt.destination] = early.get(receipt.destination, 0) + receipt.early
        if receipt.down:
            self._note_down([receipt.destination])

    def _note_down(self, names: Iterable[str]) -> None:
        self.summary.down = sorted({*self.summary.down, *names})

    def _meter(self, work: Sequence[Work]) -> AbstractContextManager[Meter | None]:
        """Return a context that shows the work's progress, if anybody watches."""
        if self.progress is None:
            return nullcontext()
        limited = {name for name, broker in self.roster.brokers.items() if broker.max_connections}
        return Meter(self.progress, [item for item in work if item.broker not in limited])

    def _note_waiting(self) -> None:
        """Add the waiting lanes to the summary: their number, and some by name.

        Also add the held messages that were due and not moved.
        """
        for broker in self.roster.brokers.values():
            self.summary.refused += broker.take_refused()
            self.summary.locked += broker.locked
            self.summary.waiting_lanes += broker.waiting.lanes
            self._note_down(broker.down & self.rules.destinations.keys())
            self.summary.waiting += [
                {
                    "broker": broker.name,
                    "lane": str(lane.own),
                    "kind": lane.kind,
                    "subject": lane.subject,
                    "attempts": lane.attempts,
                    "next_attempt_at": lane.next_attempt_at.isoformat(),
                    "error": lane.error,
                }
                for lane in broker.waiting.shown[: SHOWN - len(self.summary.waiting)]
            ]

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(min(TICK_SECONDS, max(0.0, until - time.monotonic())))

    def _note_spark_gone(self, error: SparkGone) -> None:
        """Note that Spark has ended; messages forwarded before are still reported."""
        self._problem("Spark", SparkGone(error.reason, stopping=self._stop))
        self.summary.stopped |= self._stop

    def _note_failed_job(self) -> None:
        if self._failed_job is not None:
            for name in sorted(self._failed_at):
                self._problem(name, self._failed_job)

    def _leave_to_another_run(self) -> None:
        """Skip the brokers of a job that fails each time for the rest of this run."""
        self._note_failed_job()
        for name in self._failed_at:
            self.roster.failed(name)

    def _problem(self, broker: str, error: SafError) -> None:
        self._note(broker, type(error).__name__, str(error))

    def _note(self, broker: str, kind: str, error: str) -> None:
        problem = {"broker": broker, "kind": kind, "error": error}
        if problem not in self.summary.problems:
            self.summary.problems.append(problem)
            summary.problem(broker, kind)

    def _note_arrived(self) -> bool:
        """Add what was read from sources to the summary; return whether there was any."""
        arrived = self.sources.take()
        self.summary.received += sum(arrived.messages.values())
        self.summary.dropped += arrived.dropped
        self.summary.dead += arrived.dead
        for name, messages in arrived.messages.items():
            self.summary.by_source[name] = self.summary.by_source.get(name, 0) + messages
        for name, error in arrived.problems.items():
            self._problem(f"source {name}", error)
        return arrived.any

    def _finish_purges(self) -> None:
        self.roster.leave()  # to archive may take minutes, in which another run can forward
        self.purging.finish(lambda: self._stop)

    def _leave(self) -> None:
        self.sources.stop()
        self.sources.finish(lambda: self._stop)
        self._background.dismiss()
        self.purging.dismiss()
        self.roster.leave()


def _shards(work: Iterable[Work]) -> Counter[str]:
    """Return the number of shards by broker."""
    counts: Counter[str] = Counter()
    for item in work:
        counts[item.broker] += len(item.batch.epochs)
    return counts
