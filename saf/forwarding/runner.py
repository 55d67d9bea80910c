"""Runners: they run the engine for items of work, and return its receipts. A vigil watches a job.

A forwarder plans its work and has a runner run it: Spark (`saf.spark.runner`), this process
(`InProcess`), or either one, depending on the amount of work (`LittleHere`). The result for an
item is the same everywhere, because the engine is the same.

The `Vigil` notices when a job hangs, by the signs of life of its tasks (`saf.engine.pulse`). The
driver renews a lease only as long as its tasks live. If a task has a session at its source and is
silent for a whole lease, the task and its job are given up: Spark kills the process, the batch
stays open, and the next forwarder continues from its position. A job is also given up if none of
its tasks gives signs of life any more, as when Spark itself hangs. A job that has not begun may
wait longer, as long as Spark answers; during that time, other members may take its shards.

Time in which the driver slept, e.g. because its machine was suspended, does not count against its
tasks: they have slept too. So silence is counted from the time at which the driver was awake again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Protocol
from uuid import uuid4

import psycopg

from saf.database import Dsn, connections
from saf.engine.pulse import silent
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Unavailable, Unexpected
from saf.telemetry.logger import Log

log = Log("saf.task")

SILENT_LEASES = 2
"""Leases for which Spark may be silent."""
BEGIN_SECONDS = 600.0
"""Seconds that a job may wait for its first task: executors may need to start."""
SLEPT = 2 / 3
"""Part of a lease after which an inactive driver has slept: normally it checks twice as often."""


class Runner(Protocol):
    """Runs items of work, some at a time. Called from threads of the forwarder.

    Calls of `run` do not wait for each other, and `slots` may be called at the same time.
    """

    def start(self, work: Sequence[Work]) -> None:
        """Prepare for the work of a cycle, which may take seconds; called before all else.

        A run that finds nothing to do never calls it.
        """

    def is_here(self, sources: int) -> bool:
        """Return whether little work may run where it is found, in this process.

        If so, make room for connections to ``sources`` sources.
        """

    def slots(self) -> int:
        """Return how many items run at a time now; a runner that answers does not hang.

        Raises:
            SparkGone: Spark has ended.
        """

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run each item to its end; ``group`` identifies this call.

        Raises:
            JobFailed: the job ended without receipts; another attempt may succeed.
            SparkGone: Spark has ended.
        """

    def let_go(self, source: Dsn) -> None:
        """Keep no connection to a database that is no longer a source: it may be dropped."""

    def cancel(self, group: str) -> None:
        """End a call that hangs. Raises nothing, and may fail."""

    def abandon(self) -> None:
        """Give up a runner that does not answer any more; `run` then raises SparkGone."""


def run_item(
    number: int, item: Work, rules: ForwardingRules, *, closes: bool = False
) -> list[Receipt]:
    """Run one item of work in this process; ``number`` is its place in the call.

    ``closes`` is as in `saf.engine.task.Task`.
    """
    # these need Arrow; a driver of Spark does not
    from saf.engine.context import Context
    from saf.engine.source import messages
    from saf.engine.task import Task

    with closing(messages(item, rules.max_bytes)) as rows:
        return Task(Context(number, item, rules), closes=closes).run(rows)


def item_alone(
    number: int, item: Work, rules: ForwardingRules, *, closes: bool = False
) -> list[Receipt]:
    """Run one item of work. Raises nothing, because other brokers' items are in the same job."""
    return bounded(number, item, lambda: run_item(number, item, rules, closes=closes))


def bounded(number: int, item: Work, run: Callable[[], list[Receipt]]) -> list[Receipt]:
    """Call ``run`` and return its receipts; an exception becomes a problem of that broker."""
    try:
        return run()
    except Exception as error:
        log.exception("task_failed", broker=item.broker)
        unexpected = Unexpected(f"broker {item.broker!r}", error)
        kind = type(unexpected).__name__
        return [Receipt(work=number, destination=None, error_kind=kind, error=str(unexpected))]


class InProcess:
    """Runs items one after the other, in this process: for little work, and for tests.

    Classifiers in SQL need Spark; messages for them wait.
    """

    def start(self, work: Sequence[Work]) -> None:  # noqa: ARG002 - a runner's signature
        """Load the modules that the work needs, while the forwarder keeps its leases."""
        import saf.engine.source
        import saf.engine.task  # noqa: F401 - Arrow, and its drivers

    def is_here(self, sources: int) -> bool:
        """Return True, and make room for connections to ``sources`` sources."""
        connections.make_room(sources)
        return True

    def slots(self) -> int:
        """Return 1."""
        return 1

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:  # noqa: ARG002 - a runner's signature
        """Run each item to its end."""
        return [
            receipt
            for number, item in enumerate(work)
            for receipt in item_alone(number, item, rules, closes=not item.much)
        ]

    def let_go(self, source: Dsn) -> None:
        """Close this process's kept connections to a database."""
        connections.forget(source)

    def cancel(self, group: str) -> None:
        """Do nothing, because it is this process that hangs."""

    def abandon(self) -> None:
        """Do nothing."""


