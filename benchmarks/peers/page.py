"""docs/peers.md: what is between its marks, and the charts, are made from the record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.backlog import BACKLOGS
from benchmarks.peers.charts import Bars, Curves, Panel, draw
from benchmarks.peers.latency import RATES
from benchmarks.peers.report import Line, number, over, read

PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
MARKED = re.compile(r"<!-- from the record: (\w+) -->\n.*?<!-- end -->", re.DOTALL)

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
            places=RATES,
            workloads=tuple(f"latency_{rate}_{suffix}" for rate in RATES),
        )
        for suffix in ("p50", "p99")
    ),
    "consume": (Bars(title="receive and acknowledge", workload="consume"),),
    "backlog": (
        Curves(
            title="time",
            along="messages pending",
            places=tuple(BACKLOGS.values()),
            workloads=tuple(f"backlog_{name}" for name in BACKLOGS),
        ),
        Curves(
            title="peak memory",
            along="messages pending",
            places=tuple(BACKLOGS.values()),
            workloads=tuple(f"backlog_memory_{name}" for name in BACKLOGS),
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
    return f"{text}\n{_results(part, [line for line in lines if line['workload'] != 'run'])}"


def _results(part: str, lines: Sequence[Line]) -> str:
    """A row for each system, a column for each figure; who has none says why."""
    given = {(line["system"], line["workload"]): line for line in lines}
    units = {line["workload"]: line["unit"] for line in lines if line["value"] is not None}
    able = {line["system"] for line in lines if line["value"] is not None}
    systems = dict.fromkeys(line["system"] for line in lines)
    rows = []
    for system in sorted(systems, key=lambda system: system not in able):
        out = given.get((system, part), {}).get("why", "")
        mine = [given.get((system, workload)) for workload in units]
        cells = [_cell(line, lines) if line else out for line in mine]
        rows.append((_name(system, mine), *cells))
    head = ("system", *(f"`{workload}`, {unit}" for workload, unit in units.items()))
    return _table(head, rows)


def _name(system: str, lines: Iterable[Line | None]) -> str:
    """With how many messages it got: a slow one got fewer."""
    counts = {line["messages"] for line in lines if line and line.get("messages")}
    return f"{system} ({max(counts):,} messages)" if counts else system


def _cell(line: Line, lines: Sequence[Line]) -> str:
    """The median, the spread, how saf's compares to it, and what it is of the ceiling."""
    if line["value"] is None:
        return str(line["why"])
    text = f"**{number(line['value'])}**"
    if line["runs"] > 1:
        text += f" ({number(line['lowest'])} … {number(line['highest'])})"
    if not line["system"].startswith("saf") and (ratio := over(line, lines)) is not None:
        text += f"; saf x {ratio:.2f}"
    if line["ratio_to_ceiling"] is not None:
        text += f"; {line['ratio_to_ceiling']:.2f} of the ceiling"
    return text


def _runs(runs: Sequence[Line]) -> str:
    if not runs:
        return "Nothing is recorded yet: `make bench-peers` does it.\n"
    latest = runs[-1]
    settings = ", ".join(f"`{name} = {value}`" for name, value in latest["settings"].items())
    rows = [(one["part"], one["at"], f"{one['seconds'] / 60:.1f} min") for one in runs]
    found = {name: what for one in runs for name, what in one["lacks"].items()}
    lacks = [(name, what or "-") for name, what in found.items()]
    return (
        f"Machine: {latest['machine']}. PostgreSQL {latest['postgresql']}; {settings}.\n\n"
        f"{_table(('workload', 'recorded', 'took'), rows)}\n"
        f"{_table(('system', 'does not do'), lacks)}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
