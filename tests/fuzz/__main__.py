"""``make fuzz SECONDS=600``: each reader of foreign bytes for so long, guided by what it covers.

    python -m tests.fuzz --seconds 600 --only webhook dsn

Exit 1 on any finding, which is printed as what has to be given to the target's check. Inputs that
reached something new stay in build/fuzz, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import atheris
from hypothesis import Phase, settings

FOLDER = Path("build/fuzz")
LONGEST = 16_384
"""The bytes of an input, which say what Hypothesis draws."""
LEFT_OVER = 300.0
"""Seconds beyond the time for what atheris does before and after, on a machine that is busy."""


def main() -> int:
    """Run each target in a process of its own; see above for what is returned."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", nargs="*", help="these targets")
    parser.add_argument("--target", help=argparse.SUPPRESS)  # this process's own
    given = parser.parse_args()
    if given.target:
        alone(given.target, given.seconds)
    from tests.fuzz.listed import TARGETS

    if unknown := {*(given.only or ())} - {*TARGETS}:
        parser.error(f"unknown target {sorted(unknown)[0]!r}: choose from {', '.join(TARGETS)}")
    return sum(show(name, given.seconds) for name in given.only or TARGETS) > 0


def alone(name: str, seconds: int) -> None:
    """Run one target; the process ends with it."""
    with atheris.instrument_imports(include=["saf"]):
        from tests.fuzz.listed import TARGETS
    test = settings(database=None, phases=[Phase.generate])(TARGETS[name].test())
    corpus = FOLDER / name.replace(" ", "-")
    corpus.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-rss_limit_mb=0"]
    options += ["-timeout=30", f"-artifact_prefix={corpus}/found-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], test.hypothesis.fuzz_one_input)
    atheris.Fuzz()


def show(name: str, seconds: int) -> bool:
    """Run one target, and print its line; whether it has found something."""
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(seconds)]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + LEFT_OVER,
        )
    except subprocess.TimeoutExpired as error:
        print(f"{name}: FINDING: it was not over after {error.timeout:.0f} s", flush=True)
        return True
    lines = done.stderr.splitlines()
    runs = next((one.split()[-1] for one in lines if "number_of_executed_units" in one), "?")
    covered = next((one.split()[3] for one in reversed(lines) if " cov: " in one), "?")
    print(f"{name}: {runs} inputs, {covered} places covered, ", end="")
    print("FINDING" if done.returncode else "ok", flush=True)
    if done.returncode:
        print(done.stdout, *lines[-40:], sep="\n", flush=True)
    return bool(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
