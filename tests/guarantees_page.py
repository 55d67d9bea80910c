"""docs/guarantees.md: below each guarantee, planted bugs, the code that they break, and a test.

    python -m tests.guarantees_page   # fills in the tables of the page

The first column of a table names planted bugs (tests/mutants/listed/) and is written by hand; the
others follow from the list and from the source.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.mutants.listed import PARTS
from tests.mutants.mutant import ROOT, Mutant

PAGE = ROOT / "docs" / "guarantees.md"
HEAD = "| planted bug | source | test that fails |\n| --- | --- | --- |\n"
ROW = re.compile(r"^\| ([^|]+?) \| [^|]* \| [^|]* \|$", re.MULTILINE)


def page(text: str) -> str:
    """Return a page with its tables filled in.

    :raises KeyError: a table names a bug that is not in the list
    """
    mutants = {mutant.name: mutant for part in PARTS.values() for mutant in part}

    def filled(match: re.Match[str]) -> str:
        return match[0] if match[0] in HEAD else row(mutants[match[1]])

    return ROW.sub(filled, text)


def row(mutant: Mutant) -> str:
    """Return a row of a table."""
    path, _, name = mutant.tests[0].partition("::")
    test = f"`tests/{path}`" + (f" `{name.rpartition('::')[2]}`" if name else "")
    return f"| {mutant.name} | `{mutant.file}` `{place(mutant)}` | {test} |"


def place(mutant: Mutant) -> str:
    """Return the function or the constant of a module that a bug changes."""
    source = Path(ROOT / mutant.file).read_text()
    line = source[: source.index(mutant.before)].count("\n") + 1
    line += len(mutant.before) - len(mutant.before.lstrip("\n"))
    names: list[str] = []
    body = ast.parse(source).body
    while node := next(
        (node for node in body if first(node) <= line <= (node.end_lineno or 0)), None
    ):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            body = node.body
            continue
        if not names and isinstance(node, ast.Assign | ast.AnnAssign):
            names.append(
                ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            )
        break
    return ".".join(names)


def first(node: ast.stmt) -> int:
    """Return the first line of a statement, its decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
