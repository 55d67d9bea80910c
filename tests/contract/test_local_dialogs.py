"""Dialogs of two services of one database: by local routes, without a forwarder."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from alembic import command
from psycopg import sql
from psycopg.conninfo import make_conninfo

import saf
from saf.broker.grants import Kind, grant
from saf.broker.migrate import config
from saf.broker.services import create_service
from saf.columns import COLUMNS
from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import DialogEnded, UsageError
from saf.operating.decide import retry
from saf.operating.doctor import examine
from saf.routing.routes import add_route, enable_route
from saf.setaside.selection import DeadLetters
from tests import dialogs
from tests.dialogs import END, ERROR, REFUSES, SHOP, WAREHOUSE, receive, said, states
from tests.pipeline import connect, run
from tests.programs import saf as saf_command
from tests.routing import broker_id

every_postgresql = pytest.mark.every_postgresql


@pytest.fixture
def house(app: Dsn) -> Dsn:
    """One database with both services, a contract, and no route."""
    with connect(app) as connection:
        dialogs.know_contract(connection)
        for service in (SHOP, WAREHOUSE):
            create_service(connection, service)
    return app


def make_local(dsn: Dsn, *services: str) -> None:
    with connect(dsn) as connection:
        for service in services:
            add_route(connection, "here", service=service, local=True)


@pytest.fixture
def local(house: Dsn) -> Dsn:
    """The database, with local routes of both services."""
    make_local(house, SHOP, WAREHOUSE)
    return house


def in_outbox(dsn: Dsn) -> list[int]:
    """The numbers of the dialogs' messages that are left to the forwarder."""
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT sequence FROM saf.outbox ORDER BY id")
    return [number for (number,) in rows]


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    """Answer an order with its double; end with the other end."""
    assert message.dialog is not None
    if message.message_type == END:
        message.dialog.end(connection)
    else:
        message.dialog.send(connection, str(2 * int(message.text())))


@every_postgresql
def test_two_services_of_one_database_talk_to_the_end_without_a_forwarder(local: Dsn) -> None:
    dialog = dialogs.begin(local, "1", "2")
    assert said(receive(local, WAREHOUSE, answer)) == ["1", "2"]
    assert said(receive(local, SHOP)) == ["2", "4"]
    dialogs.end(local, dialog)
    assert said(receive(local, WAREHOUSE, answer)) == [END]
    assert receive(local, SHOP) == []  # dropped: this end has ended
    assert states(local) == ["closed", "closed"]
    assert in_outbox(local) == []


def test_a_message_is_there_if_and_only_if_its_sender_commits(local: Dsn) -> None:
    with connect(local) as connection:
        with suppress(ZeroDivisionError), connection.transaction():
            never = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
            never.send(connection, "never")
            raise ZeroDivisionError
        with connection.transaction():
            dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
            dialog.send(connection, "1")
            assert receive(local, WAREHOUSE) == []
    assert said(receive(local, WAREHOUSE)) == ["1"]


@every_postgresql
def test_a_large_body_travels_in_fragments(local: Dsn) -> None:
    body = bytes(range(256)) * 40
    with connect(local) as connection, connection.transaction():
        dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        dialog.send(connection, io.BytesIO(body), fragment_bytes=1000)
        dialog.send(connection, "after")
    found: list[bytes] = []
    receive(local, WAREHOUSE, lambda _, message: found.append(message.body))
    assert found == [body, b"after"]
    assert in_outbox(local) == []


def test_an_error_reaches_the_other_end_and_overtakes(local: Dsn) -> None:
    dialog = dialogs.begin(local, "1", "2")
    with connect(local) as connection, connection.transaction():
        dialog.end_with_error(connection, 17, "no")
    (error,) = receive(local, WAREHOUSE)
    assert (error.message_type, error.json()) == (ERROR, {"code": 17, "text": "no"})
    assert states(local) == ["closed", "error"]


def test_a_message_that_cannot_be_handled_fails_both_ends(local: Dsn) -> None:
    dialogs.begin(local, "1")
    with saf.receive(local, WAREHOUSE) as delivery:
        delivery.reject(delivery[0], "no")
    (there,), (here,) = receive(local, WAREHOUSE), receive(local, SHOP)
    assert there.json()["code"] == here.json()["code"] == -2
    assert states(local) == ["error", "error"]


