"""``make changed SINCE=main``: the tests of what differs from a revision, for the work in hand.

A changed file of tests runs whole. A changed module runs its doctests, the tests that its planted
bugs name, and the files of tests that import it. A changed page or example runs the tests that
name it. Where a module is common ground (more than `COMMON` files import it), its planted bugs
and the unit tests stand for it: the gate runs the rest.

What follows ``--`` goes to pytest. Exit code: pytest's; 0 if nothing is to be run.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import filterfalse
from pathlib import Path

from tests.mutants.listed import PARTS
from tests.tiers import FULL, is_full

ROOT = Path(__file__).parents[1]
COMMON = 12
DOCTESTS = "tests/unit/test_doctests.py::test_the_examples_in_the_docstrings_are_true"
OF_COMMANDS = (
    "tests/integration/test_cli.py",
    "tests/unit/test_help.py",
    "tests/contract/test_reference_pages.py",
)
GROUND = ("pyproject.toml", "Makefile", "tests/conftest.py", "tests/tiers.py")
"""What every test rests on: no choice of tests is right."""


def main() -> int:
    """Choose, print what was chosen, and run pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__)
    parser.add_argument("--since", default="HEAD", help="a revision; default: what is uncommitted")
    parser.add_argument("options", nargs="*", help="options of pytest")
    given = parser.parse_args()
    changed = differing(given.since)
    chosen = chosen_for(changed)
    if ground := [file for file in changed if file in GROUND]:
        print(f"every test rests on {', '.join(ground)}: run make check too")
    if not chosen:
        print(f"no test for {len(changed)} changed files since {given.since}")
        return 0
    print(f"{len(changed)} changed files since {given.since}; their tests:")
    print(*(f"  {test}" for test in chosen), sep="\n", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *given.options]
    whole = [test for test in chosen if is_whole(test)]
    codes = [
        subprocess.run([*command, *tests], cwd=ROOT, env=os.environ | tier, check=False).returncode
        for tests, tier in (([*filterfalse(is_whole, chosen)], {}), (whole, {"SAF_TESTS": FULL}))
        if tests
    ]
    return max(codes)


def is_whole(test: str) -> bool:
    """Tell whether only the full tier runs a file of tests, such as those of most pages."""
    file = ROOT / test
    return file.suffix == ".py" and is_full(file)


def differing(revision: str) -> list[str]:
    """Return the files that differ from a revision, and those that Git does not know yet."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", revision],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{revision}: {done.stderr.strip()}")
        found.update(done.stdout.split("\n"))
    return sorted(found - {""})


def chosen_for(changed: Iterable[str]) -> list[str]:
    """Return the arguments of pytest for these files, a whole file before its single tests."""
    chosen = {test for file in changed for test in _tests_of(file)}
    whole = {test for test in chosen if "::" not in test}
    return sorted(test for test in chosen if test in whole or test.split("::")[0] not in whole)


def _tests_of(file: str) -> Iterator[str]:
    path = Path(file)
    if path.parts[0] == "tests" and path.suffix == ".py":
        yield from _files_upon(file)
    elif path.parts[0] == "migrations" or (
        path.parts[0] in ("saf", "saf_demo") and path.suffix == ".py"
    ):
        yield from (
            f"tests/{test}"
            for mutants in PARTS.values()
            for mutant in mutants
            for test in mutant.tests
            if mutant.file == file
        )
        yield from ["tests/migration"] if path.parts[0] == "migrations" else _of_module(file)
    elif path.name != "CHANGELOG.md":
        # a page, an example, a unit of systemd: the tests that name it
        name = path.name if path.parts[0] != "examples" else "examples"
        yield from (test for test, text in _texts().items() if f'"{name}"' in text or file in text)


def _of_module(file: str) -> Iterator[str]:
    module = _module(file)
    if Path(file).name != "__main__.py":
        yield f"{DOCTESTS}[{module}]"
    files = {test for test, imported in _imports().items() if module in imported and _is_test(test)}
    if file.startswith(("saf/cli/", "saf_demo/command")):
        yield from OF_COMMANDS
        word = f'"{Path(file).stem.replace("_", "-")}"'
        files |= {test for test, text in _texts().items() if word in text}
    common = len(files) > COMMON
    yield from (test for test in files if not common or test.startswith("tests/unit/"))


def _files_upon(file: str) -> Iterator[str]:
    """The files of tests that are, or import, a module of tests, by way of others too."""
    seen, ahead = {file}, [file]
    while ahead:
        module = _module(ahead.pop())
        upon = {name for name, imported in _imports().items() if module in imported} - seen
        seen |= upon
        ahead += upon
    folders = {str(Path(one).parent) for one in seen if one.endswith("/conftest.py")} - {"tests"}
    yield from (one for one in seen if _is_test(one))
    yield from (one for one in _imports() if _is_test(one) and str(Path(one).parent) in folders)


def _is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")


def _module(file: str) -> str:
    """Return the name that a file is imported by.

    >>> _module("saf/log/cursor.py"), _module("saf/log/__init__.py")
    ('saf.log.cursor', 'saf.log')
    """
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


@cache
def _texts() -> Mapping[str, str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@cache
def _imports() -> Mapping[str, frozenset[str]]:
    """Which modules each file of tests imports."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {str(file.relative_to(ROOT)): _imported(file) for file in files}


def _imported(file: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return frozenset(found)


if __name__ == "__main__":
    sys.exit(main())
