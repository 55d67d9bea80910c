"""The table of docs/reliability.md is true: its tests and planted bugs are there, and fit."""

from __future__ import annotations

import re

from tests.mutants.listed import PARTS
from tests.mutants.mutant import ROOT, Mutant

ROW = re.compile(
    r"^\| (?P<promise>[^|]+) \| `(?P<test>[^`|]+)` \| (?P<bug>[^|]+) \|$", re.MULTILINE
)
BUGS: dict[str, list[Mutant]] = {}
for mutants in PARTS.values():
    for one in mutants:
        BUGS.setdefault(one.name, []).append(one)


def rows() -> list[tuple[str, str, str]]:
    page = (ROOT / "docs" / "reliability.md").read_text()
    table = page.partition("| promised | test")[2].partition("\n\n")[0]
    assert table.count("\n| ") - 1 == len(ROW.findall(table)), "a row is of another form"
    return ROW.findall(table)


def test_each_promise_has_a_test_that_is_there_and_a_planted_bug_that_it_fails_with() -> None:
    wrong = [
        (promise, test, bug)
        for promise, test, bug in rows()
        if not any(test in one.tests and not one.stale() for one in BUGS.get(bug, []))
    ]
    assert wrong == []


def test_each_bug_that_is_planted_for_the_table_alone_is_in_it() -> None:
    assert {one.name for one in PARTS["promises"]} <= {bug for _, _, bug in rows()}
