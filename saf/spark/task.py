"""What Spark runs: one task for each item of work.

The driver imports this and no Arrow, which takes longer than most runs have work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence

from saf.spark.work import Policy, Receipt, Work


def forward(work: Sequence[Work], policy: Policy) -> Callable[[Iterable[int]], Iterator[Receipt]]:
    """The function for mapPartitions: numbers of items of work in, receipts out.

    The items travel inside the function, because they hold passwords and Spark shows its plans;
    each pickled by itself, because a task needs only its own of what may be thousands.
    """
    pickled = [pickle.dumps(item) for item in work]

    def task(numbers: Iterable[int]) -> Iterator[Receipt]:
        from saf.spark.delivery import Delivery
        from saf.spark.source import messages

        for number in numbers:
            item = pickle.loads(pickled[number])  # noqa: S301 - our own bytes
            delivery = Delivery(number, item, policy)
            yield from delivery.run(messages(item, policy.max_bytes))

    return task
