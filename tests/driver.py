"""What the forwarder's driver asks of Spark, answered in this process: tasks run one by one.

For promises of the driver, which are the same wherever its tasks run; see `tests.spark` for those
that Spark itself has a part in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from saf.config import Settings
from saf.spark.forward import Forwarder

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass
class InProcess:
    """As much of a SparkContext as the driver uses."""

    defaultParallelism: int = 1  # noqa: N815 - Spark's
    before_task: Callable[[int, int], None] | None = None
    """Called with the numbers of the job and of the task in it, both from 0."""
    jobs: list[int] = field(default_factory=list)
    """How many tasks each had."""

    def setJobGroup(self, group: str, description: str, *, interruptOnCancel: bool) -> None:  # noqa: N802, N803 - Spark's
        """By which a job is cancelled: here there is none that hangs."""

    def parallelize(self, numbers: range, slices: int) -> _Slices:
        """In so many parts, as Spark cuts them."""
        cuts = [len(numbers) * part // slices for part in range(slices + 1)]
        parts = [numbers[low:high] for low, high in pairwise(cuts)]
        self.jobs.append(len(parts))
        return _Slices(self, parts)


@dataclass
class _Slices:
    context: InProcess
    parts: Sequence[Iterable[int]]
    function: Callable[[Iterable[int]], Iterable[Any]] = iter

    def mapPartitions(self, function: Callable[[Iterable[int]], Iterable[Any]]) -> _Slices:  # noqa: N802 - Spark's
        return _Slices(self.context, self.parts, function)

    def collect(self) -> list[Any]:
        results: list[Any] = []
        job = len(self.context.jobs) - 1
        for number, part in enumerate(self.parts):
            if self.context.before_task is not None:
                self.context.before_task(job, number)
            results += self.function(part)
        return results


def forwarder(settings: Settings, context: InProcess) -> Forwarder:
    """One that forwards without Spark."""
    return Forwarder(settings, lambda _: cast("SparkContext", context))
