"""What was measured: JSON lines in a file, and a table of ratios."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.peers.relays import Failed
from benchmarks.peers.stage import Peer
from benchmarks.stage import SETTINGS

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
Line = dict[str, Any]
T = TypeVar("T")


class Report:
    """The results of one workload. Values are medians of rounds, with the lowest and highest.

    Of a trial, whose scale is not 1, it is one round.
    """

    def __init__(self, workload: str, scale: float = 1.0) -> None:
        self.workload = workload
        self.scale = scale
        self.console = Console(stderr=True)
        self.lines: list[Line] = []

    def say(self, text: str) -> None:
        """For people who wait."""
        self.console.print(f"  {text}", highlight=False)

    def rounds(
        self,
        what: str,
        turns: Mapping[str, Callable[[], T]],
        show: Callable[[T], str],
        *,
        rounds: int,
    ) -> dict[str, list[T]]:
        """What each gave, in rounds in which each gets its turn. Who fails is out, and said."""
        given: dict[str, list[T]] = {name: [] for name in turns}
        rounds = rounds if self.scale == 1 else 1
        for number in range(rounds):
            for name in list(given):
                try:
                    one = turns[name]()
                except (Failed, psycopg.Error) as error:
                    self.cannot(what, name, str(error))
                    del given[name]
                    continue
                given[name].append(one)
                self.say(f"{what} {number + 1}/{rounds}: {name} {show(one)}")
        return given

    def add(
        self,
        what: str,
        system: str,
        values: Sequence[float],
        unit: str,
        *,
        ratios: Sequence[float] = (),
        messages: int | None = None,
    ) -> None:
        """A median with its spread, and the median of the ratios to the ceiling."""
        self._line(
            what,
            system,
            value=round(median(values), 4),
            lowest=round(min(values), 4),
            highest=round(max(values), 4),
            runs=len(values),
            unit=unit,
            ratio_to_ceiling=round(median(ratios), 4) if ratios else None,
            messages=messages,
        )

    def cannot(self, what: str, system: str, why: str) -> None:
        """A system that has no such thing, or failed at it."""
        self.say(f"{what}: {system}: {why}")
        self._line(what, system, value=None, unit="", ratio_to_ceiling=None, why=why)

    def able(self, peers: Iterable[Peer]) -> list[Peer]:
        """The peers that have such a thing; of the others, the table says why."""
        some = []
        for peer in peers:
            if why := peer.module.CANNOT.get(self.workload):
                self.cannot(self.workload, peer.name, why)
            else:
                some.append(peer)
        return some

    def ran(self, seconds: float, postgresql: str, peers: Iterable[Peer]) -> None:
        """How it was measured."""
        self._line(
            "run",
            "",
            value=None,
            at=datetime.now(UTC).isoformat(timespec="minutes"),
            seconds=round(seconds),
            scale=self.scale,
            machine=machine(),
            postgresql=postgresql,
            settings={name: str(value) for name, value in SETTINGS.items()},
            lacks={peer.name: peer.module.LACKS for peer in peers},
        )

    def _line(self, what: str, system: str, **more: object) -> None:
        line = {"part": self.workload, "workload": what, "system": system} | more
        self.lines.append(
            {name: value for name, value in line.items() if name != "messages" or value}
        )

    def keep(self, file: Path) -> None:
        """Write the lines to a file, in the place of those that this workload had in it."""
        kept = [line for line in read(file) if line["part"] != self.workload]
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in [*kept, *self.lines]))

    def table(self) -> Table:
        """For people."""
        table = Table(
            "workload", "system", "median", "lowest … highest", "unit", "saf/it", "ceiling"
        )
        order = [line["workload"] for line in self.lines]
        for line in sorted(self.lines, key=lambda line: order.index(line["workload"])):
            what, system, ratio = line["workload"], line["system"], over(line, self.lines)
            if what == "run":
                continue
            if line["value"] is None:
                table.add_row(what, system, "", line["why"])
                continue
            table.add_row(
                what, system, number(line["value"]),
                f"{number(line['lowest'])} … {number(line['highest'])}", line["unit"],
                f"{ratio:.2f}" if ratio is not None else "",
                f"{line['ratio_to_ceiling']:.2f}" if line["ratio_to_ceiling"] is not None else "",
            )  # fmt: skip
        return table


def read(file: Path) -> list[Line]:
    """The lines of a file, none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def over(line: Line, lines: Iterable[Line]) -> float | None:
    """How often this system's value goes into saf's, if both have one."""
    for one in lines:
        if one["workload"] == line["workload"] and one["system"].startswith("saf "):
            ours, its = one.get("value"), line.get("value")
            return ours / its if ours and its else None
    return None


def number(value: float) -> str:
    """Three digits that matter, or all before the point.

    >>> number(163204.5), number(12.345), number(0.0123), number(0)
    ('163,204', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> str:
    """What was measured on."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} virtual cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, PySpark {version('pyspark')}"
    )
