"""Bugs that a machine plants: each with the tests that execute what is changed.

``make mutants GENERATED=1500`` draws so many of all changes (`tests.mutants.operators`) of the
folders below. A change that no test executes is not drawn. Its tests are those that the recording
(`tests.mutants.recording`) names, the fastest first, for `SECONDS_EACH` at most. What is found to
be without effect is listed as `harmless`, like any other; then it is not drawn again.

SQL is in constants, which are executed when a module is imported. So such a change is looked for
where the constant is used: in functions, or in other constants, and where those are used.
"""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.operators import Change, changes, compiles
from tests.mutants.recording import Recordings

FOLDERS = (
    *("saf/log", "saf/engine", "saf/setaside", "saf/receiving", "saf/repair", "saf/signing"),
    *("saf/webhooks", "saf/dispatch"),
)
SECONDS_EACH = 40.0
"""How long the tests of one change may take together, as they were recorded."""
TESTS_EACH = 60
LEAST_SECONDS = 30.0
"""Tests that take this, and five times as long as they were recorded, hang."""
Place = tuple[str, int]
"""A file and a line of it."""


class Generated:
    """The changes of some folders."""

    def __init__(
        self, recordings: Recordings, listed: Sequence[Mutant], folders: Sequence[str] = FOLDERS
    ) -> None:
        self._recordings = recordings
        self._uses = _Uses()
        self._files = [
            str(file.relative_to(ROOT))
            for folder in folders
            for file in sorted((ROOT / folder).rglob("*.py"))
        ]
        self._harmless: dict[str, set[str]] = defaultdict(set)
        for one in listed:
            if one.harmless:
                whole = (ROOT / one.file).read_text()
                self._harmless[one.file].add(whole.replace(one.before, one.after))

    def draw(self, count: int, seed: int, words: str = "") -> Iterator[Mutant]:
        """Give so many mutants at random, of those whose name or file has the words."""
        every = [
            (file, one)
            for file in self._files
            for one in self._changes(file)
            if words in f"generated/{file} {_name(one)}"
        ]
        random.Random(seed).shuffle(every)
        while count > 0 and every:
            some, every = every[:count], every[count:]
            # file by file, because what is recorded of one is much
            found = {one: self._mutant(*one) for one in sorted(some, key=lambda one: one[0])}
            drawn = [one for place in some if (one := found[place]) is not None]
            count -= len(drawn)
            yield from drawn

    def _changes(self, file: str) -> list[Change]:
        return list(changes((ROOT / file).read_text()))

    def _mutant(self, file: str, change: Change) -> Mutant | None:
        """A change with its tests; None if no test executes it, or it is known to be harmless."""
        whole = (ROOT / file).read_text()
        after = change.of(whole)
        if after in self._harmless[file] or not compiles(after):
            return None
        tests = self._tests(file, change)
        if not tests:
            return None
        begin, end = _unique(whole, change)
        return Mutant(
            name=_name(change),
            file=file,
            before=whole[begin:end],
            after=whole[begin : change.begin] + change.after + whole[change.end : end],
            tests=tuple(tests),
            seconds=LEAST_SECONDS + 5 * sum(tests.values()),
            by_machine=True,
        )

    def _tests(self, file: str, change: Change) -> dict[str, float]:
        places = self._uses.of(file, change.line, change.last_line)
        lines: dict[str, set[int]] = defaultdict(set)
        for there, line in places:
            lines[there].add(line)
        seconds: dict[str, float] = {}
        for there, some in lines.items():
            seconds |= self._recordings.tests_of(there, some)
        chosen: dict[str, float] = {}
        left = SECONDS_EACH
        for test in sorted(seconds, key=lambda one: (seconds[one], one)):
            if (chosen and seconds[test] > left) or len(chosen) == TESTS_EACH:
                break
            chosen[test.removeprefix("tests/")] = seconds[test]
            left -= seconds[test]
        return chosen


