"""Bugs that a machine plants, each with the tests that execute the changed line.

``make mutants GENERATED=1500`` draws that many of all changes (`tests.mutants.operators`) of the
folders below. A change that no test executes is not drawn. Its tests come from the recording
(`tests.mutants.recording`), of as many files as possible, and take at most `SECONDS_EACH`. A change
that has no effect is not drawn again once `harmless.toml` says why.

SQL is in constants, which are executed at import, by no test. A changed constant counts as executed
where it is used: in functions, or in other constants, and where those are used.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import chain, takewhile, zip_longest
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.operators import Change, changes, compiles
from tests.mutants.recording import Recordings

FOLDERS = (
    *("saf/log", "saf/engine", "saf/setaside", "saf/receiving", "saf/signing", "saf/webhooks"),
    "saf/operating/repair",
)
HARMLESS = Path(__file__).with_name("harmless.toml")
"""Changes without effect: ``file``, ``before``, ``after``, and ``why`` it has none."""
SURVIVED = Path(__file__).with_name("survived.toml")
"""Changes that tests have let through, and that nobody has judged yet."""

SECONDS_EACH = 8.0
"""Longest time that the tests of one change take together, as recorded."""
TESTS_EACH = 30
"""Most tests of one change."""
LEAST_SECONDS = 15.0
"""Tests that run for this time plus five times the recorded one are hung."""

MOST_IMPORTS = 5
"""Most modules that a name is imported through."""

Place = tuple[str, int]
"""A file and a line of it."""
Name = tuple[str, str]
"""A file and a name that its module defines."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def listed(file: Path) -> list[dict[str, str]]:
    """Return the changes of `HARMLESS` or `SURVIVED`."""
    return list(tomllib.loads(file.read_text()).get("change", []))


class Generated:
    """The changes of some folders."""

    def __init__(
        self,
        recordings: Recordings,
        harmless: Iterable[Mapping[str, str]],
        folders: Sequence[str] = FOLDERS,
    ) -> None:
        self._recordings = recordings
        self._uses = _Uses()
        files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
        self._texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
        self._harmless: dict[str, set[str]] = defaultdict(set)
        for change in harmless:
            text = self._texts.get(change["file"], "")
            if text.count(change["before"]) == 1:  # else that code was rewritten
                changed = text.replace(change["before"], change["after"])
                self._harmless[change["file"]].add(changed)
        self.not_executed = 0
        """Number of changes that were not drawn because no test executes them."""

    def draw(self, count: int, seed: int, words: str = "") -> Iterator[Mutant]:
        """Give ``count`` mutants at random, of those whose name or file contains ``words``."""
        left = [
            (file, change)
            for file, text in self._texts.items()
            for change in changes(text)
            if words in f"generated/{file} {_name(change)}"
        ]
        left.sort(key=lambda place: self._number(seed, *place))
        while count > 0 and left:
            some, left = left[:count], left[count:]
            # file by file: the recordings of one file are large
            mutants = {place: self._mutant(*place) for place in sorted(some, key=lambda p: p[0])}
            drawn = [mutant for place in some if (mutant := mutants[place]) is not None]
            count -= len(drawn)
            yield from drawn

    def those(self, listed: Iterable[Mapping[str, str]]) -> Iterator[Mutant]:
        """Give the mutants of listed changes, but for those whose text was rewritten."""
        for one in listed:
            text = self._texts.get(one["file"], "")
            if text.count(one["before"]) != 1:
                continue
            pairs = zip(one["before"], one["after"], strict=False)
            same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            begin = text.index(one["before"]) + same
            end = begin - same + len(one["before"])
            line, last_line = (text.count("\n", 0, at) + 1 for at in (begin, end))
            after, kind = one["after"][same:], "let through"
            change = Change(
                begin=begin, end=end, after=after, line=line, last_line=last_line, kind=kind
            )
            mutant = self._mutant(one["file"], change)
            if mutant is not None:
                yield mutant

    def _number(self, seed: int, file: str, change: Change) -> bytes:
        """Return a random number of a change; it does not depend on the rest of its file."""
        text = self._texts[file]
        line = text[text.rfind("\n", 0, change.begin) + 1 : change.end]
        return sha256(f"{seed} {file} {line} {change.after}".encode()).digest()

    def _mutant(self, file: str, change: Change) -> Mutant | None:
        """Return a change with its tests; None without tests, or if it is known to be harmless."""
        text = self._texts[file]
        changed = change.of(text)
        if changed in self._harmless[file] or not compiles(changed):
            return None
        tests = self._tests(file, change)
        if not tests:
            self.not_executed += 1
            return None
        begin, end = _unique(text, change)
        return Mutant(
            name=_name(change),
            file=file,
            before=text[begin:end],
            after=text[begin : change.begin] + change.after + text[change.end : end],
            tests=tuple(tests),
            seconds=LEAST_SECONDS + 5 * sum(tests.values()),
            by_machine=True,
        )

    def _tests(self, file: str, change: Change) -> dict[str, float]:
        """Return the tests to run for a change, the fastest first, with their seconds."""
        lines: dict[str, set[int]] = defaultdict(set)
        for user, line in self._uses.of(file, change.line, change.last_line):
            lines[user].add(line)
        seconds: dict[str, float] = {}
        for user, numbers in lines.items():
            seconds |= self._recordings.tests_of(user, numbers)
        of_file: dict[str, list[str]] = defaultdict(list)
        for test in sorted(seconds, key=lambda test: (seconds[test], test)):
            of_file[test.partition("::")[0]].append(test)
        # the fastest of each file of tests, then the second one of each: they look at other things
        turns = zip_longest(*sorted(of_file.values(), key=lambda tests: seconds[tests[0]]))
        chosen: dict[str, float] = {}
        left = SECONDS_EACH
        for test in filter(None, chain.from_iterable(turns)):
            if len(chosen) < TESTS_EACH and (not chosen or seconds[test] <= left):
                chosen[test.removeprefix("tests/")] = seconds[test]
                left -= seconds[test]
        return dict(sorted(chosen.items(), key=lambda item: item[1]))


