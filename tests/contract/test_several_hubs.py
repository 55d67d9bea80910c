"""Several hubs: replies find the initiator that asked, by the hub that their dialog took."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from tests.dialogs import receive
from tests.hub import BY_TEXT, DEPARTURES, classify_in_database, replica
from tests.pipeline import Cycle, connect
from tests.processes import start, wait
from tests.receivers import dead, let_the_server_notice, waiting
from tests.routing import without_default
from tests.tiers import sized

INITIATORS, HUBS, TARGETS = 4, 3, 5
PYTHON, DATABASE = "in Python", "in PL/pgSQL"
"""Where the hubs' classifiers are."""
DIALOGS, MESSAGES, ROUNDS = sized(12, 60), 10, (1, 4, 5)
SERVICES = {"app0": "shop", "app1": "shop", "app2": "kiosk", "app3": "web"}
"""Of the initiators; one of them lives at two application databases."""


@dataclass(kw_only=True)
class Site:
    """Initiators, replicas of a routing service and targets, each in a database of its own."""

    places: dict[str, Dsn]
    cycles: dict[str, Cycle]
    dialogs: dict[saf.Dialog, Dsn] = field(default_factory=dict)
    wanted: dict[UUID, str] = field(default_factory=dict)
    """Which target a dialog is for."""
    asked: list[saf.Received] = field(default_factory=list)
    answers: list[tuple[Dsn, saf.Received]] = field(default_factory=list)

    def named(self, prefix: str) -> dict[str, Dsn]:
        return {name: dsn for name, dsn in self.places.items() if name.startswith(prefix)}

    def begin(self) -> None:
        for number in range(DIALOGS):
            name = f"app{number % INITIATORS}"
            with self.places[name].connect(role="test") as connection:
                dialog = saf.begin_dialog(
                    connection, from_service=SERVICES[name], to_service=DEPARTURES
                )
            self.dialogs[dialog] = self.places[name]
            self.wanted[dialog.conversation_id] = f"T{number % TARGETS}"

    def say(self, numbers: range) -> None:
        """The first message names the target; all are told apart by their text."""
        for dialog, dsn in self.dialogs.items():
            with dsn.connect(role="test") as connection:
                for number in numbers:
                    said = f"{dialog.conversation_id} {number}" if number else ""
                    dialog.send(connection, said or self.wanted[dialog.conversation_id])

    def forward(self) -> None:
        for cycle in self.cycles.values():
            while receipts := cycle.run():
                assert [one.error for one in receipts if one.error] == []

    def route(self, failpoint: str = "") -> int:
        """All replicas send on what is there; return how many were killed, and started again."""
        killed = 0
        for number, dsn in enumerate(self.named("hub").values()):
            code = wait(start(replica, dsn, failpoint=failpoint if number == 1 else ""))
            while code:
                assert code == -signal.SIGKILL
                killed += 1
                let_the_server_notice(dsn)
                code = wait(start(replica, dsn))
        return killed

    def answer(self) -> None:
        for number, dsn in enumerate(self.named("target").values()):
            self.asked += receive(dsn, f"T{number}", _reply)

    def listen(self) -> None:
        for name, dsn in self.named("app").items():
            self.answers += [(dsn, one) for one in receive(dsn, SERVICES[name])]


def _reply(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    assert message.dialog is not None
    message.dialog.send(connection, message.body)


@pytest.fixture
def site(new_broker: Callable[[str], Dsn], classifier: str) -> Iterator[Site]:
    names = [f"app{n}" for n in range(INITIATORS)]
    names += [f"hub{n}" for n in range(HUBS)] + [f"target{n}" for n in range(TARGETS)]
    places = {name: new_broker(name) for name in names}
    for name, dsn in places.items():
        with connect(dsn) as connection:
            if name.startswith("app"):
                create_service(connection, SERVICES[name])
                for hub in range(HUBS):
                    add_route(connection, f"hub{hub}", service=DEPARTURES)
            elif name.startswith("hub"):
                create_service(connection, DEPARTURES)
                if classifier == DATABASE:
                    classify_in_database(connection)
                else:
                    add_router(connection, DEPARTURES, "python", BY_TEXT, mode="forward")
                for number in range(TARGETS):
                    add_route(connection, f"target{number}", service=f"T{number}")
            else:
                create_service(connection, f"T{name[-1]}")
    with ExitStack() as stack:
        cycles = {
            name: stack.enter_context(without_default(dsn, 50, **places))
            for name, dsn in places.items()
        }
        yield Site(places=places, cycles=cycles)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "return_routes", "classifier"),
    [
        ("", "by service", PYTHON),
        ("receive_handled:2", "by themselves", PYTHON),
        ("receive_handled:2", "by themselves", DATABASE),
    ],
)
def test_every_reply_reaches_the_initiator_that_asked_by_the_hub_that_its_dialog_took(
    site: Site, killed: str, return_routes: str
) -> None:
    if return_routes == "by service":
        for name, dsn in site.places.items():
            with connect(dsn) as connection:
                if name.startswith("target"):
                    for hub in range(HUBS):
                        add_route(connection, f"hub{hub}", service=DEPARTURES)
                elif name.startswith("hub"):
                    for app, service in SERVICES.items():
                        add_route(connection, app, service=service)
    site.begin()
    deaths = said = 0
    for count in ROUNDS:
        site.say(range(said, said + count))
        said += count
        site.forward()
        deaths += site.route(killed if said > 1 else "")
        site.forward()
        site.answer()
        site.forward()
        deaths += site.route(killed if said > 1 else "")
        site.forward()
        site.listen()
    assert said == MESSAGES
    assert (deaths > 0) == bool(killed)

    heard: dict[tuple[str, UUID], list[str]] = defaultdict(list)
    for dsn, one in site.answers:
        assert one.conversation_id is not None
        heard[dsn.database, one.conversation_id].append(one.text())
    assert heard == {
        (dsn.database, dialog.conversation_id): [
            site.wanted[dialog.conversation_id],
            *(f"{dialog.conversation_id} {number}" for number in range(1, MESSAGES)),
        ]
        for dialog, dsn in site.dialogs.items()
    }
    assert len(site.asked) == DIALOGS * MESSAGES
    # a third of the dialogs at each hub, and each at one
    took: Counter[UUID] = Counter()
    for dsn in site.named("hub").values():
        with connect(dsn) as connection:
            mine = fetch(
                connection, "SELECT conversation_id FROM saf.conversation WHERE NOT is_initiator"
            )
        assert len(mine) == DIALOGS // HUBS
        took.update(one for (one,) in mine)
    assert took == dict.fromkeys([one.conversation_id for one in site.dialogs], 1)
    for dsn in site.places.values():
        assert (dead(dsn), waiting(dsn)) == ([], [])
