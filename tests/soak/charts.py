"""Charts of a soak, as PNG and SVG: a panel for each kind of figure, along the hours."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.charts import COLOURS, OURS, STYLE
from tests.soak.flatness import HOUR, MOST_POINTS, Sample, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, HIGH = 4.6, 2.7
MOST = 5
"""Lines of a panel; what is smaller than these is not drawn."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The figures of one kind."""

    title: str
    kind: str
    unit: str


PANELS = (
    Panel(title="Memory of programs, without what they share", kind="memory", unit="MiB"),
    Panel(title="Connections at the server", kind="connections", unit=""),
    Panel(title="File handles", kind="handles", unit=""),
    Panel(title="Tables", kind="table", unit="MiB"),
    Panel(title="Indexes", kind="index", unit="MiB"),
    Panel(title="Dead rows of saf's tables", kind="dead", unit="rows"),
    Panel(title="WAL", kind="wal", unit="bytes a message"),
    Panel(title="From send to handled, half of the messages", kind="p50", unit="ms"),
    Panel(title="From send to handled, 99 % of the messages", kind="p99", unit="ms"),
)


def draw(samples: Sequence[Sample], file: Path) -> None:
    """Write ``file`` with the suffixes .svg and .png."""
    import matplotlib as mpl  # takes a second, which every run's collection would pay
    from matplotlib.figure import Figure

    whole = list(_along(samples))
    with mpl.rc_context(STYLE):
        rows = -(-len(PANELS) // 3)
        figure = Figure(figsize=(WIDE * 3, HIGH * rows), layout="constrained")
        for place, panel in enumerate(PANELS, 1):
            _panel(figure.add_subplot(rows, 3, place, title=panel.title), panel, whole)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file.with_suffix(".svg"), transparent=True, metadata={"Date": None})
        figure.savefig(file.with_suffix(".png"), transparent=True, dpi=96)


def _along(samples: Sequence[Sample]) -> Iterator[tuple[float, Sample]]:
    """Each sample with the hours of all pieces up to it."""
    before = 0.0
    for _, group in itertools.groupby(samples, lambda one: one.piece):
        piece = list(group)
        for one in piece:
            yield (before + one.seconds) / HOUR, one
        before += piece[-1].seconds


def _panel(axes: Axes, panel: Panel, whole: Sequence[tuple[float, Sample]]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for at, one in whole:
        for name, value in one.figures.items():
            kind, _, of = name.partition("/")
            if kind == panel.kind:
                lines.setdefault(of, []).append((at, value))
    largest = sorted(lines, key=lambda of: -statistics.median(v for _, v in lines[of]))[:MOST]
    for of, colour in zip(sorted(largest), (OURS, *COLOURS[1:]), strict=False):
        points = thinned(lines[of], 2 * MOST_POINTS)
        axes.plot(*zip(*points, strict=True), linewidth=1, label=of, color=colour)
    axes.set(xlabel="hours", ylabel=panel.unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    if len(largest) > 1:
        axes.legend(fontsize=7)
