"""The page of the peers' benchmark: made from its record, whatever of it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import page
from benchmarks.peers.report import Report, read

MARKS = "# Beside others\n\n" + "\n".join(
    f"Words of {part}.\n\n<!-- from the record: {part} -->\nold\n<!-- end -->\n"
    for part in ("run", *page.PANELS)
)


def line(part: str, workload: str, system: str, value: float, **more: object) -> dict[str, Any]:
    return {
        "part": part, "workload": workload, "system": system, "value": value, "unit": "messages/s",
        "lowest": value * 0.9, "highest": value * 1.1, "runs": 5, "ratio_to_ceiling": None, **more,
    }  # fmt: skip


def why(part: str, workload: str, system: str, text: str) -> dict[str, Any]:
    return {
        "part": part, "workload": workload, "system": system, "value": None, "unit": "",
        "ratio_to_ceiling": None, "why": text,
    }  # fmt: skip


RECORD = [
    line("drain", "drain_200B", "COPY, two pipes", 240_000, ratio_to_ceiling=1.0),
    line("drain", "drain_200B", "saf 0.1.0", 160_000, ratio_to_ceiling=0.67, messages=1_000_000),
    line("drain", "drain_200B", "procrastinate 3.10.0", 800, messages=5_000),
    why("drain", "drain", "pgq", "not installed: apt-get is not here"),
    line("latency", "latency_100_p50", "saf 0.1.0", 200),
    line("latency", "latency_1000_p50", "saf 0.1.0", 250),
    line("latency", "latency_100_p50", "procrastinate 3.10.0", 20),
    why("latency", "latency_1000_p50", "procrastinate 3.10.0", "falls behind at 1,000/s"),
    {
        "part": "drain", "workload": "run", "system": "", "value": None, "at": "2026-01-01T00:00",
        "seconds": 900, "scale": 1.0, "machine": "2 virtual cores", "postgresql": "18.0",
        "settings": {"shared_buffers": "1GB"}, "lacks": {"saf 0.1.0": "", "pgmq 1.1.4": "routes"},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page written from a record that lacks some of the parts."""
    folder = tmp_path_factory.mktemp("peers")
    record, made = folder / "peers.jsonl", folder / "peers.md"
    record.write_text("".join(f"{json.dumps(one)}\n" for one in RECORD))
    made.write_text(MARKS)
    page.write(record, made)
    return made


def test_the_table_has_ratios_to_saf_and_to_the_ceiling(written: Path) -> None:
    text = written.read_text()
    assert "| saf 0.1.0 (1,000,000 messages) | **160,000** (144,000 … 176,000); 0.67 of" in text
    assert "| procrastinate 3.10.0 (5,000 messages) | **800** (720 … 880); saf x 200.00 |" in text


def test_who_could_not_take_part_says_why_in_its_row(written: Path) -> None:
    text = written.read_text()
    assert "| pgq | not installed: apt-get is not here |" in text
    assert "| falls behind at 1,000/s |" in text


def test_a_part_that_is_not_recorded_says_how_to_record_it(written: Path) -> None:
    assert "Not recorded yet: `python -m benchmarks.peers cold` does it." in written.read_text()


def test_the_machine_and_what_peers_lack_are_told(written: Path) -> None:
    text = written.read_text()
    assert "Machine: 2 virtual cores. PostgreSQL 18.0; `shared_buffers = 1GB`." in text
    assert "| pgmq 1.1.4 | routes |" in text


def test_words_outside_the_marks_stay(written: Path) -> None:
    assert "Words of cold." in written.read_text()
    assert "old\n" not in written.read_text()


def test_each_recorded_part_has_its_chart_in_small_files(written: Path) -> None:
    charts = sorted(written.parent.glob("charts/*"))
    assert [chart.name for chart in charts] == [
        "drain.png", "drain.svg", "latency.png", "latency.svg",
    ]  # fmt: skip
    assert all(chart.stat().st_size < 200_000 for chart in charts)


def test_the_same_record_gives_the_same_files(written: Path) -> None:
    before = {file: file.read_bytes() for file in written.parent.rglob("*") if file.is_file()}
    page.write(written.with_suffix(".jsonl"), written)
    assert {file: file.read_bytes() for file in before} == before


def test_a_part_measured_anew_takes_the_place_of_its_record_and_of_no_other(tmp_path: Path) -> None:
    record = tmp_path / "peers.jsonl"
    record.write_text("".join(f"{json.dumps(one)}\n" for one in RECORD))
    report = Report("drain")
    report.add("drain_200B", "saf 0.1.0", [3.0, 1.0, 2.0], "messages/s", ratios=[0.5, 0.7, 0.6])
    report.cannot("drain", "pgq", "not installed: no network")
    report.keep(record)
    kept = read(record)
    assert [one for one in kept if one["part"] == "latency"] == RECORD[4:8]
    assert [one for one in kept if one["part"] == "drain"] == [
        {
            "part": "drain", "workload": "drain_200B", "system": "saf 0.1.0", "value": 2.0,
            "lowest": 1.0, "highest": 3.0, "runs": 3, "unit": "messages/s",
            "ratio_to_ceiling": 0.6,
        },
        why("drain", "drain", "pgq", "not installed: no network"),
    ]  # fmt: skip


def test_the_project_s_page_has_a_place_for_every_part() -> None:
    assert page.MARKED.findall(page.PAGE.read_text()) == [
        "run", "drain", "send", "marking", "steady", "latency", "consume", "backlog", "cold",
    ]  # fmt: skip
