"""Whatever is said, and whichever end is set back when: no dialog loses or repeats silently."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import saf
from saf.database import Dsn, fetch
from saf.errors import DialogEnded
from tests.conftest import Prepared
from tests.pipeline import connect
from tests.set_backs import Place, Two
from tests.tiers import sized

STEPS = (
    *["set back"] * 4, *["say"] * 5, *["exchange"] * 4, *["carry"] * 2, *["hear"] * 3,
    *["backup"] * 2, "begin", "end",
)  # fmt: skip
OPEN = """
SELECT handle FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY AS mine (conversation_id, place)
JOIN saf.conversation USING (conversation_id)
WHERE state IN ('conversing', 'started_inbound') ORDER BY place
"""
# Not as many as there are: what is drawn must not depend on what a database says
NUMBER = st.integers(0, 59)


@dataclass
class Step:
    """What happens next, drawn before anything has happened."""

    at_shop: bool
    what: str
    early: bool
    brings_back: bool
    numbers: list[int] = field(repr=False)
    """Which of the dialogs or backups that there are, in the order in which they are asked for."""


STEP = st.builds(
    Step,
    at_shop=st.booleans(),
    what=st.sampled_from(STEPS),
    early=st.booleans(),
    brings_back=st.booleans(),
    numbers=st.lists(NUMBER, min_size=2, max_size=2),
)


class SetBack:
    """Some dialogs between two brokers, each of which may go back to what it was before."""

    def __init__(self, two: Two, seen: Counter[str]) -> None:
        self.two = two
        self.seen = seen
        self.number = 0
        self.backups = {place.service: [place.backup()] for place in (two.shop, two.warehouse)}
        self.dialogs = [two.begin(self._text()).conversation_id]
        two.talk()
        for place in (two.shop, two.warehouse):
            self.backups[place.service].append(place.backup())

    def go_on(self, step: Step) -> None:
        place = self.two.shop if step.at_shop else self.two.warehouse
        backups = self.backups[place.service]
        if step.what == "begin":
            self.dialogs.append(self.two.begin(self._text()).conversation_id)
        elif step.what == "say":
            self._say(place, step)
            self._say(place, step)
        elif step.what == "carry":
            self.two.carry()
        elif step.what == "exchange":
            for _ in range(2):
                self.two.carry()
                self.two.warehouse.hears()
                self.two.shop.hears()
                self._say(place, step)
        elif step.what == "hear":
            place.hears()
        elif step.what == "backup":
            backups.append(place.backup())
        elif step.what == "end":
            self._end(place, step)
        else:
            self.seen[f"{place.service} set back"] += 1
            place.go_back(backups[step.numbers[0] % len(backups)])
            if step.early:
                self._say(place, step)
            self.two.repair(place, bring_back=step.brings_back)

    def come_to_an_end(self) -> None:
        places = (self.two.shop, self.two.warehouse)
        self.two.talk()
        known = {name: place.ends() for name, place in zip("sw", places, strict=True)}
        over = {
            dialog
            for ends in known.values()
            for dialog, (state, code, _) in ends.items()
            if code is None and state.startswith(("disconnected", "closed"))
        }
        outcome = self.two.check(set(self.dialogs) - over)
        self.seen.update("goes on" if on else "fails" for on in outcome.values())
        while sum(place.ends_what_is_over() for place in places):
            self.two.talk()
        for place in places:
            left = {one: end for one, end in place.ends().items() if end[0] != "closed"}
            assert {one for one, on in outcome.items() if on} >= left.keys() & {*self.dialogs}, left

    def _say(self, place: Place, step: Step) -> None:
        if dialog := self._one(place, step):
            place.says(dialog, self._text())

    def _end(self, place: Place, step: Step) -> None:
        if dialog := self._one(place, step):
            with suppress(DialogEnded), place.dsn.connect(role="test") as connection:
                dialog.end(connection)

    def _one(self, place: Place, step: Step) -> saf.Dialog | None:
        with connect(place.dsn) as connection:
            ends = [handle for (handle,) in fetch(connection, OPEN, {"ids": self.dialogs})]
            number = step.numbers[0]
            step.numbers = [*step.numbers[1:], number]
            return saf.open_dialog(connection, ends[number % len(ends)]) if ends else None

    def _text(self) -> str:
        self.number += 1
        return str(self.number)


def test_every_dialog_goes_on_or_fails_at_both_ends(app: Dsn, mom: Dsn, migrated: Prepared) -> None:
    two = Two.at(app, mom, migrated.databases)
    seen: Counter[str] = Counter()

    @settings(
        max_examples=sized(2, 6),
        # to find a smaller one takes longer than to understand it
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps=st.lists(STEP, min_size=8, max_size=12))
    def goes_on(steps: list[Step]) -> None:
        model = SetBack(two, seen)
        for step in steps:
            model.go_on(step)
        model.come_to_an_end()

    try:
        goes_on()
    finally:
        for place in (two.shop, two.warehouse):
            for copy in place.copies:
                migrated.databases.drop(copy)
    assert min(seen["goes on"], seen["fails"]) > 0, "the steps lead somewhere"
