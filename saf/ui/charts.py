"""The charts: curves and bars of the last hour, drawn on the server as SVG.

A chart needs no script, and takes its colours from the style sheet, for light and for dark. The
description of each drawing has its last and its greatest values, and `Chart.rows` has all values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from saf.operating.wording import age
from saf.ui.history import HOUR_SECONDS, STEP_SECONDS, Numbers, Point
from saf.ui.rendering import number, short

WIDTH, HEIGHT = 360, 150
LEFT, TOP, BOTTOM = 44, 10, 20
"""Room for the words at the axes."""
MARKS = 4
"""Parts of the time axis."""
GAP_SECONDS = 4 * STEP_SECONDS
"""Time without figures that interrupts a curve."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, or the bars of one colour."""

    label: str
    colour: str
    """CSS class."""
    value: Callable[[Numbers], float]
    is_rate: bool = False
    """Whether the value is a count of the point's time, shown per minute."""

    def at(self, point: Point, service: str | None) -> float | None:
        """Return the value of a point; None if the point is too short to tell a rate."""
        value = self.value(point.numbers(service))
        return point.per_minute(value) if self.is_rate else value


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One chart."""

    name: str
    title: str
    series: tuple[Series, ...]
    words: Callable[[float | None], str] = short
    """Returns a value in words."""
    bars: bool = False


PENDING = Series(label="not forwarded", colour="a", value=lambda n: n.pending)
UNREAD = Series(label="not handled", colour="b", value=lambda n: n.unread)
OLDEST = Series(label="not forwarded", colour="a", value=lambda n: n.oldest)
LAG = Series(label="not handled", colour="b", value=lambda n: n.lag)
SENT = Series(label="sent", colour="a", value=lambda n: n.sent, is_rate=True)
STORED = Series(label="stored", colour="b", value=lambda n: n.stored, is_rate=True)
PARKED = Series(label="parked", colour="warn", value=lambda n: n.parked)
DEAD = Series(label="dead letters", colour="bad", value=lambda n: n.dead)

CHARTS = (
    Kind(name="waiting", title="Waiting messages", series=(PENDING, UNREAD)),
    Kind(name="age", title="Age of the oldest", series=(OLDEST, LAG), words=age),
    Kind(name="rate", title="Messages per minute", series=(SENT, STORED)),
    Kind(name="failures", title="Failures", series=(PARKED, DEAD), bars=True),
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One series of a chart, in words for its legend."""

    label: str
    colour: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of one service, or of all."""

    kind: Kind
    svg: Markup
    legend: tuple[Shown, ...]
    rows: tuple[tuple[float, tuple[str, ...]], ...]
    """All values in words, each with its time; the last first."""


def chart(kind: Kind, points: Sequence[Point], service: str | None, now: float) -> Chart:
    """Draw one chart of the hour before ``now``."""
    values = [[series.at(point, service) for point in points] for series in kind.series]
    totals = [
        sum(known for known in ones if known is not None) if kind.bars else _last(ones)
        for ones in values
    ]
    return Chart(
        kind=kind,
        svg=_svg(kind, points, values, now),
        legend=tuple(
            Shown(label=series.label, colour=series.colour, last=kind.words(total))
            for series, total in zip(kind.series, totals, strict=True)
        ),
        rows=tuple(
            (point.end, tuple(kind.words(ones[place]) for ones in values))
            for place, point in reversed([*enumerate(points)])
        ),
    )


def _svg(
    kind: Kind, points: Sequence[Point], values: Sequence[Sequence[float | None]], now: float
) -> Markup:
    """Return the drawing."""
    top = nice(_highest(kind, values), is_age=kind.words is age)
    parts = [*_axes(kind, top, now), *_silent(points, now)]
    if kind.bars:
        parts += _bars(kind, points, values, top, now)
    else:
        for series, ones in zip(kind.series, values, strict=True):
            parts += _curves(series, points, ones, top, now)
    description = f"{kind.title}: " + "; ".join(
        _description(kind, series, ones) for series, ones in zip(kind.series, values, strict=True)
    )
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{said}">{parts}</svg>'
    ).format(w=WIDTH, h=HEIGHT, said=escape(description), parts=Markup("").join(parts))


def _description(kind: Kind, series: Series, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{series.label}: nothing is known yet"
    if kind.bars:
        return f"{series.label}: {number(sum(known))} in all"
    return f"{series.label}: {kind.words(known[-1])} now, at most {kind.words(max(known))}"


def _highest(kind: Kind, values: Sequence[Sequence[float | None]]) -> float:
    if kind.bars:
        columns = zip(*values, strict=True)
        return max((sum(value or 0.0 for value in column) for column in columns), default=0.0)
    return max((value for ones in values for value in ones if value is not None), default=0.0)


def nice(value: float, *, is_age: bool = False) -> float:
    """Return the end of an axis: the first round number from a value on.

    >>> [nice(value) for value in (0, 1, 3, 7, 12, 340)]
    [4, 4, 4, 8, 20, 400]
    >>> nice(70, is_age=True), nice(5000, is_age=True)
    (120, 7200)
    """
    if is_age:
        known = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
        return next((end for end in known if value <= end), -(-value // 86400) * 86400)
    size = 1.0
    while True:
        for end in (4 * size, 8 * size, 10 * size, 20 * size):
            if value <= end:
                return round(end)
        size *= 10


def _x(moment: float, now: float) -> float:
    part = 1 - (now - moment) / HOUR_SECONDS
    return LEFT + max(0.0, min(1.0, part)) * (WIDTH - LEFT - 4)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)


def _axes(kind: Kind, top: float, now: float) -> list[Markup]:
    parts = []
    for value in (0.0, top / 2, top):
        y = _y(value, top)
        parts.append(
            Markup('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
                LEFT, f"{y:.1f}", WIDTH - 4, f"{y:.1f}"
            )
        )
        parts.append(
            Markup('<text class="y" x="{}" y="{}">{}</text>').format(
                LEFT - 6, f"{y + 4:.1f}", kind.words(value)
            )
        )
    for mark in range(MARKS + 1):
        moment = now - HOUR_SECONDS * (1 - mark / MARKS)
        place = "first" if mark == 0 else "last" if mark == MARKS else "x"
        parts.append(
            Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
                place, f"{_x(moment, now):.1f}", HEIGHT - 5, clock(moment)
            )
        )
    return parts


def _silent(points: Sequence[Point], now: float) -> list[Markup]:
    """Return the times at which a broker did not answer."""
    return [
        _bar("down", (_x(point.begin, now), _x(point.end, now)), (TOP, HEIGHT - BOTTOM))
        for point in points
        if point.down
    ]


def _bar(colour: str, x: tuple[float, float], y: tuple[float, float]) -> Markup:
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        colour, f"{x[0]:.1f}", f"{y[0]:.1f}", f"{max(1.5, x[1] - x[0]):.1f}", f"{y[1] - y[0]:.1f}"
    )


def _bars(
    kind: Kind,
    points: Sequence[Point],
    values: Sequence[Sequence[float | None]],
    top: float,
    now: float,
) -> list[Markup]:
    parts = []
    for point, column in zip(points, zip(*values, strict=True), strict=True):
        below = 0.0
        for series, value in zip(kind.series, column, strict=True):
            if value:
                end = _y(below, top)
                below += value
                x = _x(point.begin, now), _x(point.end, now)
                parts.append(_bar(series.colour, x, (_y(below, top), end)))
    return parts


def _curves(
    series: Series, points: Sequence[Point], values: Sequence[float | None], top: float, now: float
) -> list[Markup]:
    """Return the curve, in pieces if figures are missing in between."""
    pieces: list[list[tuple[float, float]]] = [[]]
    before: Point | None = None
    for point, value in zip(points, values, strict=True):
        if value is None:
            continue
        if before is not None and point.end - before.end > GAP_SECONDS:
            pieces.append([])
        pieces[-1].append((_x(point.end, now), _y(value, top)))
        before = point
    parts = []
    for piece in filter(None, pieces):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*piece, piece[-1]])
        parts.append(
            Markup('<polyline class="{}" points="{}"/>').format(f"line {series.colour}", line)
        )
        x, y = piece[-1]
        if piece is pieces[-1]:
            parts.append(
                Markup('<circle class="{}" cx="{}" cy="{}" r="3"/>').format(
                    series.colour, f"{x:.1f}", f"{y:.1f}"
                )
            )
    return parts


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def clock(moment: float) -> str:
    """Return the time of day, in this machine's time zone."""
    return time.strftime("%H:%M", time.localtime(moment))
