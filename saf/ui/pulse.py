"""The pulse: takes the figures of all brokers repeatedly while a page is open.

They are the figures of `saf metrics` (`saf.operating.figures`), which are bounded at each broker.
While no page is open, they are taken once a minute, so that the curves have a past.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from saf.config import Settings
from saf.metrics import declared as m
from saf.metrics.declared import Metric
from saf.metrics.process import Sample
from saf.operating.figures import asker
from saf.operating.places import Places
from saf.operating.watch import Watch

EVERY_SECONDS = 3.0
"""Interval while a page is open."""
IDLE_SECONDS = 60.0
"""Interval while no page is open."""
LOOKING_SECONDS = 20.0
"""Time after a request during which a page counts as open."""
PATIENCE_SECONDS = 3.0
PAST = 60
"""Number of values in a curve."""
CURVES: Mapping[str, Metric] = {
    "pending": m.PENDING,
    "unread": m.UNREAD,
    "parked": m.PARKED,
    "dead": m.DEAD,
}


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


class Pulse:
    """Takes the figures in its own thread, from `start` to `stop`."""

    def __init__(self, settings: Settings, places: Places) -> None:
        self._watch = Watch(places, asker(settings), patience_seconds=PATIENCE_SECONDS)
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._looked_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._first = threading.Event()
        self.beat = Beat()
        self.number = 0
        """Rises with each beat."""
        self.curves: dict[str, deque[float]] = {name: deque(maxlen=PAST) for name in CURVES}

    @property
    def over(self) -> bool:
        """True if the pulse has been stopped."""
        return self._over.is_set()

    def look(self) -> Beat:
        """Return the last figures, and note that a page is open; wait only for the very first."""
        self._looked_at = time.monotonic()
        self._wanted.set()
        self.start()
        self._first.wait(PATIENCE_SECONDS)
        return self.beat

    def start(self) -> None:
        """Start the thread, if it is not running."""
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="saf-ui-pulse", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop taking figures."""
        self._over.set()
        self._wanted.set()
        self._watch.close()  # ends its wait
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=PATIENCE_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            samples = tuple(self._watch.take())
            self.beat = Beat(samples=samples, down=dict(self._watch.down), at=time.time())
            for name, metric in CURVES.items():
                self.curves[name].append(self.beat.total(metric))
            self.number += 1
            self._first.set()
            if self._over.wait(EVERY_SECONDS):
                return
            if time.monotonic() - self._looked_at > LOOKING_SECONDS:
                self._wanted.clear()
                self._wanted.wait(IDLE_SECONDS)
