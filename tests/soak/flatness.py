"""Flatness: whether a figure of a soak stays where it is, or grows; a pure function over samples.

The slope is the median of the slopes between all pairs of samples (Theil and Sen), so that a few
outliers say nothing. A figure grows if two things are so. Its slope is above what its `Limit`
allows: a share of its level in an hour, or so much in its own unit, whichever is more. And by that
slope it has risen more than it goes up and down anyway, as a log does that is purged. So a short
run finds what grows fast, and a long one also what grows slowly. What falls is flat.

What is a process's own begins anew with each piece, so samples are compared within a piece, and
those of its first minutes not at all. What lies on disk goes on over pieces.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WARM_UP_SECONDS = 600.0
"""What a piece begins with, and is not looked at: caches fill, and so do the first slots."""
SHORTEST_SECONDS = 1800.0
"""A run of less after its warm-ups says nothing of hours: a log has risen and fallen too seldom."""
MOST_POINTS = 240
"""Samples beyond these are put together to medians."""
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of one moment."""

    piece: int
    seconds: float
    """Since the piece began."""
    figures: Mapping[str, float]
    """By name: a kind, which is one of `LIMITS`, a slash, and what it is of."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How much a figure of a kind may grow in an hour and still be flat."""

    unit: str
    share: float
    """Of its level."""
    least: float
    """In its unit; for what is small, or whole numbers."""
    is_kept: bool = False
    """Whether it goes on over pieces, as what lies on disk does."""


LIMITS: Mapping[str, Limit] = {
    "memory": Limit(unit="MiB", share=0.02, least=1),
    "connections": Limit(unit="", share=0.02, least=0.5),
    "handles": Limit(unit="", share=0.02, least=1),
    "threads": Limit(unit="", share=0.02, least=0.5),
    "table": Limit(unit="MiB", share=0.05, least=4, is_kept=True),
    "index": Limit(unit="MiB", share=0.05, least=4, is_kept=True),
    "dead": Limit(unit="rows", share=0.1, least=2_000, is_kept=True),
    "wal": Limit(unit="B a message", share=0.05, least=10),
    "p50": Limit(unit="ms", share=0.1, least=5),
    "p99": Limit(unit="ms", share=0.2, least=25),
    "redis": Limit(unit="MiB", share=0.05, least=2),
}
"""By kind."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a figure has done."""

    name: str
    level: float
    """The median of its samples."""
    swing: float
    """How far it goes up and down, but for its slope: what lies between a tenth of the samples and
    another tenth."""
    slope: float
    """In its unit, an hour."""
    allowed: float
    """The largest slope that is flat."""
    unit: str
    seconds: float
    """How long it was looked at, after warm-ups."""

    @property
    def grows(self) -> bool:
        """Whether it is not flat; False where it was looked at for too short a time."""
        risen = self.slope * self.seconds / HOUR
        return self.seconds >= SHORTEST_SECONDS and self.slope > self.allowed and risen > self.swing

    @property
    def word(self) -> str:
        """What to call it."""
        if self.seconds < SHORTEST_SECONDS:
            return "too short to say"
        return "GROWS" if self.grows else "flat"


Point = tuple[float, float]
"""When, in seconds, and what."""


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Say of each figure whether it is flat.

    >>> def memory(*mib): return [
    ...     Sample(piece=1, seconds=600 + 60 * n, figures={"memory/worker": float(one)})
    ...     for n, one in enumerate(mib)]
    >>> [one] = judge(memory(*[80, 81, 79] * 20))
    >>> one.word, one.level, one.slope
    ('flat', 80.0, 0.0)
    >>> [one] = judge(memory(*range(80, 140)))
    >>> one.word, one.slope, one.unit
    ('GROWS', 60.0, 'MiB')
    >>> [one] = judge(memory(80, 90, 100))
    >>> one.word
    'too short to say'
    """
    return [
        _verdict(name, list(_pieces(samples, name)))
        for name in sorted({name for one in samples for name in one.figures})
        if name.partition("/")[0] in LIMITS
    ]


def _verdict(name: str, pieces: Sequence[Sequence[Point]]) -> Verdict:
    limit = LIMITS[name.partition("/")[0]]
    level = statistics.median([value for piece in pieces for _, value in piece] or [0.0])
    rises = slope(pieces)
    return Verdict(
        name=name,
        level=level,
        swing=swing(pieces, rises),
        slope=rises * HOUR,
        allowed=max(limit.share * level, limit.least),
        unit=limit.unit,
        seconds=sum(piece[-1][0] - piece[0][0] for piece in pieces),
    )


def _pieces(samples: Sequence[Sample], name: str) -> Iterable[list[Point]]:
    """The samples of a figure: those of each piece by themselves, or all as one."""
    is_kept = LIMITS[name.partition("/")[0]].is_kept
    whole: list[Point] = []
    before = 0.0
    for _, group in itertools.groupby(samples, lambda one: one.piece):
        piece = list(group)
        own = [
            (before + one.seconds, one.figures[name])
            for one in piece
            if name in one.figures and (one.seconds >= WARM_UP_SECONDS or (is_kept and before))
        ]
        before += piece[-1].seconds
        if is_kept:
            whole += own
        elif own:
            yield own
    if whole:
        yield whole


def slope(pieces: Sequence[Sequence[Point]]) -> float:
    """The median slope between all pairs of points of a piece, a second.

    >>> slope([[(0, 1), (1, 3), (2, 5)], [(10, 0), (11, 2)]])
    2.0
    >>> slope([[(0, 1)]])
    0.0
    """
    most = max(MOST_POINTS // max(len(pieces), 1), 2)
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for piece in pieces
        for a, b in itertools.combinations(thinned(piece, most), 2)
        if b[0] > a[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def swing(pieces: Sequence[Sequence[Point]], rises: float) -> float:
    """How far values go up and down around a line that rises so much a second.

    >>> swing([[(n, 2.0 * n + 10 * (n % 2)) for n in range(100)]], 2.0)
    10.0
    >>> swing([[(0, 1)]], 0.0)
    0.0
    """
    left: list[float] = []
    for piece in pieces:
        level = [value - rises * at for at, value in piece]
        middle = statistics.median(level)
        left += [one - middle for one in level]
    if len(left) < 2:
        return 0.0
    tenths = statistics.quantiles(left, n=10)
    return tenths[-1] - tenths[0]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """No more than so many points: medians of as many groups.

    >>> thinned([(0, 1), (1, 9), (2, 1), (3, 5)], 2)
    [(0.5, 5.0), (2.5, 3.0)]
    """
    size = -(-len(points) // most)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [
        (statistics.median(at for at, _ in group), statistics.median(value for _, value in group))
        for group in groups
    ]