def test_a_contract_and_a_lifetime_are_known_at_the_target(local: Dsn) -> None:
    with connect(local) as connection, connection.transaction():
        saf.begin_dialog(
            connection, from_service=SHOP, to_service=WAREHOUSE, contract="ordering", lifetime=600
        ).send(connection, {"amount": 1}, message_type="order")
    (order,) = receive(local, WAREHOUSE)
    assert order.dialog is not None
    assert order.dialog.contract is not None
    assert order.dialog.contract.name == "ordering"
    with connect(local) as connection:
        times = fetch(connection, "SELECT expires_at FROM saf.conversation")
        assert len(set(times)) == 1
        assert None not in times[0]


def test_the_rows_are_those_that_the_forwarder_would_have_stored(
    house: Dsn, new_broker: Any
) -> None:
    other = new_broker("other")
    with connect(other) as connection:
        for service in (SHOP, WAREHOUSE):
            create_service(connection, service)
    make_local(house, SHOP, WAREHOUSE)
    found = []
    for dsn, forwards in ((house, False), (other, True)):
        dialog = dialogs.begin(dsn, "1", "2", lifetime=600)
        if forwards:
            run(dsn, other=dsn)
        receive(dsn, WAREHOUSE, answer)
        dialogs.end(dsn, dialog)
        if forwards:
            run(dsn, other=dsn)
        receive(dsn, WAREHOUSE, answer)
        if forwards:
            run(dsn, other=dsn)
        found.append(_rows(dsn, dialog.conversation_id))
    assert found[0] == found[1]
    assert len(found[0]) == 8  # each end has an Error in advance


def _rows(dsn: Dsn, conversation_id: UUID) -> list[Any]:
    """The rows of a dialog, with this database's own names and times in words."""
    own = {str(broker_id(dsn)): "here", str(conversation_id): "dialog"}
    columns = [c for c in COLUMNS if c not in ("message_id", "created_at", "to_broker")]
    with connect(dsn) as connection:
        rows = fetch(
            connection,
            sql.SQL(
                "SELECT {}, source, to_broker IN (SELECT broker_id FROM saf.broker) FROM saf.inbox "
                "ORDER BY to_service, from_initiator, sequence, id"
            ).format(sql.SQL(", ").join(map(sql.Identifier, columns))),
        )
    as_text = []
    for row in rows:
        text = ["late" if hasattr(value, "year") else str(value) for value in row]
        if row[columns.index("from_initiator")]:
            text[-1] = "any"  # the forwarder's initiator does not know the target's broker
        for name, word in own.items():
            text = [value.replace(name, word) for value in text]
        as_text.append(text)
    return as_text


# From one way to the other


@pytest.mark.parametrize("local_side", [SHOP, WAREHOUSE])
def test_the_side_without_a_local_route_is_served_by_the_forwarder(
    house: Dsn, local_side: str
) -> None:
    make_local(house, local_side)
    dialog = dialogs.begin(house, "1", "2")
    assert in_outbox(house) == ([1, 2] if local_side == SHOP else [])
    run(house, here=house)
    assert said(receive(house, WAREHOUSE, answer)) == ["1", "2"]
    run(house, here=house)
    assert said(receive(house, SHOP)) == ["2", "4"]
    dialogs.end(house, dialog)
    run(house, here=house)
    assert said(receive(house, WAREHOUSE, answer)) == [END]
    run(house, here=house)
    assert receive(house, SHOP) == []
    assert states(house) == ["closed", "closed"]


@pytest.mark.parametrize("received", [False, True])
def test_a_dialog_that_began_by_the_forwarder_goes_on_when_the_route_becomes_local(
    house: Dsn, received: bool
) -> None:
    dialog = dialogs.begin(house, "1")
    run(house, here=house)
    if received:
        assert said(receive(house, WAREHOUSE)) == ["1"]
    dialogs.say(house, dialog, "2")
    run(house, here=house)
    make_local(house, SHOP, WAREHOUSE)
    dialogs.say(house, dialog, "3")
    assert in_outbox(house) == [1, 2]
    assert said(receive(house, WAREHOUSE, answer)) == ["1", "2", "3"][received:]
    assert said(receive(house, SHOP))[-1] == "6"


