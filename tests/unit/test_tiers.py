"""The tiers of the tests, and the commands that choose from them."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from types import ModuleType

import pytest

from tests import changed, full, needed
from tests.changed import chosen_for
from tests.mutants.mutant import ROOT
from tests.tiers import FIRST_RUN, in_first_run

TESTS = ROOT / "tests"


@pytest.mark.parametrize("module", [changed, full, needed])
def test_the_examples_are_true(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_each_entry_of_the_first_run_exists() -> None:
    assert [path for path in FIRST_RUN if not (TESTS / path).exists()] == []
    assert len(set(FIRST_RUN)) == len(FIRST_RUN)


def test_the_first_run_has_a_test_of_each_guarantee() -> None:
    guarantees = {file.name for file in (TESTS / "contract").glob("test_*.py")}
    numbered = sorted(name for name in guarantees if name.split("_")[1].isdigit())
    assert len(numbered) == 10
    assert [name for name in numbered if not in_first_run(f"contract/{name}")] == []


def test_an_unknown_tier_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tests.tiers"],
        cwd=ROOT,
        env=os.environ | {"SAF_TESTS": "long"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SAF_TESTS is 'long': set it to test, check or full" in done.stderr


def test_a_changed_module_runs_its_doctests_its_planted_bugs_and_what_imports_it() -> None:
    chosen = chosen_for(["saf/log/ring.py"])
    assert f"{changed.DOCTESTS}[saf.log.ring]" in chosen
    assert any(test.startswith("tests/contract/test_ring.py") for test in chosen)


def test_a_changed_page_runs_the_tests_that_name_it() -> None:
    assert "tests/integration/test_receiving_page.py" in chosen_for(["docs/receiving.md"])


def test_a_changed_module_of_tests_runs_the_tests_that_rest_on_it() -> None:
    assert {*chosen_for(["tests/endpoints.py"])} >= {
        "tests/contract/test_dispatch.py",
        "tests/contract/test_dispatch_owners.py",
    }


def test_a_whole_file_stands_for_its_single_tests() -> None:
    chosen = chosen_for(["tests/contract/test_ring.py", "saf/log/ring.py"])
    assert [one for one in chosen if one.startswith("tests/contract/test_ring.py::")] == []


def test_each_suite_of_everything_has_a_row_of_its_own() -> None:
    page = full.HEAD + "".join(
        f"{full.Row(suite=name, runs='r', commit='c', date='d', minutes='1', result='ok')}\n"
        for name in full.SUITES
    )
    assert [*full.rows(page)] == [*full.SUITES]


def test_the_tests_of_a_page_run_although_the_gate_leaves_them_out() -> None:
    assert changed.is_whole("tests/integration/test_routing_page.py")
    assert not changed.is_whole("tests/unit/test_tiers.py")
    assert not changed.is_whole("tests/migration")
