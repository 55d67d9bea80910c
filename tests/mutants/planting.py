"""A copy of the tree, in which bugs are planted and tests are run; the tree itself stays as it is.

The copy comes first in PYTHONPATH, which every process inherits that the tests start, programs and
Spark's Python workers too; that it is really the copy's ``saf`` which they import is asked before
the first bug is planted. They share one server, whose template was migrated before; the tests of a
bug in a migration start their own. No bytecode is written, because a file that changes twice within
a second and keeps its size would still be taken for the one before.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from saf.broker.migrate import migrate
from saf.testing.databases import Database, Databases, embedded_server
from tests.conftest import LENT
from tests.mutants.mutant import ROOT, Mutant
from tests.tiers import CHECK

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".saf", ".*_cache", ".hypothesis", "__pycache__"),
    *("build", "dist", "spark-warehouse"),
)

LONGEST_SECONDS = 240.0
"""A bug that makes its tests hang has been noticed after so long."""

# One server version is enough: what differs between them is not what is planted
OPTIONS = (
    *("-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"),
    *("-k", "not postgresql-15 and not postgresql-16"),
)

FAILED = 1
"""pytest's exit code where tests ran and some failed; others mean that they did not run."""


class Fate(StrEnum):
    """What became of a planted bug."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    BROKEN = "broken"
    HARMLESS = "harmless"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a mutant, and what the tests said."""

    mutant: Mutant
    fate: Fate
    seconds: float = 0.0
    said: str = ""


class Field:
    """The copy, and a server with a migrated template that is lent to all of its tests."""

    def __init__(self, folder: Path, template: Database) -> None:
        self.tree = folder / "saf"
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT, symlinks=True)
        self._environment = os.environ | {
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            LENT: template.dsn.conninfo,
            "SAF_TESTS": CHECK,  # the gate's tests are the ones to catch it
        }
        asked = "import saf, tests; print(saf.__file__, tests.__path__)"
        answer = self._run([sys.executable, "-c", asked], folder)
        if answer.stdout.count(str(self.tree)) != 2:
            raise RuntimeError(f"tests would not run in the copy: {answer.stdout}")

    def plant(self, mutant: Mutant) -> Verdict:
        """Plant one bug, run its tests, and take it out again."""
        if mutant.stale():
            return Verdict(mutant=mutant, fate=Fate.BROKEN, said=mutant.stale())
        if mutant.harmless:
            return Verdict(mutant=mutant, fate=Fate.HARMLESS, said=mutant.harmless)
        file = self.tree / mutant.file
        whole = file.read_text()
        began = time.monotonic()
        try:
            file.write_text(whole.replace(mutant.before, mutant.after))
            tests = [f"tests/{test}" for test in mutant.tests]
            alone = mutant.file.startswith("migrations/")
            command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
            ran = self._run(command, self.tree, alone=alone)
        except subprocess.TimeoutExpired:
            return Verdict(mutant=mutant, fate=Fate.CAUGHT, seconds=LONGEST_SECONDS, said="hung")
        finally:
            file.write_text(whole)
        fate = {0: Fate.SURVIVED, FAILED: Fate.CAUGHT}.get(ran.returncode, Fate.BROKEN)
        seconds = time.monotonic() - began
        return Verdict(mutant=mutant, fate=fate, seconds=seconds, said=ran.stdout + ran.stderr)

    def _run(
        self, command: list[str], folder: Path, *, alone: bool = False
    ) -> subprocess.CompletedProcess[str]:
        environment = self._environment.copy()
        if alone:
            del environment[LENT]
        # a session of its own, so that what hangs can be ended with all that it has started
        with subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=LONGEST_SECONDS)
            except BaseException:
                os.killpg(process.pid, signal.SIGINT)  # its servers do not stay behind
                try:
                    process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def field() -> Iterator[Field]:
    """The copy, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="saf-mutants-") as folder, embedded_server() as server:
        with closing(Databases(server.dsn("postgres"))) as databases:
            template = databases.create("template")
        migrate(template.dsn)
        yield Field(Path(folder), template)
