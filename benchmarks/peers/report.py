"""What was measured: JSON lines in a file, and a table of ratios."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"


class Report:
    """The results of a run. The file keeps the workloads that it does not measure."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.lines: list[dict[str, object]] = []

    def say(self, what: str, system: str, rate: float) -> None:
        """For people who wait."""
        self.console.print(f"  {what}: {system} {rate:,.0f}/s", highlight=False)

    def add(
        self,
        workload: str,
        system: str,
        values: Sequence[float],
        unit: str,
        ratios: Sequence[float] = (),
    ) -> None:
        """The median of some rounds, their spread, and the median of the ratios to the ceiling."""
        self.lines.append(
            {
                "workload": workload,
                "system": system,
                "value": round(median(values), 3),
                "lowest": round(min(values), 3),
                "highest": round(max(values), 3),
                "unit": unit,
                "ratio_to_ceiling": round(median(ratios), 4) if ratios else None,
            }
        )

    def missing(self, system: str, why: str) -> None:
        """A peer that could not take part."""
        self.lines.append({"workload": "missing", "system": system, "why": why})

    def write(self) -> None:
        """The table on stdout, and the file."""
        table = Table("workload", "system", "median", "lowest … highest", "unit", "of the ceiling")
        for line in self.lines:
            if line["workload"] == "missing":
                table.add_row("missing", str(line["system"]), str(line["why"]))
                continue
            ratio = line["ratio_to_ceiling"]
            table.add_row(
                str(line["workload"]), str(line["system"]), f"{line['value']:,}",
                f"{line['lowest']:,} … {line['highest']:,}", str(line["unit"]),
                f"{ratio:.2f}" if isinstance(ratio, float) else "",
            )  # fmt: skip
        Console().print(table)
        mine = {line["workload"] for line in self.lines}
        kept = RESULTS.read_text().splitlines() if RESULTS.exists() else []
        others = [line for line in kept if json.loads(line)["workload"] not in mine]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join([*others, *map(json.dumps, self.lines)]) + "\n")
