"""The runner on Spark: a task for each item of work, wherever Spark has executors.

The driver imports this and no Arrow, which takes longer than most runs have work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from saf.engine.work import Policy, Receipt, Work
from saf.errors import JobFailed, SparkGone
from saf.routing.ways import SQL
from saf.spark import session

if TYPE_CHECKING:
    from pyspark import SparkContext


class SparkRunner:
    """Runs items of work as tasks of Spark; a `saf.forwarding.runner.Runner`.

    ``start_spark`` gives the session when there is work, and not before: a run that finds nothing
    costs no Spark. Its argument says whether the work is much.
    """

    def __init__(self, start_spark: Callable[[bool], SparkContext]) -> None:
        self._start_spark = start_spark
        self._spark: SparkContext | None = None

    @property
    def spark(self) -> SparkContext:
        """The session, once it is started."""
        assert self._spark is not None  # noqa: S101 - `start` comes first
        return self._spark

    def start(self, *, much: bool) -> None:
        """Start Spark, or ask for what is started."""
        self._spark = self._start_spark(much)

    def slots(self) -> int:
        """How many tasks Spark runs at a time now: a cluster's executors come and go."""
        from py4j.protocol import Py4JError

        try:
            return int(self.spark.defaultParallelism)
        except (Py4JError, ConnectionError, EOFError) as error:
            raise SparkGone(session.first_line(error)) from error

    def run(self, work: Sequence[Work], policy: Policy, group: str) -> list[Receipt]:
        """One Spark job; what goes wrong with it is one readable error."""
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        try:
            self.spark.setJobGroup(group, "saf forward", interruptOnCancel=True)
            if any(router.kind == SQL for item in work for router in item.routes.routers):
                from saf.spark.expressions import receipts  # needs Arrow at the driver

                return receipts(work, policy)
            numbers = self.spark.parallelize(range(len(work)), len(work))
            return numbers.mapPartitions(tasks(work, policy)).collect()
        except (Py4JNetworkError, ConnectionError) as error:
            raise SparkGone(session.first_line(error)) from error
        except (Py4JError, PySparkException, EOFError) as error:
            raise JobFailed(session.first_line(error)) from error

    def cancel(self, group: str) -> None:
        """Cancel the job, unless Spark does not answer either."""
        with suppress(Exception):  # it may not answer, and be cut off
            self.spark.cancelJobGroup(group)

    def cut_off(self) -> None:
        """Leave a JVM that does not answer any more."""
        session.cut_off()


def tasks(work: Sequence[Work], policy: Policy) -> Callable[[Iterable[int]], Iterator[Receipt]]:
    """The function for mapPartitions: numbers of items of work in, receipts out.

    The items travel inside the function, because they hold passwords and Spark shows its plans;
    each pickled by itself, because a task needs only its own of what may be thousands.
    """
    pickled = [pickle.dumps(item) for item in work]

    def task(numbers: Iterable[int]) -> Iterator[Receipt]:
        from saf.forwarding.runner import run_item

        for number in numbers:
            item = pickle.loads(pickled[number])  # noqa: S301 - our own bytes
            yield from run_item(number, item, policy)

    return task