def _name(change: Change) -> str:
    return f"line {change.line}: {change.kind}"


def _unique(text: str, change: Change) -> tuple[int, int]:
    """Return where the shortest run of whole lines around a change is that occurs only once."""
    begin = text.rfind("\n", 0, change.begin) + 1
    end = text.find("\n", change.end)
    end = len(text) if end < 0 else end
    while text.count(text[begin:end]) > 1:
        begin = text.rfind("\n", 0, max(0, begin - 1)) + 1
        following = text.find("\n", end + 1)
        end = len(text) if following < 0 else following
    return begin, end


class _Uses:
    """Which lines of functions execute a line, or use the constant that it defines."""

    def __init__(self) -> None:
        self._modules = {
            str(file.relative_to(ROOT)): ast.parse(file.read_text())
            for file in sorted((ROOT / "saf").rglob("*.py"))
        }

    def of(self, file: str, line: int, last_line: int) -> set[Place]:
        """Return the places in functions that are executed with some lines of a file."""
        for node in self._modules[file].body:
            if line in _lines(node, node):
                return self._of_statement(file, node, line, last_line)
        return set()

    def _of_statement(self, file: str, node: ast.stmt, line: int, last_line: int) -> set[Place]:
        """Return the places for lines of one statement of a module."""
        if isinstance(node, Function):
            return self._within(file, node, line, last_line)
        seen: set[Name] = set()
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, Function)]
            for method in methods:
                if line in _lines(method, method):
                    return self._within(file, method, line, last_line)
            inside = {
                (file, number)
                for method in methods
                for number in _lines(method.body[0], method.body[-1])
            }
            return inside | self._of_name((file, node.name), seen)
        return {place for name in _stores(node) for place in self._of_name((file, name), seen)}

    @staticmethod
    def _within(file: str, function: Function, line: int, last_line: int) -> set[Place]:
        """Return the places for a part of a function.

        Its head is executed at its definition, so for that it is the whole body. Of a statement of
        several lines, only some are recorded.
        """
        if line < function.body[0].lineno:
            return {(file, number) for number in _lines(function.body[0], function.body[-1])}
        around = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.stmt) and {line, last_line} <= {*_lines(node, node)}
        ]
        smallest = min(around, key=lambda node: len(_lines(node, node)))
        body = getattr(smallest, "body", None)
        end = body[0].lineno - 1 if body else smallest.end_lineno or smallest.lineno
        return {(file, number) for number in range(smallest.lineno, max(end, last_line) + 1)}

    def _of_name(self, name: Name, seen: set[Name]) -> set[Place]:
        """Return where the name of a module is used, in any module."""
        if name in seen:
            return set()
        seen.add(name)
        file_lines, defined = self._loads.get(name, (set(), set()))
        places = set(file_lines)
        for other in defined:
            places |= self._of_name(other, seen)
        return places

    @cached_property
    def _loads(self) -> dict[Name, tuple[set[Place], set[Name]]]:
        """For each name of a module: the places that use it, and the names that are made of it."""
        loads: dict[Name, tuple[set[Place], set[Name]]] = defaultdict(lambda: (set(), set()))
        for file, module in self._modules.items():
            for statement in module.body:
                is_code = isinstance(statement, ast.ClassDef | Function)
                stores: set[Name] = (
                    set() if is_code else {(file, name) for name in _stores(statement)}
                )
                for node in ast.walk(statement):
                    name = self._loaded(file, node)
                    if name is not None:
                        places, defined = loads[name]
                        defined |= stores
                        if is_code:
                            assert isinstance(node, ast.expr)
                            places.add((file, node.lineno))
        return loads

    def _loaded(self, file: str, node: ast.AST) -> Name | None:
        """Return which name of which module an expression is."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return self._resolved((file, name))
            case ast.Attribute(value=ast.Name(id=alias), attr=name):
                module = self._resolved((file, alias))[0]
                return self._resolved((module, name)) if module != file else None
        return None

    def _resolved(self, name: Name) -> Name:
        """Follow imports to the module that defines a name; a module is its file and no name."""
        for _ in range(MOST_IMPORTS):
            file, local = name
            if local not in self._imports.get(file, {}):
                break
            name = self._imports[file][local]
        return name

    @cached_property
    def _imports(self) -> dict[str, dict[str, Name]]:
        """For each file, where its imported names are from."""
        return {
            file: {
                alias.asname or alias.name: self._imported(node.module, alias.name)
                for node in ast.walk(module)
                if isinstance(node, ast.ImportFrom) and node.module
                for alias in node.names
            }
            for file, module in self._modules.items()
        }

    def _imported(self, module: str, name: str) -> Name:
        path = module.replace(".", "/")
        for file in (f"{path}/{name}.py", f"{path}/{name}/__init__.py"):
            if file in self._modules:
                return file, ""
        return (f"{path}.py" if f"{path}.py" in self._modules else f"{path}/__init__.py"), name


def _stores(statement: ast.stmt) -> set[str]:
    """Return the names that a statement sets."""
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _lines(first: ast.stmt, last: ast.stmt) -> range:
    return range(first.lineno, (last.end_lineno or last.lineno) + 1)
