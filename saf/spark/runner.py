"""The runner on Spark: a task for each item of work, wherever Spark has executors.

The driver imports this and no Arrow, which takes longer than most runs have work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from saf.database import Dsn
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.errors import JobFailed, SparkGone
from saf.spark import items, session

if TYPE_CHECKING:
    from pyspark import SparkContext


class SparkRunner:
    """Runs items of work as tasks of Spark; a `saf.forwarding.runner.Runner`.

    ``start_spark`` returns the session. It is called when there is work, and not before, so a run
    that finds nothing starts no Spark. Its argument says whether the work is much.
    """

    def __init__(self, start_spark: Callable[[bool], SparkContext]) -> None:
        self._start_spark = start_spark
        self._spark: SparkContext | None = None

    @property
    def spark(self) -> SparkContext:
        """The session's context, once it is started."""
        assert self._spark is not None  # noqa: S101 - `start` comes first
        return self._spark

    def start(self, work: Sequence[Work]) -> None:
        """Start Spark, unless it is started."""
        if self._spark is None:
            self._spark = self._start_spark(any(item.much for item in work))

    def slots(self) -> int:
        """Return how many tasks Spark runs at a time now: a cluster's executors come and go."""
        from py4j.protocol import Py4JError

        try:
            return int(self.spark.defaultParallelism)
        except (Py4JError, ConnectionError, EOFError) as error:
            raise SparkGone(session.first_line(error)) from error

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:
        """Run one Spark job; if anything goes wrong with it, raise one readable error."""
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        try:
            self.spark.setJobGroup(group, "saf forward", interruptOnCancel=True)
            return self._run(list(enumerate(work)), rules, group)
        except (Py4JNetworkError, ConnectionError) as error:
            raise SparkGone(session.first_line(error)) from error
        except (Py4JError, PySparkException, EOFError) as error:
            raise JobFailed(session.first_line(error)) from error

    def _run(
        self, work: Sequence[items.Numbered], rules: ForwardingRules, group: str
    ) -> list[Receipt]:
        evaluated = [one for one in work if rules.transforms or one[1].routes.in_sql]
        others = [one for one in work if not rules.transforms and not one[1].routes.in_sql]
        if not evaluated:
            return self._deliver(others, rules)
        from saf.spark.evaluation import receipts  # needs Arrow at the driver

        return receipts(evaluated, rules, group, meanwhile=lambda: self._deliver(others, rules))

    def _deliver(self, work: Sequence[items.Numbered], rules: ForwardingRules) -> list[Receipt]:
        """Run a job with a task for each item, of which nothing is evaluated."""
        if not work:
            return []
        packed = self.spark.parallelize(items.partitions(work), len(work))
        return packed.mapPartitions(task(rules)).collect()

    def stop(self) -> None:
        """End the session, if it was started, in order."""
        if self._spark is not None:
            session.stop(self._spark)

    def let_go(self, source: Dsn) -> None:
        """Do nothing: workers end, or close the connection a minute after they last used it."""

    def cancel(self, group: str) -> None:
        """Cancel the job, unless Spark does not answer either."""
        with suppress(Exception):  # it may not answer, and be cut off
            self.spark.cancelJobGroup(group)

    def abandon(self) -> None:
        """Give up a JVM that does not answer any more; `stop` would wait for it."""
        self._spark = None
        session.abandon()


def task(rules: ForwardingRules) -> Callable[[Iterable[bytes]], Iterator[Receipt]]:
    """Return the function for mapPartitions: an item in, receipts out."""

    def run(partition: Iterable[bytes]) -> Iterator[Receipt]:
        from saf.forwarding.runner import item_alone

        for handed in partition:
            yield from item_alone(*items.opened(handed), rules)

    return run
