"""Verdicts that are kept, so that a whole run may be collected in several.

    build/mutants.jsonl                 a line for each mutant that was planted

One counts for as long as nothing has changed that it rests on: the code, the migrations, what tests
share, the tests that are to notice the bug, and the bug itself.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.planting import Fate, Verdict

FILE = Path("build/mutants.jsonl")
GROUND = (
    "saf/**/*.py",
    "saf_demo/*.py",
    "migrations/**/*.py",
    "migrations/**/*.sql",
    "tests/*.py",
    "tests/*/conftest.py",
)
"""What all tests rest on."""
JUDGED = (Fate.CAUGHT, Fate.SURVIVED)
"""Fates that tests have decided about."""


class Kept:
    """The verdicts of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        self._known: dict[str, Any] = {one["of"]: one for one in map(json.loads, lines)}

    def verdict(self, mutant: Mutant) -> Verdict | None:
        """What became of a mutant that nothing has changed for since; None if nobody knows."""
        known = self._known.get(fingerprint(mutant))
        if known is None or mutant.stale():
            return None
        return Verdict(
            mutant=mutant, fate=Fate(known["fate"]), seconds=known["seconds"], said=known["said"]
        )

    def add(self, verdict: Verdict) -> None:
        """Keep what tests have decided about."""
        if verdict.fate not in JUDGED:
            return
        one = verdict.mutant
        survived = verdict.fate is Fate.SURVIVED
        known: dict[str, Any] = {
            "of": fingerprint(one),
            "file": one.file,
            "name": one.name,
            "fate": verdict.fate,
            "seconds": round(verdict.seconds, 1),
            "said": verdict.said if survived else "",
        }
        self._known[known["of"]] = known
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a") as lines:
            lines.write(json.dumps(known) + "\n")


def fingerprint(mutant: Mutant) -> str:
    """What stands for a mutant and all that its verdict rests on."""
    tests = sorted({test.partition("::")[0] for test in mutant.tests})
    said = [_ground(), *(f"{name} {_content(ROOT / 'tests' / name)}" for name in tests)]
    said += [mutant.file, mutant.before, mutant.after, *mutant.tests]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


@cache
def _ground() -> str:
    files = sorted(file for pattern in GROUND for file in ROOT.glob(pattern))
    said = "\n".join(f"{file.relative_to(ROOT)} {_content(file)}" for file in files)
    return hashlib.sha256(said.encode()).hexdigest()


@cache
def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