def test_a_message_that_is_a_dead_letter_on_its_way_is_waited_for(house: Dsn) -> None:
    with connect(house) as connection:
        connection.execute(REFUSES.format(number=2).encode())
    dialog = dialogs.begin(house, "1", "2")
    run(house, here=house)
    assert said(receive(house, WAREHOUSE)) == ["1"]
    make_local(house, SHOP, WAREHOUSE)
    dialogs.say(house, dialog, "3", "4")
    assert said(receive(house, WAREHOUSE)) == []
    with connect(house) as connection:
        connection.execute("DROP TRIGGER refuses ON saf.inbox")
        assert len(retry(connection, DeadLetters(), "mended")) == 1
    run(house, here=house)
    assert said(receive(house, WAREHOUSE)) == ["2", "3", "4"]


def test_order_holds_when_a_route_stops_being_local_and_becomes_local_again(local: Dsn) -> None:
    dialog = dialogs.begin(local, "1")
    for number, enabled in ((2, False), (4, True)):
        with connect(local) as connection:
            enable_route(connection, "here", service=WAREHOUSE, enabled=enabled)
        dialogs.say(local, dialog, str(number), str(number + 1))
        run(local, here=local)
    assert said(receive(local, WAREHOUSE)) == ["1", "2", "3", "4", "5"]
    assert in_outbox(local) == [2, 3]


def test_a_dialog_that_began_here_is_not_led_to_another_database(local: Dsn, mom: Dsn) -> None:
    with connect(mom) as connection:
        create_service(connection, WAREHOUSE)
    dialog = dialogs.begin(local, "1")
    with connect(local) as connection:
        enable_route(connection, "here", service=WAREHOUSE, enabled=False)
        add_route(connection, "mom", service=WAREHOUSE)
    dialogs.say(local, dialog, "2")
    run(local, here=local, mom=mom)
    assert said(receive(mom, WAREHOUSE)) == []
    assert said(receive(local, WAREHOUSE)) == ["1", "2"]


@pytest.fixture
def with_mom(house: Dsn, mom: Dsn) -> Dsn:
    """The database, with a route of one of its services to another database."""
    with connect(mom) as connection:
        create_service(connection, WAREHOUSE)
    with connect(house) as connection:
        add_route(connection, "mom", service=WAREHOUSE)
    return house


def test_a_dialog_with_the_service_of_another_database_stays_with_it(
    with_mom: Dsn, mom: Dsn
) -> None:
    by_route = dialogs.begin(with_mom, "1")
    run(with_mom, here=with_mom, mom=mom)
    receive(mom, WAREHOUSE, answer)
    run(mom, here=with_mom)
    assert said(receive(with_mom, SHOP)) == ["2"]
    make_local(with_mom, SHOP, WAREHOUSE)
    dialogs.begin(with_mom, "10", to_broker=broker_id(mom))
    dialogs.say(with_mom, by_route, "2")
    run(with_mom, here=with_mom, mom=mom)
    assert receive(with_mom, WAREHOUSE) == []
    assert sorted(said(receive(mom, WAREHOUSE, answer)), key=int) == ["2", "10"]
    run(mom, here=with_mom)
    assert sorted(said(receive(with_mom, SHOP)), key=int) == ["4", "20"]


def test_a_route_does_not_become_local_while_a_dialog_s_target_is_unknown(
    with_mom: Dsn, mom: Dsn
) -> None:
    dialog = dialogs.begin(with_mom, "1")
    run(with_mom, here=with_mom, mom=mom)
    with pytest.raises(UsageError, match=rf"1 open dialogs with .* {dialog.handle}.*answered"):
        make_local(with_mom, WAREHOUSE)
    dialogs.say(with_mom, dialog, "2")
    run(with_mom, here=with_mom, mom=mom)
    assert said(receive(mom, WAREHOUSE, answer)) == ["1", "2"]
    run(mom, here=with_mom)
    receive(with_mom, SHOP)
    make_local(with_mom, WAREHOUSE)


