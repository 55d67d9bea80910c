"""Each machine for a few seconds, always the same; `make stateful` looks further.

A machine that finds nothing shows something only if it would find what is there, so some bugs are
planted too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from saf.broker.embedded import DEFAULT_VERSION
from saf.log import offset
from saf.operating.repair import rebase, send_again
from saf.receiving import claim
from saf.receiving.hand import Hand
from tests.conftest import Servers
from tests.crash import bugs
from tests.stateful.machines import MACHINES
from tests.stateful.run import Make, run
from tests.stateful.site import Site
from tests.tiers import sized

SLOW = {"dialogs", "dialogs_set_back", "set_back"}
"""Machines that take half a minute; tests of their own keep their promises in the gate."""

EXAMPLES, STEPS = sized(3, 6), 20


@pytest.fixture(scope="module")
def made(servers: Servers) -> Iterator[Callable[[str], Make]]:
    """Machines by name; the databases of each are made once."""
    site = Site(servers[DEFAULT_VERSION].databases)
    known: dict[str, Make] = {}

    def make(name: str) -> Make:
        if name not in known:
            known[name] = MACHINES[name](site)
        return known[name]

    yield make
    site.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in SLOW else [])
        for name in sorted(MACHINES)
    ],
)
def test_whatever_happens_each_message_has_one_end(made: Callable[[str], Make], name: str) -> None:
    run(made(name), examples=EXAMPLES, steps=STEPS)


def position_of_a_receiver_not_moved(patch: pytest.MonkeyPatch) -> None:
    def move(connection: psycopg.Connection[Any], hand: Hand) -> None:
        del connection, hand

    patch.setattr(claim, "move", move)


def incarnation_not_raised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rebase, "raise_incarnation", lambda *_: None)
    patch.setattr(send_again, "_raise_incarnation", lambda *_: None)


def end_of_a_cut_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offset, "UP_TO", "")


PLANTED = [
    ("forwarding", bugs.watermark_moved_and_a_row_not_stored),
    ("aside", bugs.watermark_not_moved),
    ("receiving", position_of_a_receiver_not_moved),
    ("dialogs", bugs.repeats_in_a_dialog_taken),
    pytest.param("dialogs_set_back", incarnation_not_raised, marks=pytest.mark.full),
    ("streaming", end_of_a_cut_not_kept),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "bug"), PLANTED)
def test_a_planted_bug_is_found(
    made: Callable[[str], Make],
    name: str,
    bug: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = made(name)
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        run(make, examples=3 * EXAMPLES, steps=STEPS, number=1, shrink=False)
