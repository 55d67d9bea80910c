"""Whatever is said, and whichever end is set back when: no dialog loses or repeats silently."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import saf
from saf.database import Dsn, fetch
from saf.errors import DialogEnded
from tests.conftest import Prepared
from tests.pipeline import connect
from tests.set_backs import Place, Two

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


class SetBack(RuleBasedStateMachine):
    """Some dialogs between two brokers, each of which may go back to what it was before."""

    def __init__(self, two: Two, seen: Counter[str]) -> None:
        super().__init__()
        self.two = two
        self.seen = seen
        self.number = 0
        self.backups = {place.service: [place.backup()] for place in (two.shop, two.warehouse)}
        self.dialogs = [two.begin(self._text()).conversation_id]
        two.talk()
        for place in (two.shop, two.warehouse):
            self.backups[place.service].append(place.backup())

    # One rule, because hypothesis would leave some of several out
    @rule(
        at_shop=st.booleans(),
        step=st.sampled_from(STEPS),
        early=st.booleans(),
        brings_back=st.booleans(),
        data=st.data(),
    )
    def go_on(self, at_shop: bool, step: str, early: bool, brings_back: bool, data: Any) -> None:
        place = self.two.shop if at_shop else self.two.warehouse
        backups = self.backups[place.service]
        if step == "begin":
            self.dialogs.append(self.two.begin(self._text()).conversation_id)
        elif step == "say":
            self._say(place, data)
            self._say(place, data)
        elif step == "carry":
            self.two.carry()
        elif step == "exchange":
            for _ in range(2):
                self.two.carry()
                self.two.warehouse.hears()
                self.two.shop.hears()
                self._say(place, data)
        elif step == "hear":
            place.hears()
        elif step == "backup":
            backups.append(place.backup())
        elif step == "end":
            self._end(place, data)
        else:
            self.seen[f"{place.service} set back"] += 1
            place.go_back(backups[data.draw(NUMBER) % len(backups)])
            if early:
                self._say(place, data)
            self.two.repair(place, bring_back=brings_back)

    def teardown(self) -> None:
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

    def _say(self, place: Place, data: Any) -> None:
        if dialog := self._one(place, data):
            place.says(dialog, self._text())

    def _end(self, place: Place, data: Any) -> None:
        if dialog := self._one(place, data):
            with suppress(DialogEnded), place.dsn.connect(role="test") as connection:
                dialog.end(connection)

    def _one(self, place: Place, data: Any) -> saf.Dialog | None:
        with connect(place.dsn) as connection:
            ends = [handle for (handle,) in fetch(connection, OPEN, {"ids": self.dialogs})]
            which = data.draw(NUMBER)
            return saf.open_dialog(connection, ends[which % len(ends)]) if ends else None

    def _text(self) -> str:
        self.number += 1
        return str(self.number)


def test_every_dialog_goes_on_or_fails_at_both_ends(app: Dsn, mom: Dsn, migrated: Prepared) -> None:
    two = Two.at(app, mom, migrated.databases)
    seen: Counter[str] = Counter()

    class Between(SetBack):
        def __init__(self) -> None:
            super().__init__(two, seen)

    try:
        run_state_machine_as_test(
            Between,
            settings=settings(
                max_examples=8,
                stateful_step_count=12,
                # to find a smaller one takes longer than to understand it
                phases=[Phase.generate],
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        for place in (two.shop, two.warehouse):
            for copy in place.copies:
                migrated.databases.drop(copy)
    assert min(seen["goes on"], seen["fails"]) > 0, "the steps lead somewhere"
