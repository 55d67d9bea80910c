"""A dialog whose first message was sent to two destinations, by a set-back, goes on with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs.statements import Code
from saf.routing.routes import add_route
from tests.dialogs import SHOP, WAREHOUSE, begin, end, prepare, receive, said, say
from tests.pipeline import Cycle, connect, drain, forwarding_rules
from tests.programs import configuration
from tests.programs import saf as command

NEXT_TURN = """
INSERT INTO saf.route_share (service, keys) VALUES (%(service)s, 1)
ON CONFLICT ON CONSTRAINT route_share_once DO UPDATE SET keys = route_share.keys + 1
"""
ENDS = "SELECT state, error_code FROM saf.conversation WHERE NOT is_initiator"
DEAD = "SELECT reason, error FROM saf.dead_letter"
MOST_ROUNDS = 20


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    if message.dialog is not None and not str(message.message_type).startswith("saf/"):
        message.dialog.send(connection, f"{message.text()} in {connection.info.dbname}")


def nothing(_: psycopg.Connection[Any], __: saf.Received) -> None:
    pass


@dataclass
class Three:
    """A shop, and two warehouses that its routes share."""

    shop: Dsn
    stores: dict[str, Dsn]
    folder: Path
    handle: Callable[[psycopg.Connection[Any], saf.Received], None] = answer

    def forward(self) -> None:
        """What is pending in the shop."""
        _forward(self.shop, **self.stores)

    def talk(self) -> dict[str, list[str]]:
        """All that is under way arrives, and what that leads to; return who has heard what."""
        heard: dict[str, list[str]] = {SHOP: [], **{name: [] for name in self.stores}}
        for _ in range(MOST_ROUNDS):
            self.forward()
            before = sum(map(len, heard.values()))
            for name, store in self.stores.items():
                heard[name] += said(receive(store, WAREHOUSE, self.handle))
                _forward(store, shop=self.shop)
            heard[SHOP] += said(receive(self.shop, SHOP))
            if sum(map(len, heard.values())) == before and not self._pending():
                return heard
        raise AssertionError(f"they still talk: {heard}")

    def go_back(self, backup: Dsn) -> None:
        """Nobody is told, and another store has its turn."""
        self.shop = backup
        with connect(self.shop) as connection:
            connection.execute(NEXT_TURN, {"service": WAREHOUSE})

    def repair(self, second_targets: int) -> None:
        everybody = {"shop": self.shop, **self.stores}
        file = configuration(self.folder / "saf.toml", everybody, everybody)
        for what in (["rebase"], ["dialog", "compare"]):
            done = command(*what, "--config", str(file))
            assert done.returncode == 0, done.stderr
            if what == ["rebase"]:
                words = f"continue elsewhere: {second_targets}, failed"
                assert (words in done.stdout) == bool(second_targets), done.stdout

    def ends(self) -> dict[str, list[tuple[Any, ...]]]:
        return {name: _ask(store, ENDS) for name, store in self.stores.items()}

    def _pending(self) -> bool:
        pending = "SELECT FROM saf.outbox_status WHERE status = 'pending' LIMIT 1"
        return any(_ask(one, pending) for one in (self.shop, *self.stores.values()))


@pytest.fixture
def three(app: Dsn, mom: Dsn, other: Dsn, tmp_path: Path) -> Three:
    prepare(app, mom)
    with connect(other) as connection:
        create_service(connection, WAREHOUSE)
    with connect(app) as connection:
        for name in ("mom", "other"):
            add_route(connection, name, service=WAREHOUSE)
    return Three(shop=app, stores={"mom": mom, "other": other}, folder=tmp_path)


@pytest.mark.full
def test_an_initiator_that_was_set_back_goes_on_with_the_target_that_has_answered_it(
    three: Three, backup: Callable[[Dsn], Dsn]
) -> None:
    dialog, first = _begun_and_set_back(three, backup)
    three.forward()
    three.repair(second_targets=1)
    heard = three.talk()
    second = _only(name for name in three.stores if name != first)
    assert heard[second] == ["1"]
    assert heard[first] == ["saf/error"]
    assert heard[SHOP] == [f"1 in {three.stores[second].database}"]
    say(three.shop, dialog, "2")
    heard = three.talk()
    assert (heard[first], heard[second]) == ([], ["2"])
    assert heard[SHOP] == [f"2 in {three.stores[second].database}"]
    assert three.ends()[second] == [("conversing", None)]
    assert [code for _, code in three.ends()[first]] == [Code.SET_BACK]
    end(three.shop, dialog)
    assert three.talk()[second] == ["saf/end-dialog"]


def test_an_answer_of_another_target_is_a_dead_letter_and_fails_that_target(
    three: Three, backup: Callable[[Dsn], Dsn]
) -> None:
    """Also before the repair, and whatever number it has."""
    begin(three.shop, "1")
    before = backup(three.shop)
    three.forward()
    three.go_back(before)
    heard = three.talk()
    assert sorted(heard[SHOP])[:1] == heard[SHOP], "one of the two"
    assert _ask(three.shop, "SELECT count(*) FROM saf.conversation WHERE error_code IS NULL") == [
        (1,)
    ]
    assert sorted(code or 0 for ((_, code),) in three.ends().values()) == [Code.SET_BACK, 0]
    ((reason, error),) = _ask(three.shop, DEAD)
    assert reason == "rejected"
    assert "continues with another target" in error


def test_a_choice_that_a_set_back_has_forgotten_is_found_at_the_destination(
    three: Three, backup: Callable[[Dsn], Dsn]
) -> None:
    dialog, first = _begun_and_set_back(three, backup)
    three.repair(second_targets=0)
    say(three.shop, dialog, "2")
    heard = three.talk()
    assert heard[first] == ["2"]
    assert heard[SHOP] == [f"{n} in {three.stores[first].database}" for n in "12"]
    assert sorted(map(len, three.ends().values())) == [0, 1]


def test_a_target_that_never_answers_is_told_by_the_repair_that_the_dialog_is_elsewhere(
    three: Three, backup: Callable[[Dsn], Dsn]
) -> None:
    three.handle = nothing
    dialog, first = _begun_and_set_back(three, backup)
    three.talk()
    three.repair(second_targets=1)
    heard = three.talk()
    assert heard[first] == ["saf/error"]
    say(three.shop, dialog, "2")
    heard = three.talk()
    second = _only(name for name in three.stores if name != first)
    assert heard[second] == ["2"]
    assert _ask(three.shop, "SELECT error_code FROM saf.conversation") == [(None,)]


def _begun_and_set_back(three: Three, backup: Callable[[Dsn], Dsn]) -> tuple[saf.Dialog, str]:
    """A dialog that the backup has begun, and the store that its first message went to after it."""
    dialog = begin(three.shop, "1")
    before = backup(three.shop)
    first = _only(three.talk())
    three.go_back(before)
    return dialog, first


def _forward(source: Dsn, **destinations: Dsn) -> None:
    """What cannot be forwarded waits for the repair."""
    with Cycle(source, forwarding_rules("exactly_once", 1000, **destinations)) as cycle:
        drain(cycle)


def _ask(dsn: Dsn, query: str) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, query)


def _only(names: Any) -> str:
    """The store that has heard anything; or the only one there is."""
    if isinstance(names, dict):
        names = [name for name, heard in names.items() if heard and name != SHOP]
    (name,) = names
    return str(name)
