"""The list of planted bugs fits the tree; the gate has a test for each, and catches a sample."""

from __future__ import annotations

import datetime
import doctest
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import saf
from tests.mutants import __main__ as command
from tests.mutants import kept
from tests.mutants.kept import Kept
from tests.mutants.listed import PARTS
from tests.mutants.mutant import ROOT, Mutant, in_gate
from tests.mutants.planting import Fate, Field, Verdict, field
from tests.tiers import FULL, TIER

ALL = [one for mutants in PARTS.values() for one in mutants]
SAMPLE = 3
QUICK = ("unit/", "contract/test_owners", "contract/test_set_aside_once", "contract/test_status")
"""Files of which a test is over in a second or two."""

VISIBLE = Mutant(
    "the doubled waits",
    "saf/setaside/parking.py",
    "min(attempts - 1, 30)",
    "min(attempts, 30)",
    ("unit/test_doctests.py",),
)


@pytest.fixture(scope="module")
def planted() -> Iterator[Field]:
    with field() as planted:
        yield planted


def test_each_text_stands_once_in_its_file_and_each_test_exists() -> None:
    stale = {one.name: one.stale() for one in ALL if one.stale()}
    assert stale == {}


def test_the_gate_runs_a_test_that_catches_it() -> None:
    """This rule decides what may leave the gate; `make mutants` runs the gate's tests only."""
    outside = [one.name for one in ALL if one.tests and not any(map(in_gate, one.tests))]
    assert outside == []


def test_a_test_with_the_mark_full_is_outside_of_the_gate() -> None:
    assert in_gate("unit/test_doctests.py")
    assert not in_gate("unit/test_no_such_file.py")
    round_on_spark = "test_streams_write_each_message_once_although_their_driver_is_killed"
    assert not in_gate("crash/test_stream_round.py")
    assert not in_gate(f"crash/test_stream_round.py::{round_on_spark}")
    assert not in_gate(
        "integration/test_sbom.py::test_it_is_valid_and_names_what_saf_with_its_extras_consists_of"
    )


def test_each_has_a_name_of_its_own_and_there_are_enough_of_them() -> None:
    names = Counter(f"{one.file}: {one.name}" for one in ALL)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(ALL) >= 500


def test_each_folder_of_saf_has_some() -> None:
    here = Path(saf.__file__).parent
    rooms = {f"saf/{path.parent.name}" for path in here.glob("*/__init__.py")}
    assert rooms - {command.folder(one.file) for one in ALL} == set()


def test_the_examples_of_the_command_are_true() -> None:
    assert doctest.testmod(command).failed == 0


def test_a_verdict_is_kept_until_what_it_rests_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "build" / "mutants.jsonl"
    survived = Verdict(mutant=VISIBLE, fate=Fate.SURVIVED, seconds=2.0, said="1 passed")
    first = Kept(file)
    assert first.verdict(VISIBLE) is None
    first.add(survived)
    first.add(Verdict(mutant=replace(VISIBLE, after="0"), fate=Fate.BROKEN))
    assert Kept(file).verdict(VISIBLE) == survived
    assert Kept(file).verdict(replace(VISIBLE, after="0")) is None
    assert Kept(file).verdict(replace(VISIBLE, tests=("unit/test_rounds.py",))) is None
    monkeypatch.setattr(kept, "_ground", lambda: "another tree")
    assert Kept(file).verdict(VISIBLE) is None


def test_the_score_is_that_of_each_folder_and_names_who_survived(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_log = replace(VISIBLE, file="saf/log/cursor.py")
    fates = [(in_log, Fate.CAUGHT), (VISIBLE, Fate.CAUGHT), (VISIBLE, Fate.SURVIVED)]
    verdicts = [Verdict(mutant=mutant, fate=fate) for mutant, fate in fates]
    assert command.summary(verdicts[:2], 2) == 0
    assert command.summary(verdicts, 5) == 1
    said = capsys.readouterr().out
    assert "saf/log                  1       1        0  100.0 %" in said
    assert "saf/setaside             2       1        1   50.0 %" in said
    assert "all                      3       2        1   66.7 %" in said
    assert "survived: the doubled waits (saf/setaside/parking.py)" in said
    assert "2 of 5 are left" in said


@pytest.mark.full
def test_what_is_noticed_what_is_not_and_what_does_not_fit_are_told_apart(planted: Field) -> None:
    before = (ROOT / VISIBLE.file).read_text()
    unnoticed = replace(VISIBLE, tests=("unit/test_rounds.py",))
    fates = {
        Fate.CAUGHT: VISIBLE,
        Fate.SURVIVED: unnoticed,
        Fate.BROKEN: replace(VISIBLE, before="no such text"),
        Fate.HARMLESS: replace(VISIBLE, tests=(), harmless="as the comment there says"),
    }
    assert {fate: planted.plant(one).fate for fate, one in fates.items()} == {
        fate: fate for fate in fates
    }
    no_python = replace(unnoticed, after="min(attempts,")
    assert planted.plant(replace(no_python, tests=("unit/test_doctests.py",))).fate is Fate.BROKEN
    assert (ROOT / VISIBLE.file).read_text() == before
    assert (planted.tree / VISIBLE.file).read_text() == before


@pytest.mark.full
def test_a_sample_is_caught(planted: Field) -> None:
    """In the gate always the same; `make full` plants others each day."""
    quick = [one for one in ALL if one.tests and all(t.startswith(QUICK) for t in one.tests)]
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    for one in random.Random(day if TIER == FULL else 0).sample(quick, SAMPLE):
        verdict = planted.plant(one)
        assert verdict.fate is Fate.CAUGHT, f"{one.name}: {verdict.said}"
