"""Signed dialogs: each end refuses what the other end has not said, and nothing that it has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import saf
from saf.broker.grants import Kind, grant
from saf.columns import COLUMNS
from saf.database import Dsn, fetch
from saf.operating import decide
from saf.routing.routes import add_route, add_topic
from saf.setaside.selection import DeadLetters
from tests import dialogs
from tests.dialogs import END, ERROR, SHOP, TIMER, WAREHOUSE, forward, prepare, put, said, states
from tests.hub import Hub
from tests.pipeline import connect, let_time_pass, run
from tests.signing import ED25519, HMAC, key, signer

KEYS = {"shop-1": key(), "warehouse-1": key(ED25519)}
OF_SHOP, OF_WAREHOUSE = signer(HMAC, "shop-1"), signer(ED25519, "warehouse-1")
REQUIRED: dict[str, Any] = {"require_signed": True, "keys": KEYS}


@pytest.fixture(autouse=True)
def prepared(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def begin(app: Dsn, *bodies: object, **options: Any) -> saf.Dialog:
    return dialogs.begin(app, *bodies, **{"signer": OF_SHOP, **options})


def at_shop(app: Dsn, handle: dialogs.Handle | None = None) -> list[saf.Received]:
    return dialogs.receive(app, SHOP, handle, signer=OF_SHOP, **REQUIRED)


def at_warehouse(mom: Dsn, handle: dialogs.Handle | None = None) -> list[saf.Received]:
    return dialogs.receive(mom, WAREHOUSE, handle, signer=OF_WAREHOUSE, **REQUIRED)


def refused(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        return [one.reason for one in DeadLetters().rows(connection)]


def alter(dsn: Dsn, change: str) -> None:
    with connect(dsn) as connection:
        assert connection.execute(f"UPDATE saf.inbox SET {change}".encode()).rowcount


@pytest.mark.every_postgresql
def test_a_dialog_is_signed_from_its_first_message_to_its_end_in_both_directions(
    app: Dsn, mom: Dsn
) -> None:
    def reply(connection: Any, message: saf.Received) -> None:
        assert message.dialog is not None
        assert message.signed_by == "shop-1"
        if message.message_type == END:
            message.dialog.end(connection)
        else:
            message.dialog.send(connection, f"{message.text()}!", headers={"n": 1e3})

    with connect(mom) as connection:
        ((broker,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    talk = begin(app, "1", "2", lifetime=3600, to_broker=broker)
    forward(app, mom)
    assert said(at_warehouse(mom, reply)) == ["1", "2"]
    forward(app, mom)
    answers = at_shop(app)
    assert said(answers) == ["1!", "2!"]
    assert {one.signed_by for one in answers} == {"warehouse-1"}
    with app.connect(role="test") as connection:
        saf.open_dialog(connection, talk.handle, signer=OF_SHOP).end(connection)
    forward(app, mom)
    assert said(at_warehouse(mom, reply)) == [END]
    forward(app, mom)
    assert at_shop(app) == []
    assert refused(app) == refused(mom) == []
    assert states(app) == states(mom) == ["closed"]


@pytest.mark.parametrize(
    "change",
    [
        "body = '9'",
        "conversation_id = gen_random_uuid()",
        "from_initiator = false",
        "sequence = 1",
        "sequence = 3",
        "key = 'x'",
        f"message_type = '{END}'",
        "from_service = 'bank'",
        """headers = jsonb_set(headers, '{saf-dialog}', '{"lifetime_seconds": 1}')""",
    ],
)
def test_what_was_altered_is_refused_and_the_dialog_waits_for_what_was_said(
    app: Dsn, mom: Dsn, change: str
) -> None:
    talk = begin(app, "1", "2", "3")
    forward(app, mom)
    with connect(mom) as connection:
        (kept,) = fetch(
            connection,
            "SELECT body, conversation_id, from_initiator, sequence, key, message_type, "
            "from_service, headers::text FROM saf.inbox WHERE body = '2'",
        )
        ((message_id,),) = fetch(connection, "SELECT message_id FROM saf.inbox WHERE body = '2'")
        connection.execute(
            f"UPDATE saf.inbox SET {change} WHERE message_id = %s".encode(), [message_id]
        )
    assert said(at_warehouse(mom)) == ["1"]
    assert refused(mom) == ["altered"]
    assert states(mom) == ["conversing"]
    with connect(mom) as connection:  # a person finds out what it was
        connection.execute(
            "UPDATE saf.dead_letter SET (body, conversation_id, from_initiator, sequence, key, "
            "message_type, from_service, headers) = (%s, %s, %s, %s, %s, %s, %s, %s)",
            kept,
        )
        decide.retry(connection, DeadLetters(), "mended")
    assert said(at_warehouse(mom)) == ["2", "3"]
    assert talk.conversation_id


def test_a_forged_message_does_nothing_to_the_dialog_that_it_names(app: Dsn, mom: Dsn) -> None:
    talk = begin(app, "1")
    forward(app, mom)
    put(mom, talk, 1, "forged")  # before the true one is received
    put(mom, talk, 2, "forged")
    put(mom, talk, 2, "", message_type=END)
    put(mom, talk, 2, '{"code": 7, "text": "an application\'s"}', message_type=ERROR)
    put(mom, talk, 2, '{"code": -1, "text": "over", "pay": 9}', message_type=ERROR)
    put(mom, talk, 2, '{"code": -1}', message_type=ERROR)
    put(mom, talk, 2, "half", headers='{"saf-fragment": 1}')
    put(mom, saf_dialog(talk), 1, "begins")
    assert said(at_warehouse(mom)) == ["1"]
    assert refused(mom) == ["unsigned"] * 8
    assert states(mom) == ["conversing"]
    with app.connect(role="test") as connection:
        talk.send(connection, "2")
    forward(app, mom)
    assert said(at_warehouse(mom)) == ["2"]


def saf_dialog(talk: saf.Dialog) -> saf.Dialog:
    """The end of a dialog that nobody has begun."""
    from dataclasses import replace

    return replace(talk, conversation_id=uuid4())


def test_an_end_that_an_unsigned_program_says_is_refused_but_the_errors_of_saf_are_not(
    app: Dsn, mom: Dsn
) -> None:
    unsigned = begin(app, "1", lifetime=3600)
    expired = begin(app, "1", lifetime=1800)
    forward(app, mom)
    assert len(at_warehouse(mom)) == 2
    with app.connect(role="test") as connection:
        saf.open_dialog(connection, unsigned.handle).end(connection)
    let_time_pass(app)
    let_time_pass(mom)
    forward(app, mom)
    assert set(said(at_warehouse(mom))) == {ERROR}  # both lifetimes are over
    assert refused(mom) == ["unsigned"]
    assert expired.signer is OF_SHOP


def test_timers_and_errors_that_an_end_says_to_itself_are_taken(app: Dsn, mom: Dsn) -> None:
    talk = begin(app, "1")
    with app.connect(role="test") as connection:
        talk.start_timer(connection, 0)
    assert said(at_shop(app)) == [TIMER]
    forward(app, mom)

    worker = saf.Worker(
        mom, WAREHOUSE, policy=saf.Policy(max_attempts=1), signer=OF_WAREHOUSE, **REQUIRED
    )
    worker.handler()(lambda *_: 1 / 0)
    worker.drain()
    forward(app, mom)
    (error,) = at_shop(app)
    assert error.json()["code"] == -2
    assert error.signed_by == "warehouse-1"
    assert refused(mom) == ["failed", "failed"]


def test_an_applications_error_is_signed(app: Dsn, mom: Dsn) -> None:
    talk = begin(app, "1")
    with app.connect(role="test") as connection:
        talk.end_with_error(connection, 7, "changed our mind")
    forward(app, mom)
    (error,) = [one for one in at_warehouse(mom) if one.message_type == ERROR]
    assert error.signed_by == "shop-1"
    assert refused(mom) == []


# Large bodies

LARGE = bytes(range(256)) * 40


def large(app: Dsn, **options: Any) -> saf.Dialog:
    talk = begin(app, **options)
    with app.connect(role="test") as connection:
        talk.send(connection, LARGE, fragment_bytes=1000, headers={"n": 1.50})
    return talk


def test_a_body_in_fragments_is_verified_piece_by_piece(app: Dsn, mom: Dsn) -> None:
    large(app)
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE, max_messages=4, **REQUIRED) as delivery:
        (message,) = delivery
        assert message.body == LARGE
        assert message.signed_by == "shop-1"
    assert refused(mom) == []


@pytest.mark.parametrize("which", [1, 5, 11])
def test_an_altered_fragment_is_refused_and_the_body_is_whole_when_it_is_mended(
    app: Dsn, mom: Dsn, which: int
) -> None:
    large(app)
    forward(app, mom)
    alter(mom, f"body = set_byte(body, 3, 99) WHERE sequence = {which}")
    assert at_warehouse(mom) == []
    assert refused(mom) == ["altered"]
    with connect(mom) as connection:
        mended = LARGE[(which - 1) * 1000 + 3]
        connection.execute("UPDATE saf.dead_letter SET body = set_byte(body, 3, %s)", [mended])
        decide.retry(connection, DeadLetters(), "mended")
    received: list[bytes] = []
    at_warehouse(mom, lambda _, message: received.append(message.body))
    assert received == [LARGE]
    assert refused(mom) == []


def test_fragments_that_come_too_early_are_verified_when_their_turn_comes(
    app: Dsn, mom: Dsn
) -> None:
    large(app)
    forward(app, mom)
    columns = f"{', '.join(COLUMNS)}, source"
    with connect(mom) as connection:
        connection.execute(
            f"CREATE TABLE kept AS SELECT {columns} FROM saf.inbox WHERE sequence = 1".encode()
        )
        connection.execute("DELETE FROM saf.inbox WHERE sequence = 1")
    assert at_warehouse(mom) == []
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.fragment") == [(9,)]
        connection.execute(f"INSERT INTO saf.inbox ({columns}) SELECT {columns} FROM kept".encode())
    received: list[bytes] = []
    at_warehouse(mom, lambda _, message: received.append(message.body))
    assert received == [LARGE]
    assert refused(mom) == []


def test_a_forged_fragment_does_not_take_the_place_of_a_true_one(app: Dsn, mom: Dsn) -> None:
    talk = large(app)
    for sequence in (1, 2, 3):
        put(mom, talk, sequence, b"x" * 1000, headers='{"saf-fragment": 1, "saf-dialog": {}}')
    forward(app, mom)
    received: list[bytes] = []
    at_warehouse(mom, lambda _, message: received.append(message.body))
    assert received == [LARGE]
    assert refused(mom) == ["unsigned"] * 3


def test_the_roles_of_receivers_and_of_dialogs_have_the_rights_for_it(app: Dsn, mom: Dsn) -> None:
    role = f"signing_{app.database}"
    with connect(mom) as owner, connect(app) as other:
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            grant(owner, role, [Kind("receiver"), Kind("dialog")])
            grant(other, role, [Kind("receiver"), Kind("dialog")])
            shop, warehouse = (Dsn(make_conninfo(dsn.conninfo, user=role)) for dsn in (app, mom))
            talk = large(shop)
            forward(app, mom)
            alter(mom, "body = 'x' WHERE sequence = 2")
            assert at_warehouse(warehouse) == []
            assert refused(mom) == ["altered"]
            with shop.connect(role="test") as connection:
                talk.end_with_error(connection, 7, "start again")
            begin(shop, "again")
            forward(app, mom)

            def reply(connection: Any, message: saf.Received) -> None:
                assert message.dialog is not None
                if message.message_type is None:
                    message.dialog.send(connection, "yes")

            assert set(said(at_warehouse(warehouse, reply))) == {"again", ERROR}
            forward(app, mom)
            assert said(at_shop(shop)) == ["yes"]
        finally:
            for one in (owner, other):
                one.execute(f"DROP OWNED BY {role}".encode())
            owner.execute(f"DROP ROLE {role}".encode())


# Monologs and routing services


def test_a_monolog_is_signed(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        add_topic(connection, "prices")
        add_route(connection, "mom", service="prices")
    with connect(mom) as connection:
        saf.create_service(connection, "prices")
    with app.connect(role="test") as connection:
        talk = saf.begin_monolog(connection, from_service=SHOP, topic="prices", signer=OF_SHOP)
        for body in ("1", "2"):
            talk.send(connection, body)
        talk.end(connection)
    run(app, mom=mom)
    alter(mom, "sequence = 3 WHERE sequence = 2")
    received = dialogs.receive(mom, "prices", **REQUIRED)
    assert said(received) == ["1", END]
    assert {one.signed_by for one in received} == {"shop-1"}
    assert refused(mom) == ["altered"]


def test_a_routing_service_verifies_and_signs_what_it_sends_on(
    new_broker: Callable[[str], Dsn],
) -> None:
    hub = Hub.at(new_broker)
    of_hub = signer(key_id="hub-1")
    keys = {**KEYS, "hub-1": key()}
    with hub.app.connect(role="test") as connection:
        saf.Outbox(signer=OF_SHOP).send(connection, "departures", "EWR", headers={"n": 1e3})
        saf.Outbox().send(connection, "departures", "JFK")
        saf.begin_dialog(
            connection, from_service=SHOP, to_service="departures", signer=OF_SHOP
        ).send(connection, "EWR")
    hub.forward()
    hub.service(require_signed=True, keys=keys, signer=of_hub).drain()
    hub.forward()

    def reply(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        if message.dialog is not None:
            message.dialog.send(connection, "landed")

    received = dialogs.receive(
        hub.ewr, "EWR", reply, require_signed=True, keys=keys, signer=OF_WAREHOUSE
    )
    assert [(one.text(), one.signed_by) for one in received] == [("EWR", "hub-1")] * 2
    assert dialogs.receive(hub.jfk, "JFK") == []
    assert refused(hub.hub) == ["unsigned"]
    hub.forward()
    hub.service(require_signed=True, keys=keys, signer=of_hub).drain()
    hub.forward()
    (answer,) = dialogs.receive(hub.app, SHOP, require_signed=True, keys=keys)
    assert (answer.text(), answer.signed_by) == ("landed", "hub-1")


def test_without_a_signer_a_routing_service_sends_on_no_signature_that_is_not_its_own(
    new_broker: Callable[[str], Dsn],
) -> None:
    hub = Hub.at(new_broker)
    with hub.app.connect(role="test") as connection:
        saf.Outbox(signer=OF_SHOP).send(connection, "departures", "EWR")
    hub.carry()
    (message,) = dialogs.receive(hub.ewr, "EWR", keys=KEYS)
    assert "saf-signature" not in json.dumps(message.headers)
