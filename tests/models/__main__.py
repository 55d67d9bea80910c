"""``make model``: all states of each model, and whether each planted error is found.

Exit 1 if a model violates something, or if a planted error is not found; 2 without Spin or gcc.
"""

from __future__ import annotations

import argparse
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

from tests.models.checking import NEEDED, Checked, check
from tests.models.runs import PLANTED, PROVEN, Run


def main() -> int:
    """Run; see above for what is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("-k", dest="words", default="", help="only those whose name has it")
    parser.add_argument("--jobs", type=int, default=2, help="so many searches at a time")
    given = parser.parse_args()
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            print(f"there is no {program} here: apt install {package}")
            return 2
    began, wrong = time.monotonic(), 0
    runs = [run for run in (*PROVEN, *PLANTED) if given.words in run.name]
    with ThreadPoolExecutor(given.jobs) as pool:
        for run, checked in zip(runs, pool.map(check, runs), strict=True):
            wrong += not as_expected(run, checked)
            print(sentence(run, checked), flush=True)
    print(f"{time.monotonic() - began:.0f} s; {wrong} not as expected")
    return bool(wrong)


def as_expected(run: Run, checked: Checked) -> bool:
    """Whether a search has found what it should: nothing, or what was planted."""
    if run.finds:
        return checked.error is not None and run.finds in checked.error
    return checked.proven


def sentence(run: Run, checked: Checked) -> str:
    """What a search has found, in a line."""
    seen = f"{checked.states:,} states, {checked.seconds:.0f} s"
    if checked.error is not None:
        found = "found" if as_expected(run, checked) else "FINDING"
        return f"{found:8} {run.name}: {seen}: {checked.error}"
    if run.finds:
        return f"MISSED   {run.name}: {seen}: nothing was found, and {run.finds} should have been"
    return f"{'proven' if checked.complete else 'CUT OFF':8} {run.name}: {seen}"


if __name__ == "__main__":
    raise SystemExit(main())
