"""Counts of this process: any code may add to them, and by default none are kept.

    count(FORWARDED, 100, broker="shop", destination="mom")

does nothing until `switch_on` has created a `Store`; from then on, it adds to a number in memory.
This is the only hook by which the engine, receivers and dispatchers report. They know no metrics
library, and report per chunk, delivery or handler call, never per message on the bulk path.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from saf.telemetry.declared import Metric, Tally

MOST_SERIES = 1000
"""Most combinations of labels per metric; further ones are counted under `OTHER`."""
OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Tally


class Store:
    """The counts of one process. Threads may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, dict[tuple[str, ...], float | Tally]] = {}

    def add(self, metric: Metric, amount: float, labels: dict[str, str]) -> None:
        """Add to a counter or a gauge."""
        with self._lock:
            values, names = self._series(metric, labels)
            before = values.get(names, 0.0)
            assert not isinstance(before, Tally)  # noqa: S101 - histograms use observe
            values[names] = before + amount

    def observe(self, metric: Metric, value: float | Tally, labels: dict[str, str]) -> None:
        """Add a value, or a tally of values, to a histogram."""
        with self._lock:
            values, names = self._series(metric, labels)
            tally = values.setdefault(names, metric.tally())
            assert isinstance(tally, Tally)  # noqa: S101 - only histograms use observe
            if isinstance(value, Tally):
                tally.merge(value)
            else:
                tally.add(value)

    def samples(self) -> list[Sample]:
        """Return all current values."""
        with self._lock:
            return [
                Sample(
                    metric=metric,
                    labels=labels,
                    value=value.copy() if isinstance(value, Tally) else value,
                )
                for metric, values in self._values.items()
                for labels, value in values.items()
            ]

    def _series(
        self, metric: Metric, labels: dict[str, str]
    ) -> tuple[dict[tuple[str, ...], float | Tally], tuple[str, ...]]:
        values = self._values.setdefault(metric, {})
        names = tuple(str(labels[name]) for name in metric.labels)
        if names not in values and len(values) >= MOST_SERIES:
            names = (OTHER,) * len(names)
        return values, names


_store: Store | None = None


def switch_on() -> Store:
    """Store reports from now on, in this process."""
    global _store  # noqa: PLW0603 - a process has one
    if _store is None:
        _store = Store()
    return _store


def switch_off() -> None:
    """Drop all counts, and ignore further reports."""
    global _store  # noqa: PLW0603 - a process has one
    _store = None


def counting() -> bool:
    """Return whether reports are stored."""
    return _store is not None


def count(metric: Metric, amount: float = 1, **labels: str) -> None:
    """Add to a counter or a gauge."""
    if _store is not None:
        _store.add(metric, amount, labels)


def observe(metric: Metric, value: float | Tally, **labels: str) -> None:
    """Add a value, or a tally of values, to a histogram."""
    if _store is not None:
        _store.observe(metric, value, labels)


@contextmanager
def timed(metric: Metric, **labels: str) -> Iterator[None]:
    """Add the duration of a block to a histogram, however the block ends."""
    if _store is None:
        yield
        return
    began = perf_counter()
    try:
        yield
    finally:
        observe(metric, perf_counter() - began, **labels)
