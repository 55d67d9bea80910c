"""``make full``: everything that tests saf, in suites, recorded in tests/full.md.

    python -m tests.full                    all suites, some hours on two cores
    python -m tests.full model crash        these suites; the rows of the others stay
    python -m tests.full --failed           the tests that failed, after a fix; records both runs

Suites that keep all cores busy run alone; of the others, which mostly wait, two run at a time.
A suite that fails does not end the run. Its output is in build/full/. Exit 1 if a suite failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tests.crash.__main__ import SITES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "full.md"
OUTPUT = ROOT / "build" / "full"

HEAD = """\
# The last run of everything

`make full` writes this page: for each suite the commit it ran on, and its result. The gate
(`make check`) runs a part of it on every change; see [CONTRIBUTING.md](../CONTRIBUTING.md).

| suite | runs | commit | date | minutes | result |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A command, and what it runs in a few words."""

    runs: str
    command: str
    alone: bool = False
    """Whether the suite keeps all cores busy, so that another one beside it would gain nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the page."""

    suite: str
    runs: str
    commit: str
    date: str
    minutes: str
    result: str

    def __str__(self) -> str:
        cells = (self.suite, self.runs, self.commit, self.date, self.minutes, self.result)
        return f"| {' | '.join(cells)} |"


CRASH_SECONDS, STATEFUL_SECONDS, FUZZ_SECONDS, SOAK_SECONDS, MUTANTS_SECONDS = 60, 300, 20, 600, 900

PYTHON = ".venv/bin/python"
PYTEST = f"SAF_TESTS=full {PYTHON} -m pytest -q -n 3 --dist worksteal --durations 25"
FAILED = Suite(runs="the tests that failed", command=f"{PYTEST} --last-failed --lfnf none")
SUITES: Mapping[str, Suite] = {
    "static": Suite(
        runs="format, lint, types, Bandit", command="make --no-print-directory static", alone=True
    ),
    "tests": Suite(
        runs="all tests, in all sizes and variants, on PostgreSQL 15, 16 and 18",
        command=PYTEST,
        alone=True,
    ),
    "crash": Suite(
        runs=f"crash rounds to each kind of destination, {CRASH_SECONDS} s each",
        command="; ".join(
            ["failed=0"]
            + [
                f"{PYTHON} -m tests.crash --seconds {CRASH_SECONDS} --to {to} || failed=1"
                for to in SITES
            ]
            + ["exit $failed"]
        ),
    ),
    "stateful": Suite(
        runs=f"machines that look for steps that lose a message, {STATEFUL_SECONDS} s",
        command=f"{PYTHON} -m tests.stateful --seconds {STATEFUL_SECONDS}",
    ),
    "model": Suite(
        runs="all states of the models",
        command="make --no-print-directory model JOBS=2",
        alone=True,
    ),
    "fuzz": Suite(
        runs=f"readers of foreign bytes, {FUZZ_SECONDS} s each",
        command=f"make --no-print-directory fuzz SECONDS={FUZZ_SECONDS}",
    ),
    "soak": Suite(
        runs=f"the whole system at 500 messages a second, {SOAK_SECONDS // 60} minutes",
        command=f"rm -rf build/full/soak; {PYTHON} -m tests.soak --seconds {SOAK_SECONDS} "
        "--folder build/full/soak",
    ),
    "mutants": Suite(
        runs=f"planted bugs, caught by tests of the gate; {MUTANTS_SECONDS // 60} minutes of them",
        command=f"{PYTHON} -m tests.mutants --shuffle --seconds {MUTANTS_SECONDS} --jobs 2",
        alone=True,
    ),
    "airflow": Suite(
        runs="saf-airflow, by a real Airflow", command="make --no-print-directory airflow"
    ),
    "audit": Suite(
        runs="known vulnerabilities of what is installed", command="make --no-print-directory audit"
    ),
}


def main() -> int:
    """Run; see above for what is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.full", description=__doc__)
    parser.add_argument("suites", nargs="*", help=", ".join(SUITES))
    parser.add_argument("--failed", action="store_true", help="only the tests that failed last")
    given = parser.parse_args()
    if given.failed:
        row, good = run("tests", FAILED)
        write(replace(row, **repaired(rows(PAGE.read_text())["tests"], row)))
        return int(not good)
    if unknown := [name for name in given.suites if name not in SUITES]:
        parser.error(f"unknown suite {unknown[0]!r}: choose from {', '.join(SUITES)}")
    chosen = given.suites or [*SUITES]
    alone = [name for name in chosen if SUITES[name].alone]
    passed = []
    for workers, names in ((1, alone), (2, [name for name in chosen if name not in alone])):
        with ThreadPoolExecutor(workers) as pool:
            for done in as_completed(pool.submit(run, name, SUITES[name]) for name in names):
                row, good = done.result()
                passed.append(good)
                write(row)
    print(f"recorded in {PAGE.relative_to(ROOT)}")
    return int(not all(passed))


def run(name: str, suite: Suite) -> tuple[Row, bool]:
    """Run a suite, its output also in build/full; return its row and whether it passed."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    file = OUTPUT / f"{name}.log"
    at = commit()
    print(f"{name}: {suite.runs}; output in {file.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    with file.open("w") as output:
        done = subprocess.run(
            ["bash", "-c", suite.command],
            cwd=ROOT,
            env=os.environ | {"SAF_TESTS": "full"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    minutes = f"{(time.monotonic() - began) / 60:.1f}"
    result = f"{'passed' if done.returncode == 0 else 'FAILED'}: {closing_line(file.read_text())}"
    print(f"{name}: {minutes} minutes, {result}", flush=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = Row(suite=name, runs=suite.runs, commit=at, date=date, minutes=minutes, result=result)
    return row, done.returncode == 0


def repaired(before: Row, after: Row) -> dict[str, str]:
    """Return the fields that differ from ``after`` in a row for both runs."""
    return {
        "runs": before.runs,
        "commit": before.commit,
        "date": before.date,
        "minutes": before.minutes,
        "result": f"{before.result}; those that failed, on {after.commit}: {after.result}",
    }


def commit() -> str:
    """Return the commit that the work tree is at; a change beside it is marked."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", ":!tests/full.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return f"{head} with changes" if changed else head


def closing_line(output: str) -> str:
    """Return the last line of a suite's output, fit for a cell of the page.

    >>> closing_line("1\\n===== 5 passed, 1 skipped in 3.21s (0:00:03) =====\\n\\n")
    '5 passed, 1 skipped in 3.21s (0:00:03)'
    """
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", lines[-1])
    return plain.strip("= ").replace("|", "/")[:300]


def rows(page: str) -> dict[str, Row]:
    """Return the rows of a page by suite.

    >>> row = Row(suite="model", runs="all", commit="1a", date="2026-01-01", minutes="6", result="")
    >>> rows(f"{HEAD}{row}") == {"model": row}
    True
    """
    found = (line.strip("|").split("|") for line in page.splitlines() if line.startswith("| "))
    known = [[cell.strip() for cell in cells] for cells in found]
    return {
        cells[0]: Row(
            suite=cells[0],
            runs=cells[1],
            commit=cells[2],
            date=cells[3],
            minutes=cells[4],
            result=cells[5],
        )
        for cells in known
        if cells[0] in SUITES
    }


def write(row: Row) -> None:
    """Write the page anew with this row, the rows in the order of the suites."""
    known = rows(PAGE.read_text()) if PAGE.exists() else {}
    known[row.suite] = row
    lines = [str(known[name]) for name in SUITES if name in known]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
