"""A tally: numbers of values by size, in a fixed number of steps.

A tally is the data of a histogram. It takes as much memory for a million values as for one, and can
be pickled, so a task can return it to its driver in a receipt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """Number of values up to each bound, and the sum of all values.

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
        """Number of values in each step, from the previous bound to its own; the last is open."""
        self.sum = 0.0

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, other: Tally) -> None:
        """Add the values of another tally with the same bounds."""
        assert self.bounds == other.bounds  # noqa: S101 - both belong to one metric
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum

    def copy(self) -> Tally:
        """Return a tally of the same values."""

        copy = Tally(self.bounds)
        copy.merge(self)
        return copy
