"""The list of planted bugs fits to the tree, and a sample of them is noticed, another each day."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.mutants.listed import PARTS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.planting import Fate, Field, field

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


def test_each_has_a_name_of_its_own_and_there_are_enough_of_them() -> None:
    names = Counter(f"{one.file}: {one.name}" for one in ALL)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(ALL) >= 120


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


def test_todays_sample_is_noticed(planted: Field) -> None:
    quick = [one for one in ALL if one.tests and all(t.startswith(QUICK) for t in one.tests)]
    today = random.Random(datetime.datetime.now(datetime.UTC).date().toordinal())
    for one in today.sample(quick, SAMPLE):
        verdict = planted.plant(one)
        assert verdict.fate is Fate.CAUGHT, f"{one.name}: {verdict.said}"
