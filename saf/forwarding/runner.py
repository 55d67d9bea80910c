"""Runners: what maps the engine over items of work, and hands back their receipts.

A forwarder plans its work and has it run: by Spark (`saf.spark.runner`) where there is much of it
or executors are elsewhere, or in this process (`InProcess`). What comes of an item is the same
everywhere, because the engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import Unexpected
from saf.logger import Log

log = Log("saf.task")


class Runner(Protocol):
    """Runs items of work, some at a time. Called from threads of the forwarder, one at a time."""

    def start(self, *, much: bool) -> None:
        """Be ready, which may take seconds; called before all else, and again for each cycle.

        A run that finds nothing to do never calls it. ``much`` says what the first work is.
        """

    def slots(self) -> int:
        """How many items run at a time now.

        Raises:
            SparkGone: what runs them has ended.
        """

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run each item to its end; ``group`` tells this call apart from others.

        Raises:
            JobFailed: it ended without receipts, and may go better another time.
            SparkGone: what runs them has ended.
        """

    def let_go(self, source: Dsn) -> None:
        """A database is no source any more: keep no connection to it, so that it can be dropped."""

    def cancel(self, group: str) -> None:
        """Have a call that hangs come to its end; raises nothing, and may be in vain."""

    def abandon(self) -> None:
        """Let go of what does not answer any more: `run` raises SparkGone."""


def run_item(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    """One item of work, in this process; ``number`` is its place among those of a call."""
    from saf.engine.source import messages
    from saf.engine.task import Task  # needs Arrow, which a driver of Spark does not

    return Task(number, item, rules).run(messages(item, rules.max_bytes))


def item_alone(number: int, item: Work, rules: ForwardingRules) -> list[Receipt]:
    """One item of work, of which nothing is raised: others' items are in the same job."""
    return bounded(number, item, lambda: run_item(number, item, rules))


def bounded(number: int, item: Work, run: Callable[[], list[Receipt]]) -> list[Receipt]:
    """What running an item gives; whatever it raises is that broker's problem."""
    try:
        return run()
    except Exception as error:
        log.exception("task_failed", broker=item.broker)
        unexpected = Unexpected(f"broker {item.broker!r}", error)
        kind = type(unexpected).__name__
        return [Receipt(work=number, destination=None, error_kind=kind, error=str(unexpected))]


class InProcess:
    """Runs items one after the other, here: for little work, for tests, without Spark.

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
        """Nobody can: it is this process that hangs."""

    def abandon(self) -> None:
        """There is nothing to let go of."""