def _name(change: Change) -> str:
    return f"line {change.line}: {change.kind}"


def _unique(whole: str, change: Change) -> tuple[int, int]:
    """The smallest part of whole lines about a change that stands once in its file."""
    begin = whole.rfind("\n", 0, change.begin) + 1
    end = whole.find("\n", change.end)
    end = len(whole) if end < 0 else end
    while whole.count(whole[begin:end]) > 1:
        begin = whole.rfind("\n", 0, max(0, begin - 1)) + 1
        after = whole.find("\n", end + 1)
        end = len(whole) if after < 0 else after
    return begin, end


class _Uses:
    """Where in saf what a line says is used."""

    def __init__(self) -> None:
        self._modules = {
            str(file.relative_to(ROOT)): ast.parse(file.read_text())
            for file in sorted((ROOT / "saf").rglob("*.py"))
        }

    def of(self, file: str, line: int, last_line: int) -> set[Place]:
        """The lines in functions that are executed with some lines, or because of them."""
        module = self._modules[file]
        for node in module.body:
            assert node.end_lineno
            if node.lineno <= line <= node.end_lineno:
                return self._of_statement(file, node, line, last_line)
        return set()

    def _of_statement(self, file: str, node: ast.stmt, line: int, last_line: int) -> set[Place]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._within(file, node, line, last_line)
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                assert part.end_lineno
                inside = part.lineno <= line <= part.end_lineno
                if inside and isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    return self._within(file, part, line, last_line)
            return {
                (file, one)
                for part in node.body
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
                for one in _lines(part.body[0], part.body[-1])
            } | {place for name in [node.name] for place in self._of_name(name, set())}
        names = {
            one.id
            for one in ast.walk(node)
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        }
        seen: set[str] = set()
        return {place for name in names for place in self._of_name(name, seen)}

    @staticmethod
    def _within(
        file: str, function: ast.FunctionDef | ast.AsyncFunctionDef, line: int, last_line: int
    ) -> set[Place]:
        """Of a part of a function; of its head, which is executed at its definition, all of it."""
        first = function.body[0].lineno
        if line < first:
            return {(file, one) for one in _lines(function.body[0], function.body[-1])}
        # a statement of several lines is recorded by some of them
        inner = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.stmt)
            if node.lineno <= line and (node.end_lineno or 0) >= last_line
        ]
        smallest = min(inner, key=lambda node: (node.end_lineno or 0) - node.lineno)
        head = getattr(smallest, "body", None)
        end = head[0].lineno - 1 if head else smallest.end_lineno or smallest.lineno
        return {(file, one) for one in range(smallest.lineno, max(end, last_line) + 1)}

    def _of_name(self, name: str, seen: set[str]) -> set[Place]:
        """Where a name of a module is used, in whatever module."""
        if name in seen:
            return set()
        seen.add(name)
        found: set[Place] = set()
        for file, lines, defines in self._loads.get(name, ()):
            found |= {(file, line) for line in lines}
            for other in defines:
                found |= self._of_name(other, seen)
        return found

    @cached_property
    def _loads(self) -> dict[str, list[tuple[str, set[int], set[str]]]]:
        """For each name: the files that use it, in which lines of functions, or for which names."""
        loads: dict[str, list[tuple[str, set[int], set[str]]]] = defaultdict(list)
        for file, module in self._modules.items():
            of_file: dict[str, tuple[set[int], set[str]]] = defaultdict(lambda: (set(), set()))
            for node in module.body:
                stores = {
                    one.id
                    for one in ast.walk(node)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                }
                inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                for one in ast.walk(node):
                    match one:
                        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                            lines, defines = of_file[name]
                            if inside:
                                lines.add(one.lineno)
                            else:
                                defines |= stores
            for name, (lines, defines) in of_file.items():
                loads[name].append((file, lines, defines))
        return loads


def _lines(first: ast.stmt, last: ast.stmt) -> range:
    return range(first.lineno, (last.end_lineno or last.lineno) + 1)
