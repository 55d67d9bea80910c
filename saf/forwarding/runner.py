"""Runners: they run the engine for items of work, and return its receipts.

A forwarder plans its work and has a runner run it: Spark (`saf.spark.runner`), if there is much
work or executors are on other machines; or this process (`InProcess`). The result for an item is
the same everywhere, because the engine is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Unexpected
from saf.logger import Log

log = Log("saf.task")


class Runner(Protocol):
    """Runs items of work, some at a time. Called from threads of the forwarder, one at a time."""

    def start(self, *, much: bool) -> None:
        """Get ready, which may take seconds; called before all else, and again for each cycle.

        A run that finds nothing to do never calls it. ``much`` says whether the first work is much.
        """

    def slots(self) -> int:
        """How many items run at a time now.

        Raises:
            SparkGone: Spark has ended.
        """

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run each item to its end; ``group`` tells this call apart from others.

        Raises:
            JobFailed: the job ended without receipts; another attempt may succeed.
            SparkGone: Spark has ended.
        """

    def let_go(self, source: Dsn) -> None:
        """Keep no connection to a database that is no longer a source: it may be dropped."""

    def cancel(self, group: str) -> None:
        """End a call that hangs. Raises nothing; it may be in vain."""

    def abandon(self) -> None:
        """Give up what does not answer any more; `run` then raises SparkGone."""


def run_item(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    """Run one item of work in this process; ``number`` is its place in the call."""
    from saf.engine.source import messages
    from saf.engine.task import Task  # needs Arrow, which a driver of Spark does not

    with closing(messages(item, rules.max_bytes)) as rows:
        return Task(number, item, rules).run(rows)


def item_alone(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    """Run one item of work. Raises nothing, because other brokers' items are in the same job."""
    return bounded(number, item, lambda: run_item(number, item, rules))


def bounded(number: int, item: Work, run: Callable[[], list[Receipt]]) -> list[Receipt]:
    """Call ``run`` and return its receipts; what it raises is the problem of that broker."""
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

    def start(self, *, much: bool) -> None:
        """Nothing has to start."""

    def slots(self) -> int:
        """One."""
        return 1

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:  # noqa: ARG002 - a runner's signature
        """Run each item to its end."""
        return [
            receipt for number, item in enumerate(work) for receipt in run_item(number, item, rules)
        ]

    def let_go(self, source: Dsn) -> None:
        """Close what this process has kept of it."""
        from saf.database import connections  # needs Arrow

        connections.forget(source)

    def cancel(self, group: str) -> None:
        """Does nothing, because it is this process that hangs."""

    def abandon(self) -> None:
        """Does nothing."""
