"""A beat: the figures of all brokers at one moment, as samples of `saf.telemetry.metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from saf.telemetry.metrics import Metric, Sample


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Figures of all brokers at one moment."""

    samples: tuple[Sample, ...] = ()
    down: Mapping[str, str] = field(default_factory=dict)
    """Brokers that do not answer, with the reason."""
    at: float = 0.0
    """Time of the figures, by time.time(); 0 before the first."""

    @property
    def clock(self) -> str:
        """Time of the figures, for display."""
        return time.strftime("%H:%M:%S", time.localtime(self.at))

    def of(self, metric: Metric, *labels: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the values of a metric, with the labels after those given."""
        for sample in self.samples:
            if sample.metric is metric and sample.labels[: len(labels)] == labels:
                yield sample.labels[len(labels) :], float(sample.value)  # type: ignore[arg-type]

    def total(self, metric: Metric, *labels: str) -> float:
        """Return the sum of a metric's values."""
        return sum(value for _, value in self.of(metric, *labels))

    def most(self, metric: Metric, *labels: str) -> float | None:
        """Return the greatest value of a metric; None if it has no values."""
        return max((value for _, value in self.of(metric, *labels)), default=None)