FEW = 8
"""Maximum brokers whose little work is faster here, one after the other, than in a Spark job."""


class LittleHere:
    """Runs little work in this process, and other work by ``spark``, which it starts when needed.

    Work is little if it has few messages, for few brokers, and no classifiers: these are users'
    code, and a task of Spark that hangs can be ended.
    """

    def __init__(self, spark: Runner) -> None:
        self._here = InProcess()
        self._spark = spark
        self._started = False

    def start(self, work: Sequence[Work]) -> None:
        """Start Spark if there is more than little work; otherwise load the modules needed here."""
        runner = self._for(work)
        runner.start(work)
        self._started |= runner is self._spark

    def is_here(self, sources: int) -> bool:
        """Return True, and make room for connections to ``sources`` sources."""
        return self._here.is_here(sources)

    def slots(self) -> int:
        """Return how many tasks Spark runs at a time now, if it is started; otherwise 1."""
        return self._spark.slots() if self._started else self._here.slots()

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run each item to its end, here or by Spark."""
        return self._for(work).run(work, rules, group)

    def _for(self, work: Sequence[Work]) -> Runner:
        little = len(work) <= FEW and not any(item.much or item.routes.routers for item in work)
        return self._here if little else self._spark

    def let_go(self, source: Dsn) -> None:
        """Close this process's and Spark's kept connections to a database."""
        self._here.let_go(source)
        self._spark.let_go(source)

    def cancel(self, group: str) -> None:
        """Cancel Spark's job; calls that hang here end at the bounds of their sessions."""
        if self._started:
            self._spark.cancel(group)

    def abandon(self) -> None:
        """Give up a Spark that does not answer any more."""
        self._spark.abandon()


class Vigil:
    """The vigil over the tasks of one job."""

    def __init__(self, work: Sequence[Work]) -> None:
        self.group = f"saf {uuid4()}"
        """The name by which Spark knows the job."""
        self._lives: dict[str, list[str]] = {}
        for item in work:
            self._lives.setdefault(item.broker, []).append(item.life)
        self._lease = max(item.lease_seconds for item in work)
        self._heard_at = self._awake_at = self._awake_since = time.monotonic()
        self.heard = False
        """Whether any task has given a sign of life."""
        self._lost: dict[str, float] = {}

    @property
    def brokers(self) -> list[str]:
        """The brokers that its tasks belong to."""
        return list(self._lives)

    def hear(self) -> None:
        """Count as a sign of life of the job that the driver itself works for it."""
        self._heard_at = time.monotonic()

    def silence(self, broker: str, connection: psycopg.Connection[Any]) -> float:
        """Return the seconds since the last sign of life of a broker's most silent task, or the
        job."""
        now = self._awake()
        seconds = [
            min(life, now - self._awake_since)
            for life in silent(connection, self._lives.get(broker, []))
        ]
        if not seconds:
            self._lost.pop(broker, None)
            return now - self._heard_at
        self.heard = True
        self._heard_at = max(self._heard_at, now - min(seconds))
        self._lost[broker] = max(seconds)
        return max(seconds)

    @property
    def given_up(self) -> Unavailable | None:
        """Why to stop waiting for the job; None: keep waiting."""
        silence = self._awake() - self._heard_at
        lost = sorted(name for name, seconds in self._lost.items() if seconds >= self._lease)
        if lost:
            what = f"a task for {', '.join(map(repr, lost))}"
            reason = f"it was not heard of for {self._lease:g} s: its process hangs"
        elif self.heard and silence >= SILENT_LEASES * self._lease:
            what, reason = "Spark", f"no task was heard of for {silence:.0f} s"
        elif not self.heard and silence >= max(self._lease, BEGIN_SECONDS):
            what, reason = "Spark", f"no task has begun for {silence:.0f} s"
        else:
            return None
        return Unavailable(what, f"{reason}. The next run forwards what it had in hand")

    def _awake(self) -> float:
        """Return the time; note whether the driver has slept since the last call."""
        now = time.monotonic()
        if now - self._awake_at > self._lease * SLEPT:
            self._awake_since = self._heard_at = now
            self._lost.clear()
        self._awake_at = now
        return now
