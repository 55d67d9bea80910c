"""A mutant: one small change of the code that breaks a promise, and which tests must notice.

Choose a short text that stands once in its file and says one thing, so that the list survives other
changes; and the narrowest test whose promise it breaks. What breaks no promise, because another
check covers it, is `harmless`: the list says why, and so does a comment beside the code.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[2]
FULL_MARK = "pytest.mark.full"

PARSING = Lock()
"""Held while a file is parsed: Python 3.11 raises SystemError if two threads do so at a time."""

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


def in_gate(test: str) -> bool:
    """Tell whether the gate runs a test, or some test of a file; both by path below tests/."""
    path, _, name = test.partition("::")
    functions = _functions(path)
    if not name:
        return any(functions.values())
    return functions.get(name.partition("[")[0].rpartition("::")[2], False)


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    function = name.partition("[")[0].rpartition("::")[2]
    return bool(_functions(path)) if not name else function in _functions(path)


@cache
def _functions(path: str) -> Mapping[str, bool]:
    """The test functions of a file, each with whether the gate runs it."""
    file = ROOT / "tests" / path
    if not file.is_file():
        return {}
    with PARSING:
        tree = ast.parse(file.read_text())
    whole = any(
        isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node) and _is_full(node.value)
        for node in tree.body
    )
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        for each in [node, *(node.body if isinstance(node, ast.ClassDef) else ())]:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = [*each.decorator_list, *getattr(node, "decorator_list", ())]
                left_out = whole or any(map(_is_full, decorators))
                found[each.name] = found.get(each.name, True) and not left_out
    return found


def _is_full(node: ast.expr) -> bool:
    marks = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return FULL_MARK in map(ast.unparse, marks)
