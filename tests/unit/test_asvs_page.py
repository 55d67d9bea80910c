"""docs/asvs.md looks at each requirement of levels 1 and 2, and what it names is there."""

from __future__ import annotations

import re
from collections import Counter

from tests.mutants.mutant import ROOT

PAGE = (ROOT / "docs" / "asvs.md").read_text()
ROW = re.compile(
    r"^\| (?P<numbers>V[\d., V]+) \| (?P<word>[^|]+) \|(?P<why>[^|]*)\|$", re.MULTILINE
)
WORDS = {"met", "deployer", "none", "**not met**"}
EVIDENCE = re.compile(r"`((?:saf|tests|docs)/[\w./-]+|pyproject\.toml)`")
# How many requirements of levels 1 and 2 each section of ASVS 5.0.0 has, chapter by chapter; those
# of level 3 alone have the numbers behind them
SECTIONS = {
    1: {1: 2, 2: 9, 3: 11, 4: 3, 5: 2},
    2: {1: 3, 2: 3, 3: 4, 4: 1},
    3: {2: 2, 3: 4, 4: 6, 5: 5, 7: 2},
    4: {1: 3, 2: 1, 3: 2, 4: 4},
    5: {1: 1, 2: 3, 3: 2, 4: 3},
    6: {1: 3, 2: 12, 3: 4, 4: 4, 5: 5, 6: 3, 8: 4},
    7: {1: 3, 2: 4, 3: 2, 4: 5, 5: 2, 6: 2},
    8: {1: 2, 2: 3, 3: 1, 4: 1},
    9: {1: 3, 2: 4},
    10: {1: 2, 2: 2, 3: 4, 4: 11, 5: 5, 6: 2, 7: 3},
    11: {1: 2, 2: 3, 3: 3, 4: 4, 5: 1, 6: 1},
    12: {1: 3, 2: 2, 3: 4},
    13: {1: 1, 2: 5, 3: 2, 4: 5},
    14: {1: 2, 2: 4, 3: 3},
    15: {1: 3, 2: 3, 3: 7},
    16: {1: 1, 2: 5, 3: 4, 4: 3, 5: 3},
    17: {1: 1, 2: 4, 3: 2},
}
ALL = {
    f"V{chapter}.{section}.{number}"
    for chapter, sections in SECTIONS.items()
    for section, count in sections.items()
    for number in range(1, count + 1)
}


def rows() -> list[tuple[list[str], str, str]]:
    found = ROW.findall(PAGE)
    assert len(found) == len(re.findall(r"^\| V\d", PAGE, re.MULTILINE)), "a row of another form"
    return [(numbers.split(", "), word, why) for numbers, word, why in found]


def test_each_requirement_of_levels_1_and_2_is_looked_at_once() -> None:
    looked_at = Counter(number for numbers, _, _ in rows() for number in numbers)
    assert len(ALL) == 253
    assert looked_at.keys() ^ ALL == set()
    assert [number for number, count in looked_at.items() if count > 1] == []
    assert {word for _, word, _ in rows()} == WORDS


def test_what_shows_it_is_there() -> None:
    named = set(EVIDENCE.findall(PAGE))
    assert len(named) > 40
    assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []


def test_what_is_not_met_is_said_above_with_its_number() -> None:
    above = PAGE.partition("## What is not met")[2].partition("\n## V1 ")[0]
    for numbers, word, _ in rows():
        if word == "**not met**":
            assert any(number in above for number in numbers), numbers


def test_events_that_matter_for_security_are_logged_under_the_names_that_the_page_has() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## What is logged\n")[2].partition("\n## ")[0]
    events = {
        name
        for line in re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    }
    code = "".join(file.read_text() for file in (ROOT / "saf").rglob("*.py"))
    assert len(events) == 9
    assert [event for event in sorted(events) if f'"{event}"' not in code] == []
