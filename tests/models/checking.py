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


def check(run: Run, *, cycles: bool = False, timeout: float = 900.0) -> Checked:
    """Make the search of a run, and let it end.

    Args:
        run: which model, and which of its switches.
        cycles: look for runs that never end, too. It takes more than twice as long.
        timeout: it is given up after so many seconds.
    """
    spin, compiler = needed("spin", "spin"), needed("gcc", "gcc libc6-dev")
    switches = [f"-D{one}" for one in run.switches]
    kind = ["-DNP", "-DNFAIR=3"] if cycles else ["-DSAFETY"]
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        said = ""
        for command in (
            [spin, "-a", *switches, str(MODELS / f"{run.model}.pml")],
            [compiler, "-O2", "-w", *kind, "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=2048"]
            + ["-o", "pan", "pan.c"],
            ["./pan", f"-m{DEEPEST}", *(["-l"] if cycles else [])],
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
            error=found["what"] if found else None,
            states=int(float(states[1])) if states else 0,
            seconds=time.monotonic() - began,
            complete=states is not None and not any(one in said for one in CUT_SHORT),
            said=said,
        )


def files() -> list[Path]:
    """All files of models."""
    return sorted(MODELS.glob("*.pml"))
