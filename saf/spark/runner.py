"""The runner on Spark: a task for each item of work, wherever Spark has executors.

Items contain the passwords of their sources. So they must not be in a plan, which Spark shows, or
in a function, which goes to every task. Each item is in the partition of its own task.

The driver imports this module but not Arrow, whose import takes longer than most runs work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import JobFailed, SparkGone
from saf.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Numbered = tuple[int, Work]
"""An item, and its number in receipts."""


class SparkRunner:
    """Runs items of work as tasks of Spark; a `saf.forwarding.runner.Runner`.

    ``start_spark`` returns the session. It is called only when there is work, so a run without
    work starts no Spark.
    """

    def __init__(self, start_spark: Callable[[], SparkSession]) -> None:
        self._start_spark = start_spark
        self._spark: SparkSession | None = None

    @property
    def spark(self) -> SparkSession:
        """The session, once Spark is started."""
        assert self._spark is not None  # noqa: S101 - `start` comes first
        return self._spark

    def start(self, work: Sequence[Work]) -> None:  # noqa: ARG002 - a runner's signature
        """Start Spark, unless it is running."""
        if self._spark is None:
            self._spark = self._start_spark()

    def is_here(self, sources: int) -> bool:  # noqa: ARG002 - a runner's signature
        """Return False: work is Spark's."""
        return False

    def slots(self) -> int:
        """Return how many tasks Spark can run at a time now: executors of a cluster come and go."""
        from py4j.protocol import Py4JError

        try:
            return int(self.spark.sparkContext.defaultParallelism)
        except (Py4JError, ConnectionError, EOFError) as error:
            raise SparkGone(session.first_line(error)) from error

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run one Spark job; turn any failure into one readable error."""
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        try:
            context = self.spark.sparkContext
            context.setJobGroup(group, "saf forward", interruptOnCancel=True)
            return self._run(list(enumerate(work)), rules, group)
        except (Py4JNetworkError, ConnectionError) as error:
            raise SparkGone(session.first_line(error)) from error
        except (Py4JError, PySparkException, EOFError) as error:
            raise JobFailed(session.first_line(error)) from error

    def _run(self, work: Sequence[Numbered], rules: ForwardingRules, group: str) -> list[Receipt]:
        evaluated = [item for item in work if rules.transforms or item[1].routes.in_sql]
        others = [item for item in work if not rules.transforms and not item[1].routes.in_sql]
        if not evaluated:
            return self._deliver(others, rules)
        from saf.spark.evaluation import receipts  # imports Arrow at the driver

        meanwhile = partial(self._deliver, others, rules)
        return receipts(self.spark, evaluated, rules, group, meanwhile)

    def _deliver(self, work: Sequence[Numbered], rules: ForwardingRules) -> list[Receipt]:
        """Run a job with a task for each item, without evaluation."""
        if not work:
            return []
        packed = self.spark.sparkContext.parallelize([*map(pickle.dumps, work)], len(work))
        return packed.mapPartitions(task(rules)).collect()

    def stop(self) -> None:
        """End the session cleanly, if one was started."""
        if self._spark is not None:
            self._spark.sparkContext.stop()  # a session's stop fails if the JVM has ended

    def let_go(self, source: Dsn) -> None:
        """Do nothing: workers end, or close the connection a minute after its last use."""

    def cancel(self, group: str) -> None:
        """Cancel the job, unless Spark no longer answers."""
        with suppress(Exception):  # Spark may not answer, and be disconnected
            self.spark.sparkContext.cancelJobGroup(group)

    def abandon(self) -> None:
        """Give up a JVM that no longer answers; `stop` would wait for it."""
        self._spark = None
        session.abandon()


def task(rules: ForwardingRules) -> Callable[[Iterable[bytes]], Iterator[Receipt]]:
    """Return the function for mapPartitions: an item in, receipts out."""

    def run(partition: Iterable[bytes]) -> Iterator[Receipt]:
        from saf.forwarding.runner import item_alone

        for handed in partition:
            number, item = pickle.loads(handed)  # noqa: S301 - our own bytes  # nosec B301
            yield from item_alone(number, item, rules)

    return run
