"""A mutant: one small change of the code that breaks a promise, and which tests must notice.

Choose a short text that stands once in its file and says one thing, so that the list survives other
changes; and the narrowest test whose promise it breaks. What breaks no promise, because another
check covers it, is `harmless`: the list says why, and so does a comment beside the code.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

LONGEST_SECONDS = 240.0
"""A bug that makes its tests hang has been noticed after so long."""


@dataclass(frozen=True)
class Mutant:
    """A change of one file, and the tests (paths below tests/, or node ids) that notice it."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    harmless: str = ""
    """Why no test can notice; then there are none."""
    seconds: float = LONGEST_SECONDS
    """How long its tests may take; longer, and it has been noticed."""
    by_machine: bool = False
    """Whether nobody has looked at it. If it cannot be imported, that is noticed, too."""

    def stale(self) -> str:
        """Why the list and the tree do not fit together; empty where they do."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.file} is not there"
        found = path.read_text().count(self.before)
        if found != 1:
            return f"{self.file} has {self.before!r} {found} times, and not once"
        if self.before == self.after:
            return "it changes nothing"
        if bool(self.tests) == bool(self.harmless):
            return "either tests notice it, or it says why it is harmless"
        missing = [test for test in self.tests if not _exists(test)]
        return f"there is no tests/{missing[0]}" if missing else ""


def mutant(name: str, file: str, before: str, after: str, *tests: str) -> Mutant:
    """A bug that each of these tests, or one of them, notices."""
    return Mutant(name, file, before, after, tests)


def harmless(name: str, file: str, before: str, after: str, why: str) -> Mutant:
    """A change that breaks no promise."""
    return Mutant(name, file, before, after, (), why)


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    function = name.partition("[")[0]
    return bool(_functions(path)) if not name else function in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    """The test functions of a file."""
    file = ROOT / "tests" / path
    if not file.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(file.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))
