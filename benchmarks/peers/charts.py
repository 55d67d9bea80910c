"""A chart per workload, as PNG and SVG: small, and readable on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.peers.report import Line, number

OURS, CEILING, TEXT, GRID = "#2f81f7", "#d29922", "#7d8590", "#7d859040"
PEER = "#8b949e"
COLOURS = ("#d29922", "#3fb950", "#a371f7", "#f0883e", "#db61a2", "#39c5cf", PEER)
STYLE: Any = {
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "saf",  # the same figures, the same file
}
WIDE, HIGH = 4.4, 2.6


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One workload: a bar for each system, from the lowest to the highest run a whisker."""

    title: str
    workload: str

    @property
    def workloads(self) -> tuple[str, ...]:
        return (self.workload,)

    def draw(self, axes: Axes, lines: Sequence[Line]) -> None:
        mine = [line for line in lines if line["workload"] == self.workload][::-1]
        values = [line["value"] for line in mine]
        spread = [
            [line["value"] - line["lowest"] for line in mine],
            [line["highest"] - line["value"] for line in mine],
        ]
        axes.barh(
            [line["system"] for line in mine], values, height=0.65, xerr=spread,
            color=[_colour(line["system"]) for line in mine],
            error_kw={"ecolor": TEXT, "elinewidth": 1, "capsize": 2},
        )  # fmt: skip
        for place, line in enumerate(mine):
            axes.annotate(
                f" {number(line['value'])}", (max(line["highest"], 0), place), va="center"
            )
        axes.margins(x=0.25)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.grid(axis="x")
        axes.set_xlabel(mine[0]["unit"])


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Several workloads that differ in one number: a curve for each system, on two log scales."""

    title: str
    along: str
    places: tuple[float, ...]
    workloads: tuple[str, ...]

    def draw(self, axes: Axes, lines: Sequence[Line]) -> None:
        found = {(line["workload"], line["system"]): line for line in lines}
        others = iter(COLOURS)
        for system in dict.fromkeys(line["system"] for line in lines):
            points = [
                (at, found[workload, system])
                for at, workload in zip(self.places, self.workloads, strict=True)
                if (workload, system) in found
            ]
            if not points:
                continue
            ours = system.startswith("saf ")
            axes.plot(
                [at for at, _ in points], [line["value"] for _, line in points],
                marker="o", markersize=3, linewidth=2.4 if ours else 1.2, label=system,
                color=OURS if ours else next(others),
            )  # fmt: skip
            axes.set_ylabel(points[0][1]["unit"])
        axes.set(xscale="log", yscale="log", xlabel=self.along)
        axes.grid(which="major")


Panel = Bars | Curves


def draw(panels: Sequence[Panel], lines: Sequence[Line], file: Path) -> None:
    """Write ``file`` with the suffixes .svg and .png: the panels that have figures."""
    figures = [line for line in lines if line["value"] is not None]
    recorded = {line["workload"] for line in figures}
    some = [panel for panel in panels if recorded.intersection(panel.workloads)]
    if not some:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        columns = min(len(some), 2)
        rows = -(-len(some) // columns)
        figure = Figure(figsize=(WIDE * columns, HIGH * rows), layout="constrained")
        for place, panel in enumerate(some, 1):
            axes = figure.add_subplot(rows, columns, place, title=panel.title)
            panel.draw(axes, figures)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside right upper")
        figure.savefig(file.with_suffix(".svg"), transparent=True, metadata={"Date": None})
        figure.savefig(file.with_suffix(".png"), transparent=True, dpi=96)


def _colour(system: str) -> str:
    if system.startswith("saf"):
        return OURS
    return CEILING if system.startswith(("COPY", "bare")) else PEER
