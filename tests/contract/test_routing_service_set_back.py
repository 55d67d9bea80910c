"""A dialog by way of a hub, of which a party or the hub itself was set back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from saf.database import Dsn, fetch
from saf.destinations.postgresql import known_at
from saf.dialogs.set_back import compare_all
from saf.dialogs.statements import Code
from saf.operating.repair.rebase import rebase
from saf.operating.repair.reconcile import missing
from saf.operating.repair.send_again import send_again
from saf.routing.routes import current_routes
from tests.dialogs import ERROR, SHOP, begin, receive, said, say
from tests.hub import Hub
from tests.pipeline import connect, stores
from tests.set_backs import FORGET
from tests.signing import signer

GoBack = Callable[[Hub, str, Dsn], Hub]


@pytest.fixture
def hub(new_broker: Callable[[str], Dsn]) -> Hub:
    return Hub.at(new_broker)


@pytest.fixture
def redirecting(new_broker: Callable[[str], Dsn]) -> Hub:
    return Hub.at(new_broker, "redirect")


def repair(hub: Hub, name: str, *, purged: bool = True) -> None:
    """The one that was set back, and then the others: what it has lost is purged there."""
    places = {"app": hub.app, "hub": hub.hub, "ewr": hub.ewr, "jfk": hub.jfk}
    with connect(places.pop(name)) as broken:
        ((source,),) = fetch(broken, "SELECT broker_id FROM saf.broker")
        known = {}
        for other, dsn in places.items():
            with connect(dsn) as connection:
                known[other] = known_at(connection, source)
        assert rebase(broken, known, force=True)
    for other, dsn in hub.places.items():
        if dsn not in places.values():
            continue
        there = stores(**{one: to for one, to in hub.places.items() if one != other})
        with connect(dsn) as connection:
            lost = missing(other, dsn, there, retention_seconds=86400.0)
            for shard, number in lost if purged else ():
                connection.execute(FORGET, {"shard": shard, "id": number})
        send_again(
            other, dsn, there, lambda connection: current_routes(connection, None),
            retention_seconds=86400.0, why="set back",
        )  # fmt: skip
        with connect(dsn) as connection, connection.transaction():
            compare_all(connection)


def talk(hub: Hub) -> tuple[list[str], list[str]]:
    """Whatever is under way arrives; return what the shop and the airport get."""
    shop, airport = [], []
    for _ in range(4):
        hub.carry()
        shop += said(receive(hub.app, SHOP))
        airport += said(receive(hub.ewr, "EWR"))
    return shop, airport


def errors(dsn: Dsn) -> list[int | None]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT error_code FROM saf.conversation ORDER BY created_at")
    return [code for (code,) in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("app", marks=pytest.mark.full),
        "hub",
        pytest.param("ewr", marks=pytest.mark.full),
    ],
)
def test_whichever_broker_forgets_what_was_said_both_parties_get_an_error(
    hub: Hub, backup: Callable[[Dsn], Dsn], name: str
) -> None:
    dialog = begin(hub.app, "EWR", to_service="departures")
    assert talk(hub) == ([], ["EWR"])
    older = backup(getattr(hub, name))
    say(hub.app, dialog, "2")
    assert talk(hub) == ([], ["2"])
    hub = replace(hub, **{name: older})
    repair(hub, name)
    shop, airport = talk(hub)
    assert (shop, airport) == ([ERROR], [ERROR])
    assert errors(hub.app) == errors(hub.ewr) == [Code.SET_BACK]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("signed", [False, True])
def test_a_hub_that_has_forgotten_the_dialog_tells_both_parties(
    hub: Hub, backup: Callable[[Dsn], Dsn], signed: bool
) -> None:
    older = backup(hub.hub)
    begin(hub.app, "EWR", to_service="departures", signer=signer() if signed else None)
    assert talk(hub) == ([], ["EWR"])
    hub = replace(hub, hub=older)
    repair(hub, "hub")
    assert talk(hub) == ([ERROR], [ERROR])


@pytest.mark.slow
@pytest.mark.parametrize("compared", ["before", "after"])
def test_a_hub_that_begins_a_signed_dialog_again_tells_both_parties_or_continues(
    hub: Hub, backup: Callable[[Dsn], Dsn], compared: str
) -> None:
    """Its second dialog has the same id again, and the same numbers for the same messages."""
    older = backup(hub.hub)
    dialog = begin(hub.app, "EWR", "2", to_service="departures", signer=signer())
    assert talk(hub) == ([], ["EWR", "2"])
    hub = replace(hub, hub=older)
    repair(hub, "hub", purged=False)
    hub.forward(*(("ewr", "shop") if compared == "before" else ("shop", "ewr")))
    shop, airport = talk(hub)
    assert (shop, airport) in (([], []), ([ERROR], [ERROR]))
    assert errors(hub.app) == errors(hub.ewr)
    if not shop:
        say(hub.app, dialog, "3")
        assert talk(hub) == ([], ["3"])


@pytest.mark.full
@pytest.mark.slow
def test_a_hub_that_has_forgotten_nothing_goes_on(hub: Hub, backup: Callable[[Dsn], Dsn]) -> None:
    dialog = begin(hub.app, "EWR", to_service="departures")
    assert talk(hub) == ([], ["EWR"])
    hub = replace(hub, hub=backup(hub.hub))
    repair(hub, "hub")
    say(hub.app, dialog, "2")
    assert talk(hub) == ([], ["2"])
    assert errors(hub.app) == errors(hub.ewr) == [None]


# A hub that redirects is no end of a dialog


@pytest.mark.slow
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("name", ["app", "ewr"])
def test_by_a_hub_that_redirects_both_parties_get_an_error_if_one_has_forgotten(
    redirecting: Hub, backup: Callable[[Dsn], Dsn], name: str, answered: bool
) -> None:
    hub, dialog = redirecting, begin(redirecting.app, "EWR", to_service="departures")
    hub.carry()
    (first,) = receive(hub.ewr, "EWR")
    assert first.dialog is not None
    if answered:
        say(hub.ewr, first.dialog, "1")
        assert talk(hub) == (["1"], [])
    older = backup(getattr(hub, name))
    say(hub.app, dialog, "2")
    assert talk(hub) == ([], ["2"])
    hub = replace(hub, **{name: older})
    repair(hub, name)
    assert talk(hub) == ([ERROR], [ERROR])
    assert errors(hub.app) == errors(hub.ewr) == [Code.SET_BACK]


@pytest.mark.slow
@pytest.mark.parametrize("purged", [False, True])
def test_a_hub_that_redirects_and_has_forgotten_a_message_loses_nothing(
    redirecting: Hub, backup: Callable[[Dsn], Dsn], purged: bool
) -> None:
    hub, dialog = redirecting, begin(redirecting.app, "EWR", to_service="departures")
    assert talk(hub) == ([], ["EWR"])
    older = backup(hub.hub)
    say(hub.app, dialog, "2")
    assert talk(hub) == ([], ["2"])
    hub = replace(hub, hub=older)
    repair(hub, "hub", purged=purged)
    assert talk(hub) == ([], [])
    say(hub.app, dialog, "3")
    assert talk(hub) == ([], ["3"])
    assert errors(hub.app) == errors(hub.ewr) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_a_hub_that_redirects_and_has_forgotten_a_dialog_learns_of_it_again_or_says_so(
    redirecting: Hub, backup: Callable[[Dsn], Dsn], known: bool
) -> None:
    hub, older = redirecting, backup(redirecting.hub)
    dialog = begin(hub.app, "EWR", "2", to_service="departures")
    assert talk(hub) == ([], ["EWR", "2"])
    hub = replace(hub, hub=older)
    repair(hub, "hub", purged=not known)
    if known:  # the shop has sent the first message again
        assert talk(hub) == ([], [])
        say(hub.app, dialog, "3")
        assert talk(hub) == ([], ["3"])
        assert errors(hub.app) == [None]
    else:
        assert talk(hub)[0] == [ERROR]
        assert errors(hub.app) == [Code.UNRESOLVED]
