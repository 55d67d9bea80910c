"""Runners: they run the engine for items of work, and return its receipts.

A forwarder plans its work and has a runner run it: Spark (`saf.spark.runner`), this process
(`InProcess`), or either one, depending on the amount of work (`LittleHere`). The result for an
item is the same everywhere, because the engine is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Unexpected
from saf.telemetry.logger import Log

log = Log("saf.task")


class Runner(Protocol):
    """Runs items of work, some at a time. Called from threads of the forwarder.

    Calls of `run` do not wait for each other, and `slots` may be called at the same time.
    """

    def start(self, work: Sequence[Work]) -> None:
        """Prepare for the work of a cycle, which may take seconds; called before all else.

        A run that finds nothing to do never calls it.
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

    def slots(self) -> int:
        """Return 1."""
        return 1

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:  # noqa: ARG002 - a runner's signature
        """Run each item to its end."""
        from saf.database import connections  # needs Arrow

        connections.make_room(len({item.dsn for item in work}))
        return [
            receipt
            for number, item in enumerate(work)
            for receipt in item_alone(number, item, rules, closes=not item.much)
        ]

    def let_go(self, source: Dsn) -> None:
        """Close this process's kept connections to a database."""
        from saf.database import connections  # needs Arrow

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
