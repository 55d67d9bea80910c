"""A machine plants bugs: which it can think of, and which tests it runs for each."""

from __future__ import annotations

import doctest
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import operators, recording
from tests.mutants.generated import FOLDERS, HARMLESS, SURVIVED, Generated, listed
from tests.mutants.mutant import ROOT
from tests.mutants.operators import changes, compiles
from tests.mutants.planting import Fate, Field, field
from tests.mutants.recording import Recordings

MODULE = '''
"""Says min(1, 2) and `a < b` only."""
LOCK = """
SELECT a FROM t WHERE a > %(a)s AND b BETWEEN 1 AND 2
ORDER BY a FOR UPDATE OF t
"""


def first(a: int, b: int = 3) -> int:
    """True of a < b."""
    if not a and b <= 4:
        raise ValueError("a < b")
    log.info("a < b")
    lock(a)
    return min(a, b) + 1
'''
TEST = "tests/unit/test_webhook_signatures.py"
SIGNING = "saf/signing/webhook.py"


@pytest.fixture(scope="module")
def ground() -> Iterator[Field]:
    with field() as ground:
        yield ground


@pytest.fixture(scope="module")
def recordings(ground: Field, tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    found = Recordings(tmp_path_factory.mktemp("recorded"))
    found.record(ground, [TEST])
    return found


@pytest.mark.parametrize("module", [operators, recording])
def test_the_examples_are_true(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type] # it is a module


def test_each_harmless_change_says_why_and_is_listed_once() -> None:
    harmless, survived = listed(HARMLESS), listed(SURVIVED)
    assert all(one["why"] for one in harmless)
    changes_ = [(one["file"], one["before"], one["after"]) for one in [*harmless, *survived]]
    assert len({*changes_}) == len(changes_)


def test_changes_are_of_what_is_done_and_not_of_what_is_said() -> None:
    found = [(one.line, MODULE[one.begin : one.end], one.after) for one in changes(MODULE)]
    assert found == [
        (4, "a > %(a)s AND ", ""),
        (4, ">", ">="),
        (4, " AND b BETWEEN 1 AND 2", ""),
        (4, "AND", "OR"),
        (5, "a", "a DESC"),
        (5, " FOR UPDATE OF t", ""),
        (9, "3", "4"),
        (11, "not a", "(a)"),
        (11, "not a", "True"),
        (11, "not a and b <= 4", "(not (not a and b <= 4))"),
        (11, "and", "or"),
        (11, "b <= 4", "True"),
        (11, "<=", "<"),
        (11, "4", "5"),
        (12, 'raise ValueError("a < b")', "pass"),
        (14, "lock(a)", "pass"),
        (15, "min", "max"),
        (15, "+", "-"),
        (15, "1", "2"),
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_there_are_many_changes_of_each_folder_and_nearly_all_are_python(folder: str) -> None:
    for file in sorted((ROOT / folder).glob("*.py")):
        whole = file.read_text()
        some = list(changes(whole))[::25]
        assert all(one.of(whole) != whole for one in some)
        assert sum(compiles(one.of(whole)) for one in some) >= 0.9 * len(some)
    every = sum(len(list(changes(file.read_text()))) for file in (ROOT / folder).glob("*.py"))
    assert every > 100


@pytest.mark.full
@pytest.mark.slow
def test_each_change_is_drawn_with_the_tests_that_execute_it_and_they_notice_it(
    ground: Field, recordings: Recordings
) -> None:
    assert TEST not in recordings.missing(["unit/test_w"])
    whole = (ROOT / SIGNING).read_text()
    line = whole[: whole.index("    if abs(difference)")].count("\n") + 1
    found = {
        one.removeprefix(f"{TEST}::").partition("[")[0]
        for one in recordings.tests_of(SIGNING, [line])
    }
    assert "test_a_webhook_holds_within_the_tolerance_on_either_side" in found
    assert "test_a_secret_without_its_prefix_is_refused" not in found
    drawn = list(Generated(recordings, [], ["saf/signing"]).draw(500, 7, f"line {line}:"))
    assert {one.name for one in drawn} == {
        f"line {line}: abs is left out",
        f"line {line}: > is >=",
        f"line {line}: negated",
    }
    assert {one.name: ground.plant(one).fate for one in drawn} == {
        one.name: Fate.CAUGHT for one in drawn
    }
    assert not any(one.stale() for one in drawn)
    known = [{"file": SIGNING, "before": one.before, "after": one.after} for one in drawn]
    left = Generated(recordings, known[1:], ["saf/signing"]).draw(500, 7, f"line {line}:")
    assert [one.name for one in left] == [drawn[0].name]


@pytest.mark.full
@pytest.mark.slow
def test_a_constant_is_changed_for_the_tests_that_execute_what_uses_it(
    recordings: Recordings,
) -> None:
    """A constant is executed at import, by no test."""
    of_constant = Generated(recordings, [], ["saf/signing"]).draw(
        500, 7, f"{SIGNING} line {_line('LENGTH = 44')}:"
    )
    (one,) = of_constant
    assert one.after == "LENGTH = 45"
    assert any("test_only_signatures_of_version_1_count" in test for test in one.tests)


def test_a_recording_counts_until_its_file_of_tests_changes(tmp_path: Path) -> None:
    file = tmp_path / "tests" / "unit" / "test_a.py"
    file.parent.mkdir(parents=True)
    file.write_text("def test_a() -> None: ...\n")
    folder = tmp_path / "recorded"
    folder.mkdir()
    assert Recordings(folder, tmp_path).missing() == ["tests/unit/test_a.py"]
    of = recording._hash(file.read_bytes())
    known = {"files": {"tests/unit/test_a.py": of}, "sources": {}, "tree": "", "seconds": {}}
    (folder / "1.json").write_text(json.dumps(known))
    assert Recordings(folder, tmp_path).missing() == []
    file.write_text("def test_b() -> None: ...\n")
    assert Recordings(folder, tmp_path).missing(["unit"]) == ["tests/unit/test_a.py"]
    assert Recordings(folder, tmp_path).missing(["contract"]) == []


def _line(text: str) -> int:
    whole = (ROOT / SIGNING).read_text()
    return whole[: whole.index(text)].count("\n") + 1
