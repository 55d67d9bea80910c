"""docs/peers.md: what is between its marks, and the charts, are made from the record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.charts import Bars, Curves, Panel, draw
from benchmarks.peers.report import Line, cells, read

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
MARKED = re.compile(r"<!-- from the record: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
HEAD = ("system", "median", "lowest … highest", "unit", "saf/it", "of the ceiling")

RATES = (100, 1_000, 10_000)
BACKLOGS = ((10_000, "10k"), (100_000, "100k"), (1_000_000, "1M"), (10_000_000, "10M"))
PANELS: dict[str, tuple[Panel, ...]] = {
    "drain": (
        Bars(title="200 B", workload="drain_200B"),
        Bars(title="2 kB", workload="drain_2kB"),
        Bars(title="CPU, 200 B", workload="drain_200B_cpu"),
        Bars(title="WAL, 200 B", workload="drain_200B_wal"),
    ),
    "send": (
        Bars(title="1 client", workload="send_1_clients_tps"),
        Bars(title="8 clients", workload="send_8_clients_tps"),
        Bars(title="8 clients: added to p50", workload="send_8_clients_added_p50"),
    ),
    "marking": (
        Bars(title="time", workload="marking"),
        Bars(title="WAL", workload="marking_wal"),
    ),
    "steady": (
        Bars(title="throughput kept", workload="steady_kept"),
        Bars(title="dead rows", workload="steady_dead"),
        Bars(title="size of the tables", workload="steady_size"),
    ),
    "latency": tuple(
        Curves(
            title=suffix,
            along="messages/s offered",
            workloads=tuple((rate, f"latency_{rate}_{suffix}") for rate in RATES),
        )
        for suffix in ("p50", "p99")
    ),
    "consume": (Bars(title="receive and acknowledge", workload="consume"),),
    "backlog": (
        Curves(
            title="time",
            along="messages pending",
            workloads=tuple((size, f"backlog_{name}") for size, name in BACKLOGS),
        ),
        Curves(
            title="peak memory",
            along="messages pending",
            workloads=tuple((size, f"backlog_memory_{name}") for size, name in BACKLOGS),
        ),
    ),
    "cold": (Bars(title="1,000 messages, from start to exit", workload="cold"),),
}


def write(record: Path, page: Path) -> None:
    """Fill what is between the page's marks, and draw the charts beside it."""
    lines = read(record)

    def fill(match: re.Match[str]) -> str:
        part = match[1]
        mine = [line for line in lines if line["part"] == part]
        if part in PANELS:
            if mine:
                draw(PANELS[part], mine, page.parent / "charts" / part)
            text = _part(part, mine)
        else:
            text = _runs([line for line in lines if line["workload"] == "run"])
        return f"<!-- from the record: {part} -->\n{text}<!-- end -->"

    page.write_text(MARKED.sub(fill, page.read_text()))


def _part(part: str, lines: Sequence[Line]) -> str:
    if not lines:
        return f"Not recorded yet: `python -m benchmarks.peers {part}` does it.\n"
    text = f"![{part}](charts/{part}.svg)\n"
    said = [line for line in lines if line["workload"] != "run"]
    for workload in dict.fromkeys(line["workload"] for line in said):
        rows = [
            (_system(line), *cells(line, said)) for line in said if line["workload"] == workload
        ]
        text += f"\n`{workload}`\n\n{_table(HEAD, rows)}"
    return text


def _system(line: Line) -> str:
    count = f", {line['messages']:,} messages" if line.get("messages") else ""
    return f"{line['system']}{count}"


def _runs(runs: Sequence[Line]) -> str:
    if not runs:
        return "Nothing is recorded yet: `make bench-peers` does it.\n"
    latest = runs[-1]
    settings = ", ".join(f"`{name} = {value}`" for name, value in latest["settings"].items())
    rows = [(one["part"], one["at"], f"{one['seconds'] / 60:.1f} min") for one in runs]
    lacks = [(name, what or "-") for name, what in latest["lacks"].items()]
    return (
        f"Machine: {latest['machine']}. PostgreSQL {latest['postgresql']}; {settings}.\n\n"
        f"{_table(('workload', 'recorded', 'took'), rows)}\n"
        f"{_table(('system', 'does not do'), lacks)}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
