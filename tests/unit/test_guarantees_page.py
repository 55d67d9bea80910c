"""docs/guarantees.md is true: each guarantee has what is said to show it, and it is there."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests import guarantees_page
from tests.crash.checker import Verdict
from tests.crash.plan import FAULTS, SILENCE, SPARK_FAULTS
from tests.crash.queues import OF_QUEUES
from tests.crash.webhooks import OF_ENDPOINTS
from tests.mutants.listed import PARTS
from tests.mutants.mutant import ROOT

PAGE = (ROOT / "docs" / "guarantees.md").read_text()
SECTIONS = dict(
    re.findall(r"^## (\d+\. \w[\w ]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
)
NAMES = [
    *("Atomic", "No loss", "Order", "Quality of service", "Fenced", "Durable", "Isolated"),
    *("Restartable", "Bounded", "Honest"),
]
OF_ROUNDS = {*FAULTS, *SPARK_FAULTS, SILENCE, *OF_QUEUES, *OF_ENDPOINTS, *Verdict.__annotations__}
SHOWN = re.compile(r"`((?:tests|docs|benchmarks)/[\w./]+)`")


@cache
def planted() -> set[str]:
    return {one.name for mutants in PARTS.values() for one in mutants if not one.stale()}


def test_each_guarantee_has_a_section() -> None:
    assert list(SECTIONS) == [f"{n}. {name}" for n, name in enumerate(NAMES, 1)]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_shows_a_guarantee_is_there(section: str) -> None:
    tables = guarantees_page.ROW.findall(SECTIONS[section])
    assert {*tables} & planted(), "planted bugs"
    text = guarantees_page.ROW.sub("", SECTIONS[section])
    files = SHOWN.findall(text)
    assert any(file.startswith("tests/contract/") for file in files)
    assert [file for file in files if not (ROOT / file).is_file()] == []
    rounds = set(re.findall(r"`([a-z]+_[a-z_]+|lost|duplicated)`", text)) - {"max_bytes"}
    assert rounds <= OF_ROUNDS


def test_the_tables_lead_to_the_source_and_to_the_test_that_notices_a_planted_bug() -> None:
    same = guarantees_page.page(PAGE) == PAGE
    assert same, "run `python -m tests.guarantees_page`, which fills in the tables"


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_not_covered_is_said(section: str) -> None:
    assert len(SECTIONS[section].partition("\nNot covered: ")[2]) > 60


def test_each_guarantee_has_the_tests_that_are_named_after_it() -> None:
    for number in range(1, len(NAMES) + 1):
        [file] = (ROOT / "tests" / "contract").glob(f"test_{number}_*.py")
        section = next(text for name, text in SECTIONS.items() if name.startswith(f"{number}. "))
        assert f"`{file.relative_to(ROOT)}`" in section
