"""``make soak HOURS=8``: a piece of the soak, and what has come out so far.

    python -m tests.soak --hours 8 --seconds 3600      no longer than an hour at a time
    python -m tests.soak --seconds 1200 --hinder-seconds 300      a piece in which all stand still
    python -m tests.soak --draw docs/charts/soak       charts of what is there, and no piece

Exit 1 if a message was lost, doubled or out of order, if a program failed, or if something grows.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from saf.signals import stop_on_signals
from tests.soak import charts
from tests.soak.flatness import HOUR, SHORTEST_SECONDS, Sample, Verdict, judge
from tests.soak.piece import Piece, Plan, run
from tests.soak.record import Record
from tests.soak.site import Site


def main() -> int:
    """Make a piece; see above for what is returned."""
    given = _given()
    given.folder.mkdir(parents=True, exist_ok=True)
    record = Record(given.folder)
    seconds = min(given.hours * HOUR - record.hours * HOUR, given.seconds or given.hours * HOUR)
    if given.draw:
        charts.draw(record.samples(), given.draw)
        print(f"{given.draw}.png and .svg: {record.hours:.2f} hours")
    elif seconds > 0:
        _make(given, record, seconds)
    for piece in record.pieces():
        print(_line(piece))
    verdicts = judge(record.samples())
    print(table(verdicts))
    findings = [one for piece in record.pieces() for one in piece.findings]
    grows = [one.name for one in verdicts if one.grows]
    print(f"{record.hours:.2f} hours, {len(findings)} findings; grows: {', '.join(grows) or '-'}")
    return int(bool(findings or grows))


def _given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0, help="of all pieces together")
    parser.add_argument("--seconds", type=float, help="of this piece at most")
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--sample-seconds", type=float, default=10.0)
    parser.add_argument("--purge-seconds", type=float, default=60.0)
    parser.add_argument("--rotation-seconds", type=float, default=300.0)
    parser.add_argument(
        "--hinder-seconds", type=float, default=0.0, help="let all but the application stand still"
    )
    parser.add_argument("--draw", type=Path, help="write charts to this file, with .png and .svg")
    return parser.parse_args()


def _make(given: argparse.Namespace, record: Record, seconds: float) -> None:
    plan = Plan(
        seconds=seconds,
        rate=given.rate,
        sample_seconds=given.sample_seconds,
        purge_seconds=given.purge_seconds,
        hinder_seconds=given.hinder_seconds,
    )
    stopping = threading.Event()
    hours = record.hours

    def note(sample: Sample) -> None:
        record.note(sample)
        print(progress(hours, sample), flush=True)

    with stop_on_signals(stopping.set):
        site = Site(given.folder, rotation_seconds=given.rotation_seconds)
        site.start()
        try:
            record.ended(run(site, record.begin(), plan, stopping, note))
        finally:
            site.stop()


def progress(hours: float, sample: Sample) -> str:
    """A sample in a line.

    >>> progress(1.0, Sample(piece=2, seconds=1800, figures={
    ...     "sent": 1234567.0, "memory/a": 10.4, "memory/b": 20.0, "p99/billing": 80.0}))
    '1.500 h, piece 2: 1,234,567 sent; 30 MiB; 99 % within billing 80 ms'
    """
    memory = sum(one for name, one in sample.figures.items() if name.startswith("memory/"))
    waits = [
        f"{name.partition('/')[2]} {value:.0f} ms"
        for name, value in sample.figures.items()
        if name.startswith("p99/")
    ]
    return (
        f"{hours + sample.seconds / HOUR:.3f} h, piece {sample.piece}: "
        f"{sample.figures.get('sent', 0):,.0f} sent; {memory:.0f} MiB; "
        f"99 % within {', '.join(waits) or '-'}"
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """What each figure does that there is, as a table of Markdown.

    >>> print(table([Verdict(name="memory/ui", level=80, swing=2, slope=0.31, allowed=1.6,
    ...                      unit="MiB", seconds=3600)]))
    | figure | level | up and down by | slope an hour | flat up to | |
    | --- | --- | --- | --- | --- | --- |
    | memory/ui | 80 MiB | 2 | +0.31 | 1.6 | flat |
    """
    there = [one for one in verdicts if one.level or one.slope]
    if there and all(one.seconds < SHORTEST_SECONDS for one in there):
        return f"too short to say what grows: it takes {SHORTEST_SECONDS:.0f} s after warm-ups"
    lines = [
        "| figure | level | up and down by | slope an hour | flat up to | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.name} | {one.level:,.5g} {one.unit}".rstrip()
        + f" | {one.swing:,.3g} | {one.slope:+,.3g} | {one.allowed:,.3g} | {one.word} |"
        for one in there
    ]
    return "\n".join(lines)


def _line(piece: Piece) -> str:
    at = datetime.fromtimestamp(piece.began).astimezone().isoformat(" ", "seconds")
    more = [*piece.findings]
    if took := [one for one in piece.recovered.values() if one is not None]:
        more.append(f"messages took no longer than before {max(took):.0f} s after the hindrance")
    more = [f"piece {piece.number}, {at}: {piece.seconds:.0f} s, {piece.messages:,} sent", *more]
    return "\n    ".join(more)


if __name__ == "__main__":
    sys.exit(main())
