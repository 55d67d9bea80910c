"""A copy of the tree, in which bugs are planted and tests are run; the tree itself stays as it is.

The copy comes first in PYTHONPATH, which every process inherits that the tests start, programs and
Spark's Python workers too; that it is really the copy's ``saf`` which they import is asked before
the first bug is planted. They share one server, whose template was migrated before; the tests of a
bug in a migration start their own. Bytecode is compared by the hash of its source, because a file
that changes twice within a second and keeps its size would else be taken for the one before. pytest
is forked from a process that has imported what belongs to others (`tests.mutants.warm`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from compileall import compile_dir
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from saf.broker.migrate import migrate
from saf.testing.databases import Database, Databases, embedded_server
from tests.conftest import LENT
from tests.mutants.collected import patches
from tests.mutants.mutant import LONGEST_SECONDS, ROOT, Mutant
from tests.mutants.warm import RAISED
from tests.tiers import CHECK

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".saf", ".*_cache", ".hypothesis", "__pycache__"),
    *("build", "dist", "spark-warehouse"),
)

NOT_COLLECTED = ("mutants", "soak", "fuzz", "spark", "stateful", "crash", "moves")
"""Folders of tests that are not collected ahead."""

ONE_VERSION = ("-k", "not postgresql-15 and not postgresql-16")
"""One server version is enough: what differs between them is not what is planted."""
OPTIONS = (
    *("-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *ONE_VERSION),
    # expected of the modules that `tests.mutants.warm` has imported
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)

PASSES = "tests/contract/test_owners.py::test_a_batch_read_again_has_not_what_committed_since"
"""A test that passes before the first bug is planted; else nothing that fails means anything."""

FAILED, NO_TESTS = 1, 5
"""pytest's exit codes where tests ran and some failed, and where there were none to run. Others
mean that they did not run."""


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
        self.environment = os.environ | {
            "PYTHONPATH": str(self.tree),
            "PYTHONDONTWRITEBYTECODE": "1",
            LENT: template.dsn.conninfo,
            "SAF_TESTS": CHECK,  # the gate's tests are the ones to catch it
        }
        asked = "import saf, tests; print(saf.__file__, tests.__path__)"
        answer = self.run([sys.executable, "-c", asked], folder)
        if answer.stdout.count(str(self.tree)) != 2:
            raise RuntimeError(f"tests would not run in the copy: {answer.stdout}")
        compile_dir(self.tree, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self._said = folder / "said"
        self._warm = self._warmed()
        self._collected: Collected | None = None
        code, _, said = self._pytest([*OPTIONS, PASSES], LONGEST_SECONDS, alone=False)
        if code != 0:
            self.close()
            raise RuntimeError(f"{PASSES} fails without any bug: {said}")

    def close(self) -> None:
        """End what has been started."""
        if self._collected is not None:
            self._collected.close()
        with self._warm:  # closes its pipes, by which it ends
            pass

    def _warmed(self) -> subprocess.Popen[str]:
        """The process that pytest is forked from; see `tests.mutants.warm`."""
        program = str(self.tree / "tests" / "mutants" / "warm.py")
        listed = self.run([sys.executable, program, str(self.tree)], self.tree)
        warm = subprocess.Popen(
            [sys.executable, program],
            cwd=self.tree,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which closes the pipe
        )
        assert warm.stdin is not None
        warm.stdin.write(f"{listed.stdout.strip()}\n")
        warm.stdin.flush()
        return warm

    def plant(self, mutant: Mutant) -> Verdict:
        """Plant one bug, run its tests, and take it out again."""
        if mutant.stale():
            return Verdict(mutant=mutant, fate=Fate.BROKEN, said=mutant.stale())
        if mutant.harmless:
            return Verdict(mutant=mutant, fate=Fate.HARMLESS, said=mutant.harmless)
        file = self.tree / mutant.file
        whole = file.read_text()
        try:
            changed = whole.replace(mutant.before, mutant.after)
            file.write_text(changed)
            tests = [f"tests/{test}" for test in mutant.tests]
            if mutant.by_machine and self._can_fork(whole, changed, tests):
                code, took, said = self._forked(mutant, whole, changed, tests)
            else:
                code, took, said = self._pytest(
                    [*OPTIONS, *tests], mutant.seconds, alone=mutant.file.startswith("migrations/")
                )
        finally:
            file.write_text(whole)
        if code is None:
            return Verdict(mutant=mutant, fate=Fate.CAUGHT, seconds=took, said="hung")
        fate = {0: Fate.SURVIVED, FAILED: Fate.CAUGHT}.get(code, Fate.BROKEN)
        if (
            mutant.by_machine
            and code not in (0, NO_TESTS, RAISED)
            and "ERROR: not found:" not in said
        ):
            fate = Fate.CAUGHT
        return Verdict(mutant=mutant, fate=fate, seconds=took, said=said)

    def _can_fork(self, whole: str, changed: str, tests: Sequence[str]) -> bool:
        """Tell whether the process that has collected the tests can make the change."""
        if patches(whole, changed) is None:
            return False
        if self._collected is None:
            self._collected = Collected(self)
        return self._collected.names.issuperset(tests)

    def _forked(
        self, mutant: Mutant, whole: str, changed: str, tests: Sequence[str]
    ) -> tuple[int | None, float, str]:
        """Run tests as `_pytest` does, in a fork of the process that has collected them."""
        assert self._collected is not None
        given = {
            "file": mutant.file,
            "before": whole,
            "after": changed,
            "tests": tests,
            "said": str(self._said),
            "seconds": mutant.seconds,
        }
        answer = self._collected.ask(given)
        return answer["code"], answer["seconds"], self._said.read_text(errors="replace")

    def _pytest(
        self, arguments: list[str], seconds: float, *, alone: bool
    ) -> tuple[int | None, float, str]:
        """Run pytest; return its exit code (None: it hung), the seconds, and what it said."""
        environment = self.environment.copy()
        if alone:
            del environment[LENT]
        given = {
            "arguments": arguments,
            "environment": environment,
            "folder": str(self.tree),
            "said": str(self._said),
            "seconds": seconds,
        }
        assert self._warm.stdin
        assert self._warm.stdout
        self._warm.stdin.write(f"{json.dumps(given)}\n")
        self._warm.stdin.flush()
        answer = json.loads(self._warm.stdout.readline())
        return answer["code"], answer["seconds"], self._said.read_text(errors="replace")

    def run(
        self,
        command: list[str],
        folder: Path,
        more: Mapping[str, str] | None = None,
        seconds: float | None = LONGEST_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with the copy's modules, with more variables in its environment.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        environment = {**self.environment, **(more or {})}
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
                out, err = process.communicate(timeout=seconds)
            except BaseException:
                os.killpg(process.pid, signal.SIGINT)  # its servers do not stay behind
                try:
                    process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


class Collected:
    """The process of `tests.mutants.collected`; it is started when it is first needed."""

    def __init__(self, ground: Field) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        options = ("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *ONE_VERSION)
        folders = sorted(
            str(path.relative_to(ground.tree))
            for path in ground.tree.glob("tests/*/")
            if any(path.glob("test_*.py")) and path.name not in NOT_COLLECTED
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-p", "tests.mutants.collected", *folders],
            cwd=ground.tree,
            env=ground.environment | {"SAF_REQUESTS": f"{requests}", "SAF_ANSWERS": f"{answers}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._to = os.fdopen(self._requests, "w")
        self._from = os.fdopen(self._answers)
        self.names: frozenset[str] = frozenset(json.loads(self._from.readline() or "[]"))
        """The tests that it has collected."""

    def ask(self, given: Mapping[str, Any]) -> Any:
        """Have a mutant's tests run; see `tests.mutants.collected`."""
        self._to.write(f"{json.dumps(given)}\n")
        self._to.flush()
        return json.loads(self._from.readline())

    def close(self) -> None:
        """End the process."""
        self._to.close()
        self._from.close()
        self._process.wait()


@contextmanager
def field() -> Iterator[Field]:
    """The copy, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="saf-mutants-") as folder, embedded_server() as server:
        with closing(Databases(server.dsn("postgres"))) as databases:
            template = databases.create("template")
        migrate(template.dsn)
        with closing(Field(Path(folder), template)) as ground:
            yield ground