def test_a_first_message_that_is_sent_again_does_not_begin_the_dialog_here(house: Dsn) -> None:
    dialogs.begin(house, "1", "2")
    run(house, here=house)
    make_local(house, SHOP, WAREHOUSE)
    with connect(house) as connection:
        connection.execute("UPDATE saf.conversation SET far_broker = NULL")
    columns = ", ".join(COLUMNS)
    with connect(house) as connection:
        connection.execute(
            f"INSERT INTO saf.outbox ({columns}) SELECT {columns} FROM saf.outbox "
            "WHERE sequence = 1".encode()
        )
    assert in_outbox(house) == [1, 2, 1]


def test_a_monolog_goes_by_the_forwarder(local: Dsn) -> None:
    with connect(local) as connection, connection.transaction():
        saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE).send(connection, "1")
    assert in_outbox(local) == [1]


# Rights and revisions


@pytest.fixture
def talker(local: Dsn) -> Iterator[Dsn]:
    """A login that may have dialogs, and has no right on the inbox."""
    name = f"talker_{local.database}"
    with connect(local) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        grant(owner, name, [Kind.WRITER, Kind.DIALOG])
        yield Dsn(make_conninfo(local.conninfo, user=name))
        owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
        owner.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@every_postgresql
def test_a_role_for_dialogs_needs_no_right_on_the_inbox_to_talk(local: Dsn, talker: Dsn) -> None:
    dialog = dialogs.begin(talker, "1")
    dialogs.say(talker, dialog, "2")
    with (
        connect(talker) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="inbox"),
    ):
        connection.execute("SELECT body FROM saf.inbox")
    assert said(receive(local, WAREHOUSE)) == ["1", "2"]


def test_routes_that_are_local_before_the_upgrade_carry_dialogs_after_it(local: Dsn) -> None:
    command.downgrade(config(local), "0040")
    with connect(local) as connection:
        triggers = (
            "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname LIKE 'outbox_local_%'"
        )
        assert all("from_initiator" not in one for (one,) in fetch(connection, triggers))
        connection.execute("INSERT INTO saf.outbox (to_service, body) VALUES ('shop', 'x')")
    assert in_outbox(local) == []
    command.upgrade(config(local), "head")
    dialogs.begin(local, "1")
    assert said(receive(local, WAREHOUSE)) == ["1"]
    assert in_outbox(local) == []


def test_an_end_that_is_over_sends_nothing_more(local: Dsn) -> None:
    dialog = dialogs.begin(local, "1")
    dialogs.end(local, dialog)
    with pytest.raises(DialogEnded):
        dialogs.say(local, dialog, "2")


def test_the_doctor_names_a_route_that_dialogs_lack_in_one_direction(
    house: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    file = tmp_path / "saf.toml"
    place = f"dsn = {json.dumps(house.conninfo)}\n"
    elsewhere = f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
    file.write_text(f"[brokers.app]\n{place}{elsewhere}")

    def cures() -> list[str]:
        found = [one for one in examine(load(file)) if one.check == "local"]
        assert all("no route leads messages for 'shop'" in one.what for one in found if one.what)
        return [one.cure for one in found if one.severity == "error"]

    make_local(house, WAREHOUSE)
    assert cures() == []
    dialogs.begin(house, "1")
    make = "saf route add here --service shop --local --broker app"
    assert cures() == [make]
    assert said(receive(house, WAREHOUSE, answer)) == ["1"]
    # messages that wait come first: the other command would be refused
    (cure,) = cures()
    assert cure.endswith(f"saf route remove HERE --service shop --broker app and {make}")
    here = f"[destinations.HERE]\n{place}[destinations.here]\n{place}"
    file.write_text(f"{file.read_text()}{here}")
    (add,) = re.findall("(route add HERE .*?),", cure)
    for words in (add, "forward"):
        done = saf_command(*words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert cures() == [], "the forwarder carries them"
    assert said(receive(house, SHOP)) == ["2"]
    for words in cure[cure.index("route remove") :].split(" and saf "):
        done = saf_command(*words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert cures() == []
    dialogs.begin(house, "3")
    assert said(receive(house, WAREHOUSE, answer)) == ["3"]
    assert said(receive(house, SHOP)) == ["6"]
