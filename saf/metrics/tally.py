"""A tally: how many values were how large, in a fixed number of steps.

It is what a histogram counts. It takes as much room for a million values as for one, and can be
pickled, so a task may give it to its driver in a receipt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """How many values are at most as large as each bound, and what they come to.

    >>> tally = Tally((1, 10))
    >>> for value in (0.5, 1, 7, 100):
    ...     tally.add(value)
    >>> tally.counts, tally.total, tally.sum
    ([2, 1, 1], 4, 108.5)
    >>> tally.merge(tally.copy())
    >>> tally.counts, tally.total
    ([4, 2, 2], 8)
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """How many values are within each bound and above the one before; the last: above all."""
        self.sum = 0.0

    @property
    def total(self) -> int:
        """How many values there are."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: Tally) -> None:
        """Count the values of another tally, which has the same bounds."""
        assert self.bounds == other.bounds  # noqa: S101 - both are of one metric
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def copy(self) -> Tally:
        """Return a tally of the same values."""
        same = Tally(self.bounds)
        same.merge(self)
        return same
