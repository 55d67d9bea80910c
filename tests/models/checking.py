"""Checking: Spin goes through all states of a model of docs/model, and says what it has found."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.models.runs import Run
from tests.mutants.mutant import ROOT
from tests.needed import needed

MODELS = ROOT / "docs" / "model"
NEEDED = {"spin": "spin", "gcc": "build-essential"}
"""Programs, and the packages that bring them."""
DEEPEST = 200_000
"""Steps of the longest run that is looked for; a longer one is an error of the search."""
MEMORY_MB = 6_000
CUT_SHORT = ("max search depth too small", "Search not completed", "out of memory", "VECTORSZ")
ENDED_BADLY = re.compile(r"^pan:\d+: (?P<what>.*?)(?: \(at depth (?P<depth>\d+)\))?$", re.MULTILINE)
STATES = re.compile(r"^\s*(\d+(?:\.\d+e\+\d+)?) states, stored", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a search has found."""

    error: str | None
    """What is violated; None if nothing is, in any state."""
    states: int
    seconds: float
    complete: bool
    """Whether no state was left out. A search that has found an error ends there."""
    said: str
    """All that the programs have said."""

    @property
    def proven(self) -> bool:
        """Whether all states were seen, and nothing was violated."""
        return self.complete and self.error is None


def check(run: Run, *, timeout: float = 900.0) -> Checked:
    """Make the search of a run, and let it end.

    Args:
        run: which model, and which of its switches.
        timeout: it is given up after so many seconds.
    """
    spin, compiler = (needed(program, package) for program, package in NEEDED.items())
    switches = [f"-D{one}" for one in run.switches]
    # where an error is found soon, to compile well takes longer than to search
    level = "-O0" if run.finds else "-O2"
    options = [level, "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=2048"]
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        said = ""
        for command in (
            [spin, "-a", *switches, str(MODELS / f"{run.model}.pml")],
            [compiler, "-w", *options, "-o", "pan", "pan.c"],
            ["./pan", f"-m{DEEPEST}"],
        ):
            done = subprocess.run(
                command,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
            )
            said += done.stdout
            if done.returncode and command[0] != "./pan":
                raise RuntimeError(f"{' '.join(command)}: {done.stdout}")
        states = STATES.search(said)
        found = ENDED_BADLY.search(said)
        return Checked(
            error=_violated(found["what"], run, folder) if found else None,
            states=int(float(states[1])) if states else 0,
            seconds=time.monotonic() - began,
            complete=states is not None and not any(one in said for one in CUT_SHORT),
            said=said,
        )


def _violated(what: str, run: Run, folder: str) -> str:
    """What an assertion is about, in the words beside it; or what else was wrong."""
    if not what.startswith("assertion violated"):
        return what
    spin = ["spin", "-t", *(f"-D{one}" for one in run.switches)]
    told = [*spin, "-k", f"{run.model}.pml.trail", str(MODELS / f"{run.model}.pml")]
    said = subprocess.run(told, cwd=folder, capture_output=True, text=True, check=True).stdout
    place = re.search(r"^spin: (.*):(\d+), Error: assertion violated", said, re.MULTILINE)
    assert place, said
    line = Path(place[1]).read_text().splitlines()[int(place[2]) - 1]
    return line.rpartition("/*")[2].removesuffix("*/").strip()


def files() -> list[Path]:
    """All files of models."""
    return sorted(MODELS.glob("*.pml"))
