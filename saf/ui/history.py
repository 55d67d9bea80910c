"""The history: the figures of the last hour by service, as far as this process has taken them.

`saf ui` needs no Prometheus for its charts: each `saf.ui.beat.Beat` adds to the history, from the
start of the process on. A `Point` covers at least `STEP_SECONDS`, so an hour has a bounded number
of points, and at most `MOST_SERVICES` services have numbers of their own.

Numbers are sums over all brokers. A broker that does not answer contributes nothing; a point tells
how many did not. Messages of a time without answers are not counted later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from saf.telemetry import metrics as m
from saf.telemetry.metrics import OTHER, Metric
from saf.ui.beat import Beat

HOUR_SECONDS = 3600.0
STEP_SECONDS = 30.0
"""Minimum time that a point covers."""
MOST_POINTS = round(HOUR_SECONDS / STEP_SECONDS) + 1
MOST_SERVICES = 100
"""Services with numbers of their own; the others are added up as `OTHER`."""


def _traffic(name: str, text: str) -> Metric:
    labels = ("broker", "service")
    return Metric(name=name, kind="gauge", origin="database", labels=labels, help=text)


SENT = _traffic("sent", "Messages that the outbox has got since the figures before.")
STORED = _traffic("stored", "Messages that the inbox has got since the figures before.")
PARKED = _traffic("parked", "Messages that were parked since the figures before, after a failure.")
DEAD = _traffic("dead", "Messages that became dead letters since the figures before.")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Figures of one service, or of all."""

    pending: float = 0.0
    unread: float = 0.0
    oldest: float = 0.0
    """Age of the oldest pending message, in seconds."""
    lag: float = 0.0
    """Age of the oldest unread message, in seconds."""
    sent: float = 0.0
    stored: float = 0.0
    parked: float = 0.0
    dead: float = 0.0

    @property
    def failures(self) -> float:
        """Messages that were set aside after a failure."""
        return self.parked + self.dead

    @classmethod
    def together(cls, parts: Iterable[Numbers]) -> Numbers:
        """Return the numbers of several services as one: sums, and the greatest ages.

        >>> both = Numbers.together([Numbers(pending=2, oldest=7), Numbers(pending=1, oldest=9)])
        >>> both.pending, both.oldest
        (3, 9)
        """
        found = [*parts]
        return cls(
            **{name: sum(getattr(one, name) for one in found) for name in (*WAITING, *COUNTED)},
            **{name: max((getattr(one, name) for one in found), default=0.0) for name in AGES},
        )

    def then(self, later: Numbers) -> Numbers:
        """Return the numbers of this time and the time after it: its states, and both counts."""
        return Numbers(
            **{name: getattr(later, name) for name in (*WAITING, *AGES)},
            **{name: getattr(self, name) + getattr(later, name) for name in COUNTED},
        )


WAITING, AGES = ("pending", "unread"), ("oldest", "lag")
COUNTED = ("sent", "stored", "parked", "dead")
NOTHING = Numbers()


@dataclass(frozen=True, kw_only=True)
class Point:
    """Figures of a time: states at its end, and counts during it."""

    begin: float
    end: float
    """By time.time(), in seconds."""
    services: Mapping[str, Numbers] = field(default_factory=dict)
    down: int = 0
    """Brokers that did not answer at its end."""

    def numbers(self, service: str | None) -> Numbers:
        """Return the numbers of one service; None: of all."""
        if service is None:
            return Numbers.together(self.services.values())
        return self.services.get(service, NOTHING)

    def per_minute(self, count: float) -> float | None:
        """Return a count of this time as a rate; None if the time is too short to tell."""
        seconds = self.end - self.begin
        return None if seconds < STEP_SECONDS / 2 else count * 60 / seconds


class History:
    """The points of the last hour. One thread adds; others read."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.since: float | None = None
        """Time of the first figures of this process."""

    def add(self, beat: Beat) -> None:
        """Add the figures of one moment."""
        if self.since is None:
            self.since = beat.at
        last = self._points[-1] if self._points else None
        known = {name for point in self._points for name in point.services}
        now = _bounded(by_service(beat), known)
        begin = beat.at
        if last is not None:
            begin = min(last.end, beat.at)  # a clock may be set back
            if last.end - last.begin < STEP_SECONDS:
                self._points.pop()
                begin = min(last.begin, beat.at)
                now = {
                    name: last.services.get(name, NOTHING).then(now.get(name, NOTHING))
                    for name in {**last.services, **now}
                }
        self._points.append(
            Point(begin=begin, end=beat.at, services=now, down=len(beat.down)),
        )
        while self._points and self._points[0].end < beat.at - HOUR_SECONDS:
            self._points.popleft()

    def points(self) -> Sequence[Point]:
        """Return the points, the oldest first."""
        return tuple(self._points.copy())

    def services(self) -> list[str]:
        """Return the services; those that need attention come first: failures, then age."""
        found: dict[str, list[Numbers]] = defaultdict(list)
        for point in self.points():
            for name, numbers in point.services.items():
                found[name].append(numbers)

        def place(name: str) -> tuple[float, float, float, str]:
            every, last = Numbers.together(found[name]), found[name][-1]
            waiting = max(last.oldest, last.lag)
            return (-every.failures, -waiting, -every.sent - every.stored, name)

        return sorted(found, key=place)


def by_service(beat: Beat) -> dict[str, Numbers]:
    """Return the numbers of each service; a subscription of an inbox counts by its own name."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (_, _, service), value in beat.of(m.PENDING):
        found[service]["pending"] += value
    for (_, subscription), value in beat.of(m.UNREAD):
        found[subscription]["unread"] += value
    for (_, _, service), value in beat.of(m.OLDEST_PENDING):
        found[service]["oldest"] = max(found[service]["oldest"], value)
    for (_, log, subscription), value in beat.of(m.LAG):
        if log == "inbox":
            found[subscription]["lag"] = max(found[subscription]["lag"], value)
    for metric in (SENT, STORED, PARKED, DEAD):
        for (_, service), value in beat.of(metric):
            found[service][metric.name] += value
    return {
        name: Numbers(**values) for name, values in found.items() if name or any(values.values())
    }


def _bounded(found: Mapping[str, Numbers], known: set[str]) -> dict[str, Numbers]:
    """Return the numbers of at most `MOST_SERVICES` services, and those of the others as one.

    Services that had numbers of their own keep them, so that no curve ends for lack of space.
    """
    new = found.keys() - known - {OTHER}
    order = sorted(new, key=lambda name: (-found[name].failures, -found[name].pending, name))
    free = max(0, MOST_SERVICES - len(known - {OTHER}))
    named = {*(found.keys() & known - {OTHER}), *order[:free]}
    others = [numbers for name, numbers in found.items() if name not in named]
    kept = {name: found[name] for name in named}
    return {**kept, OTHER: Numbers.together(others)} if others else kept
