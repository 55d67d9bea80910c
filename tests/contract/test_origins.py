"""Origins: behind a routing service, a target verifies who has sent a message first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4, uuid5

import psycopg
import pytest
from psycopg.rows import dict_row

import saf
from saf.broker.services import create_service, create_subscription
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.message import Row
from saf.operating import decide
from saf.routing.routers import add_router
from saf.routing.routes import add_route
from saf.routing_service import RoutingService
from saf.setaside.selection import DeadLetters
from tests import dialogs
from tests.dialogs import END, ERROR, SHOP, begin, end, said, say, states
from tests.hub import DEPARTURES, QUICKLY, Hub
from tests.pipeline import connect
from tests.signing import ED25519, HMAC, PUBLIC, SECRET, signer

OF_SHOP, OF_EWR, OF_HUB = signer(), signer(ED25519, "ewr-1"), signer(key_id="hub-1")
KEYS = {
    "shop-1": saf.Key(HMAC, SECRET, from_services=[SHOP]),
    "ewr-1": saf.Key(ED25519, PUBLIC, from_services=["EWR"]),
    "hub-1": saf.Key(HMAC, SECRET, from_services=[DEPARTURES]),
}
ORIGIN: dict[str, Any] = {
    "require_signed": "origin",
    "keys": saf.Keys(KEYS, redirected_from=[DEPARTURES, "second"]),
}
LARGE = bytes(range(256)) * 40


@pytest.fixture
def hub(new_broker: Callable[[str], Dsn]) -> Hub:
    return Hub.at(new_broker)


def ask(hub: Hub, *bodies: object, **options: Any) -> saf.Dialog:
    return begin(hub.app, *bodies, **{"to_service": DEPARTURES, "signer": OF_SHOP, **options})


def send(hub: Hub, body: object = "EWR", **options: Any) -> UUID:
    with hub.app.connect(role="test") as connection:
        return saf.Outbox(from_service=SHOP, signer=OF_SHOP).send(
            connection, DEPARTURES, body, **options
        )


def carry(hub: Hub, **options: Any) -> None:
    hub.forward()
    hub.service(**options).drain()
    hub.forward()


def at_ewr(hub: Hub, handle: dialogs.Handle | None = None, **options: Any) -> list[saf.Received]:
    return dialogs.receive(hub.ewr, "EWR", handle, **{"signer": OF_EWR, **ORIGIN, **options})


def at_shop(hub: Hub, handle: dialogs.Handle | None = None) -> list[saf.Received]:
    return dialogs.receive(hub.app, SHOP, handle, signer=OF_SHOP, **ORIGIN)


def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    assert message.dialog is not None
    if message.message_type is None:
        message.dialog.send(connection, f"got {message.text()}")


def refused(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        return [one.reason for one in DeadLetters().rows(connection)]


def alter(dsn: Dsn, change: str) -> None:
    with connect(dsn) as connection:
        assert connection.execute(f"UPDATE saf.inbox SET {change}".encode()).rowcount


def headers(dsn: Dsn) -> list[dict[str, Any]]:
    with connect(dsn) as connection:
        rows = fetch(connection, "SELECT headers FROM saf.inbox ORDER BY id")
    return [one for (one,) in rows]


def sign_again(dsn: Dsn, where: str) -> None:
    """What a routing service does that somebody else has taken over: sign what it has altered."""
    with connect(dsn) as connection, connection.cursor(row_factory=dict_row) as cursor:
        for row in cursor.execute(f"SELECT * FROM saf.inbox WHERE {where}".encode()).fetchall():
            kept = {n: value for n, value in row["headers"].items() if n != "saf-signature"}
            sent = Row(**{name: row[name] for name in Row._fields if name != "headers"}, headers="")
            signed = OF_HUB.sign(
                sent._replace(headers=json.dumps(kept), deliver_at=None),
                conversation_id=row["conversation_id"] and str(row["conversation_id"]),
                from_initiator=row["from_initiator"],
                sequence=row["sequence"],
            )
            connection.execute(
                "UPDATE saf.inbox SET headers = %s::jsonb WHERE id = %s",
                [signed.headers, row["id"]],
            )


# What arrives


@pytest.mark.parametrize("of_hub", [None, OF_HUB])
def test_both_ends_of_a_dialog_verify_each_other_behind_a_routing_service(
    hub: Hub, of_hub: saf.Signer | None
) -> None:
    dialog = ask(hub, "EWR", "2", lifetime=3600)
    carry(hub, signer=of_hub)
    heard = at_ewr(hub, answer)
    assert said(heard) == ["EWR", "2"]
    assert {one.signed_by for one in heard} == {of_hub and "hub-1"}
    assert [one.origin for one in heard] == [
        saf.Origin(
            signed_by="shop-1",
            service=SHOP,
            message_id=cast("saf.Origin", one.origin).message_id,
            conversation_id=dialog.conversation_id,
            routers=(DEPARTURES,),
        )
        for one in heard
    ]
    carry(hub, signer=of_hub)
    answers = at_shop(hub)
    assert said(answers) == ["got EWR", "got 2"]
    for one in answers:
        assert one.origin is not None
        assert (one.origin.signed_by, one.origin.service) == ("ewr-1", "EWR")
        assert one.origin.conversation_id == heard[0].conversation_id
    with hub.app.connect(role="test") as connection:
        saf.open_dialog(connection, dialog.handle, signer=OF_SHOP).end(connection)
    carry(hub, signer=of_hub)

    def end_too(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        message.dialog.end(connection)

    (last,) = at_ewr(hub, end_too)
    assert (last.message_type, cast("saf.Origin", last.origin).signed_by) == (END, "shop-1")
    carry(hub, signer=of_hub)
    assert at_shop(hub) == []
    assert states(hub.app) == states(hub.ewr) == ["closed"]
    assert refused(hub.app) == refused(hub.hub) == refused(hub.ewr) == []


def test_a_wait_requires_the_signature_of_who_has_answered(hub: Hub) -> None:
    dialog = ask(hub, "EWR")
    carry(hub)
    at_ewr(hub, answer)
    carry(hub)
    assert dialog.wait(hub.app, timeout=0, keys=ORIGIN["keys"]) is None, "the hub has not signed"
    assert refused(hub.app) == ["unsigned"]
    with connect(hub.app) as connection:
        decide.retry(connection, DeadLetters(), "the hub need not")
    found = dialog.wait(hub.app, timeout=5, keys=ORIGIN["keys"], require_signed="origin")
    assert found is not None
    assert (found.text(), cast("saf.Origin", found.origin).signed_by) == ("got EWR", "ewr-1")


@pytest.mark.parametrize("of_hub", [None, OF_HUB])
def test_messages_outside_of_dialogs_have_their_senders_signature_whatever_is_in_them(
    hub: Hub, of_hub: saf.Signer | None
) -> None:
    soon = datetime.now(UTC) + timedelta(hours=2, microseconds=7)
    odd = {"total": 1.50, "saf-hops": "many", "Zeta": [1e300, None, {"a": ""}], "ü": "好"}
    sent = [
        send(hub),
        send(hub, headers=odd, key="好", message_type="Größe", expires_at=soon),
        send(hub, deliver_at=datetime.now(UTC) - timedelta(days=400)),
    ]
    with hub.app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=DEPARTURES, signer=OF_SHOP)
        monolog.send(connection, "EWR")
    carry(hub, signer=of_hub)
    heard = at_ewr(hub)
    assert refused(hub.ewr) == []
    origins = [cast("saf.Origin", one.origin) for one in heard]
    assert {(one.signed_by, one.service, one.routers) for one in origins} == {
        ("shop-1", SHOP, (DEPARTURES,))
    }
    assert {*sent} < {one.message_id for one in origins}
    assert {one.signed_by for one in heard} == {of_hub and "hub-1"}
    assert [one.conversation_id for one in origins if one.conversation_id] == [
        monolog.conversation_id
    ]


def test_a_message_that_no_routing_service_has_passed_on_is_its_own_origin(hub: Hub) -> None:
    with connect(hub.app) as connection:
        add_route(connection, "ewr", service="EWR")
    with hub.app.connect(role="test") as connection:
        outbox = saf.Outbox(from_service=SHOP, signer=OF_SHOP)
        sent = outbox.send(connection, "EWR", "1")
        saf.Outbox(from_service=SHOP).send(connection, "EWR", "2")
    hub.forward()
    (heard,) = at_ewr(hub)
    assert (heard.message_id, heard.signed_by) == (sent, "shop-1")
    assert heard.origin == saf.Origin(
        signed_by="shop-1", service=SHOP, message_id=sent, conversation_id=None
    )
    assert refused(hub.ewr) == ["unsigned"]


@pytest.mark.parametrize("kind", ["a dialog", "a message"])
def test_a_chain_of_routing_services_passes_the_first_signature_on(hub: Hub, kind: str) -> None:
    with connect(hub.hub) as connection:
        create_service(connection, "second")
        add_router(
            connection, DEPARTURES, "python", "tests.classifiers:to_the_second", mode="forward"
        )
        add_router(connection, "second", "python", "tests.classifiers:to_ewr", mode="forward")
        connection.execute("DELETE FROM saf.route WHERE service = 'EWR'")
        add_route(connection, "hub", service="second")
        add_route(connection, "ewr", service="EWR")
    dialog = ask(hub, "1", "2") if kind == "a dialog" else None
    if dialog is None:
        send(hub, "1", key="A-1")
        send(hub, "2", key="A-1")

    def carry_all(*names: str) -> None:
        hub.forward()
        for name in names:
            RoutingService(hub.hub, name, policy=QUICKLY, signer=OF_HUB).drain()
            hub.forward()

    keys = saf.Keys(
        {**KEYS, "hub-1": saf.Key(HMAC, SECRET, from_services=[DEPARTURES, "second"])},
        redirected_from=[DEPARTURES, "second"],
    )
    carry_all(DEPARTURES, "second")
    assert at_ewr(hub, keys=saf.Keys(dict(keys), redirected_from=[DEPARTURES])) == []
    with connect(hub.ewr) as connection:
        assert len(decide.retry(connection, DeadLetters(), "named now")) == 2
    heard = at_ewr(hub, answer if dialog else None, keys=keys)
    assert said(heard) == ["1", "2"]
    for one in heard:
        assert one.origin is not None
        assert (one.origin.signed_by, one.origin.routers) == ("shop-1", (DEPARTURES, "second"))
        assert one.signed_by == "hub-1"
    if dialog is None:
        return
    with hub.app.connect(role="test") as connection:
        saf.open_dialog(connection, dialog.handle, signer=OF_SHOP).end_with_error(
            connection, 17, "over"
        )
    carry_all("second", DEPARTURES)
    answers = at_shop(hub)
    assert said(answers) == []
    carry_all(DEPARTURES, "second")
    (error,) = at_ewr(hub, keys=keys)
    assert error.json()["text"] == "router 'second': router 'departures': over"
    assert cast("saf.Origin", error.origin).signed_by == "shop-1"
    assert refused(hub.ewr) == []


def test_answers_return_by_a_chain_of_routing_services_with_their_signature(hub: Hub) -> None:
    with connect(hub.hub) as connection:
        create_service(connection, "second")
        add_router(
            connection, DEPARTURES, "python", "tests.classifiers:to_the_second", mode="forward"
        )
        add_router(connection, "second", "python", "tests.classifiers:to_ewr", mode="forward")
        add_route(connection, "hub", service="second")
    ask(hub, "1")
    for name in (DEPARTURES, "second"):
        hub.forward()
        RoutingService(hub.hub, name, policy=QUICKLY).drain()
    hub.forward()
    at_ewr(hub, answer)
    for name in ("second", DEPARTURES):
        hub.forward()
        RoutingService(hub.hub, name, policy=QUICKLY).drain()
    hub.forward()
    (heard,) = at_shop(hub)
    assert heard.text() == "got 1"
    assert cast("saf.Origin", heard.origin).routers == ("second", DEPARTURES)


# Errors


@pytest.mark.parametrize("failing", ["the shop", "the airport"])
def test_an_applications_error_is_verified_with_the_text_that_routers_have_made_of_it(
    hub: Hub, failing: str
) -> None:
    dialog = ask(hub, "EWR", "not received")
    carry(hub)
    with saf.receive(hub.ewr, "EWR", max_messages=1, signer=OF_EWR, **ORIGIN) as delivery:
        (heard,) = delivery
    here = replace(dialog, signer=OF_SHOP)
    assert heard.dialog is not None
    first, second = ((hub.app, here), (hub.ewr, heard.dialog))[:: 1 - 2 * (failing != "the shop")]
    with first[0].connect(role="test") as connection:
        first[1].end_with_error(connection, 17, "no such flight\0")
    carry(hub)
    where = hub.ewr if failing == "the shop" else hub.app
    with connect(where) as connection:
        ((kept,),) = fetch(connection, f"SELECT body FROM saf.inbox WHERE message_type = '{ERROR}'")
        connection.execute(
            "UPDATE saf.inbox SET body = convert_to(replace(convert_from(body, 'UTF8'), 'flight', "
            f"'train'), 'UTF8') WHERE message_type = '{ERROR}'".encode()
        )
    receive = at_ewr if failing == "the shop" else at_shop
    assert ERROR not in said(receive(hub))
    assert refused(where) == ["altered"]
    with connect(where) as connection:
        connection.execute("UPDATE saf.dead_letter SET body = %s", [kept])
        decide.retry(connection, DeadLetters(), "mended")
    (error,) = receive(hub)
    assert error.json()["original"] == {"code": 17, "text": "no such flight�"}
    assert cast("saf.Origin", error.origin).service == (SHOP if failing == "the shop" else "EWR")
    assert second[1].service == error.service


def test_errors_of_saf_itself_are_taken_though_nobody_has_signed_them(hub: Hub) -> None:
    unresolved, expired = ask(hub, "LGA"), ask(hub, "EWR", lifetime=60)
    carry(hub)
    assert said(at_ewr(hub)) == ["EWR"]
    worker = saf.Worker(hub.ewr, "EWR", policy=saf.Policy(max_attempts=1), **ORIGIN)
    worker.handler()(lambda *_: 1 / 0)
    say(hub.app, expired, "2")
    carry(hub)
    worker.drain()
    carry(hub)
    errors = {one.dialog: one.json()["code"] for one in at_shop(hub)}
    assert errors == {unresolved: -5, expired: -2}
    assert refused(hub.app) == []


def test_an_end_that_its_router_says_closes_only_an_end_that_has_ended(hub: Hub) -> None:
    ended, still_open = ask(hub, "EWR"), ask(hub, "EWR")
    carry(hub)
    heard = at_ewr(hub)
    end(hub.app, replace(ended, signer=OF_SHOP))
    with hub.ewr.connect(role="test") as connection:
        for one in heard:
            assert one.dialog is not None
            assert one.origin is not None
            if one.origin.conversation_id == still_open.conversation_id:
                saf.open_dialog(connection, one.dialog.handle).end(connection)  # not signed
    carry(hub)
    assert at_shop(hub) == []
    assert refused(hub.app) == ["unsigned"]
    with connect(hub.app) as connection:
        found = {one.conversation_id: one.state for one in saf.conversations(connection)}
    assert found == {
        ended.conversation_id: "closed", still_open.conversation_id: "conversing",
    }  # fmt: skip


# What was altered

IN_ENVELOPE = "headers = jsonb_set(headers, '{{saf-origin,{0}}}', '{1}')"
ALTERED = {
    "body": "body = 'JFK'",
    "an empty body": "body = ''",
    "message_type": "message_type = 'delivery'",
    "from_service": "from_service = 'bank'",
    "key": "key = 'x'",
    "another broker": "to_broker = gen_random_uuid()",
    "a header": """headers = headers || '{"total": 91}'""",
    "the form of a number": """headers = headers || '{"total": 90.0}'""",
    "a header more": """headers = headers || '{"admin": true}'""",
    "a header less": "headers = headers - 'total'",
    "the version of an event": """headers = headers || '{"saf-type-version": 2}'""",
    "the sender": IN_ENVELOPE.format("from_service", '"bank"'),
    "no sender": "headers = headers #- '{saf-origin,from_service}'",
    "the first id": IN_ENVELOPE.format("message_id", f'"{uuid4()}"'),
    "no id": "headers = headers #- '{saf-origin,message_id}'",
    "an id that is none": IN_ENVELOPE.format("message_id", '"7"'),
    "a broker": IN_ENVELOPE.format("to_broker", f'"{uuid4()}"'),
    "the first headers": IN_ENVELOPE.format("headers", '{"total": 90}'),
    "a header of saf": IN_ENVELOPE.format("headers", '{"saf-hops": 7}'),
    "no routers": IN_ENVELOPE.format("by", "[]"),
    "a router more": IN_ENVELOPE.format("by", '["departures", "second"]'),
    "another router": IN_ENVELOPE.format("by", '["second"]'),
    "routers that are none": IN_ENVELOPE.format("by", "[1]"),
    "what nobody knows": IN_ENVELOPE.format("more", "1"),
    "no signature": "headers = headers #- '{saf-origin,signature}'",
    "the signature": IN_ENVELOPE.format("signature,value", '"AAAA"'),
    "its key": IN_ENVELOPE.format("signature,key", '"ewr-1"'),
    "its service": IN_ENVELOPE.format("signature,to", '"second"'),
    "its version": IN_ENVELOPE.format("signature,version", "2"),
    "a time": IN_ENVELOPE.format("signature,expires_at", "1"),
    "no envelope, but a text": """headers = headers || '{"saf-origin": "x"}'""",
}
OF_MESSAGE = {
    "message_id": "message_id = gen_random_uuid()",
    "conversation_id": "conversation_id = gen_random_uuid()",
    "a dialog": IN_ENVELOPE.format("conversation_id", f'"{uuid4()}"'),
    "deliver_at": IN_ENVELOPE.format("deliver_at", "7"),
    "expires_at": "expires_at = now() + interval '1 day'",
    "an end of a dialog": "conversation_id = gen_random_uuid(), from_initiator = true, "
    "sequence = 1, from_service = 'departures'",
}
OF_DIALOG = {
    "conversation_id": "conversation_id = md5('x')::uuid, key = md5('x')::uuid::text",
    "sequence": "sequence = 2",
    "the first dialog": IN_ENVELOPE.format("conversation_id", f'"{uuid4()}"'),
    "no first dialog": "headers = headers #- '{saf-origin,conversation_id}'",
    "the first number": IN_ENVELOPE.format("sequence", "2"),
    "both numbers": f"sequence = 2, {IN_ENVELOPE.format('sequence', '2')}",
    "no contract": "headers = headers #- '{saf-dialog,contract}'",
    "another contract": "headers = jsonb_set(headers, '{saf-dialog,version}', '2')",
    "a longer lifetime": "headers = jsonb_set(headers, '{saf-dialog,lifetime_seconds}', '7e9')",
    "no lifetime": "headers = headers #- '{saf-dialog,lifetime_seconds}'",
    "an Error": f"message_type = '{ERROR}'",
    "an End": f"message_type = '{END}'",
    "a body in fragments": """
        headers = headers || '{"saf-whole": {"fragments": 1, "bytes": 3}}'""",
    "no dialog": "from_initiator = NULL",
}


def _headers_of_a_price() -> dict[str, Any]:
    return {"total": 90, "content-type": "text/plain"}


@pytest.mark.parametrize("kind", ["a message", "a dialog"])
def test_each_part_that_is_altered_behind_the_routing_service_makes_it_a_dead_letter(
    hub: Hub, kind: str
) -> None:
    """One message or dialog for each alteration, so that one run of the hub does for all."""
    more = OF_MESSAGE if kind == "a message" else OF_DIALOG
    changes = {**ALTERED, **more}
    for _ in changes:
        if kind == "a message":
            send(hub, headers=_headers_of_a_price(), key="A-1", message_type="note")
        else:
            dialog = ask(hub, contract="ordering", lifetime=3600)
            with hub.app.connect(role="test") as connection:
                dialog.send(
                    connection, "EWR", message_type="note",
                    headers=_headers_of_a_price(),
                )  # fmt: skip
    carry(hub)
    with connect(hub.ewr) as connection:
        ids = [one for (one,) in fetch(connection, "SELECT id FROM saf.inbox ORDER BY id")]
        assert len(ids) == len(changes)
        for id_, change in zip(ids, changes.values(), strict=True):
            updated = connection.execute(
                f"UPDATE saf.inbox SET {change} WHERE id = {id_}".encode()
            ).rowcount
            assert updated == 1, change
    heard = at_ewr(hub)
    assert heard == []
    with connect(hub.ewr) as connection:
        found = [
            (reason, error)
            for reason, error in fetch(connection, "SELECT reason, error FROM saf.dead_letter")
        ]
    assert len(found) == len(changes)
    reasons = [reason for reason, _ in found]
    assert set(reasons) == {"altered", "unknown_key"}
    assert reasons.count("unknown_key") == 3, "another sender, none, and another's key"
    assert states(hub.ewr) == []


@pytest.mark.parametrize("kind", ["a message", "a dialog"])
def test_without_an_envelope_a_message_is_refused_though_its_router_signs_it(
    hub: Hub, kind: str
) -> None:
    if kind == "a message":
        send(hub)
    else:
        ask(hub, "EWR")
    carry(hub, signer=OF_HUB)
    alter(hub.ewr, "headers = headers - 'saf-origin', body = 'forged'")
    sign_again(hub.ewr, "true")
    assert at_ewr(hub) == []
    assert refused(hub.ewr) == ["unsigned" if kind == "a dialog" else "unknown_key"]
    assert at_ewr(hub, require_signed=True) == []


def test_what_a_routing_service_makes_up_is_refused_though_it_signs_it(hub: Hub) -> None:
    ask(hub, "EWR")
    carry(hub, signer=OF_HUB)
    alter(hub.ewr, "body = 'JFK'")
    sign_again(hub.ewr, "true")
    assert at_ewr(hub) == []
    assert refused(hub.ewr) == ["altered"]
    with connect(hub.ewr) as connection:
        decide.retry(connection, DeadLetters(), "again")
    assert at_ewr(hub, require_signed=True) == [], "also where it is not required"
    assert refused(hub.ewr) == ["altered"]


# Replays


def test_the_messages_of_two_dialogs_are_not_exchanged(hub: Hub) -> None:
    ask(hub, "EWR", "A 2", "A 3"), ask(hub, "EWR", "B 2", "B 3")
    carry(hub)
    with connect(hub.ewr) as connection:
        connection.execute(
            "UPDATE saf.inbox a SET headers = b.headers, body = b.body FROM saf.inbox b "
            "WHERE a.conversation_id <> b.conversation_id AND a.sequence = 2 AND b.sequence = 2"
        )
    assert said(at_ewr(hub)) == ["EWR", "EWR"]
    assert refused(hub.ewr) == ["altered", "altered"]


def test_a_message_is_not_said_again_in_its_dialog_or_in_a_second_one(hub: Hub) -> None:
    dialog = ask(hub, "EWR", "pay")
    carry(hub)
    conversation = uuid5(dialog.conversation_id, DEPARTURES)
    other = uuid4()
    with connect(hub.ewr) as connection:
        columns = (
            "message_id, from_service, to_service, from_initiator, message_type, headers, body, "
            "source"
        )
        for of, key, first, number in (
            (conversation, conversation, 2, 3), (other, other, 1, 1), (other, other, 2, 2),
        ):  # fmt: skip
            connection.execute(
                f"INSERT INTO saf.inbox ({columns}, conversation_id, key, sequence) "
                f"SELECT {columns}, %s, %s, %s FROM saf.inbox WHERE sequence = %s "
                "ORDER BY id LIMIT 1".encode(),
                [of, str(key), number, first],
            )
    assert said(at_ewr(hub)) == ["EWR", "pay"]
    assert refused(hub.ewr) == ["altered"] * 3
    assert states(hub.ewr) == ["conversing"]


def test_an_answer_does_not_pass_for_a_question_nor_one_dialog_for_another_way(hub: Hub) -> None:
    first, second = ask(hub, "EWR"), ask(hub, "EWR")
    carry(hub)
    at_ewr(hub, answer)
    carry(hub)
    with connect(hub.app) as connection:
        connection.execute(
            "UPDATE saf.inbox a SET headers = b.headers, body = b.body FROM saf.inbox b "
            "WHERE a.conversation_id <> b.conversation_id"
        )
    assert at_shop(hub) == []
    assert refused(hub.app) == ["altered", "altered"]
    # the shop's own words, as if the airport had said them
    ((sent, body),) = _sent(hub.hub, first)
    alter(hub.app, "headers = '{}'")
    with connect(hub.app) as connection:
        connection.execute(
            "UPDATE saf.dead_letter SET headers = %s, body = %s WHERE conversation_id = %s",
            [sent, body, first.conversation_id],
        )
        decide.retry(connection, DeadLetters(), "again")
    assert at_shop(hub) == []
    assert len(refused(hub.app)) == 2
    assert second.conversation_id != first.conversation_id


def _sent(dsn: Dsn, dialog: saf.Dialog) -> list[tuple[str, bytes]]:
    """What a routing service has passed on of a dialog."""
    with connect(dsn) as connection:
        return list(
            fetch(
                connection,
                "SELECT headers::text, body FROM saf.outbox WHERE from_initiator "
                "AND conversation_id = %(id)s",
                {"id": uuid5(dialog.conversation_id, DEPARTURES)},
            )
        )


# Whom a receiver trusts


def test_a_router_that_the_receiver_does_not_name_passes_nothing_on(hub: Hub) -> None:
    ask(hub, "EWR")
    send(hub)
    carry(hub, signer=OF_HUB)
    elsewhere = saf.Keys(KEYS, redirected_from=["second"])
    assert at_ewr(hub, keys=elsewhere) == []
    assert refused(hub.ewr) == ["altered", "unknown_key"]
    with connect(hub.ewr) as connection:
        decide.retry(connection, DeadLetters(), "named now")
    assert len(at_ewr(hub)) == 2


def test_where_origins_are_not_required_they_are_noted_and_what_is_unknown_is_taken(
    hub: Hub,
) -> None:
    ask(hub, "EWR", "2")
    carry(hub, signer=OF_HUB)
    with saf.receive(
        hub.ewr, "EWR", max_messages=1, require_signed=True, keys=KEYS
    ) as delivery:  # names no router
        (one,) = delivery
        assert one.origin is not None
        assert (one.signed_by, one.origin.signed_by) == ("hub-1", "hub-1")
    (two,) = at_ewr(hub, require_signed=True)
    assert (two.signed_by, cast("saf.Origin", two.origin).signed_by) == ("hub-1", "shop-1")


def test_a_key_speaks_for_the_first_sender_only_if_it_may(hub: Hub) -> None:
    ask(hub, "EWR")
    carry(hub)
    wrong = {**KEYS, "shop-1": saf.Key(HMAC, SECRET, from_services=["bank", DEPARTURES])}
    assert at_ewr(hub, keys=saf.Keys(wrong, redirected_from=[DEPARTURES])) == []
    unknown = {name: one for name, one in KEYS.items() if name != "shop-1"}
    with connect(hub.ewr) as connection:
        decide.retry(connection, DeadLetters(), "again")
    assert at_ewr(hub, keys=saf.Keys(unknown, redirected_from=[DEPARTURES])) == []
    assert refused(hub.ewr) == ["unknown_key"]


def test_a_router_that_gives_another_key_passes_no_signature_on(hub: Hub) -> None:
    with connect(hub.hub) as connection:
        add_router(
            connection, DEPARTURES, "python", "tests.classifiers:to_ewr_by_body", mode="forward"
        )
    send(hub, "EWR", key="A-1")
    carry(hub, signer=OF_HUB)
    assert "saf-origin" not in headers(hub.ewr)[0]
    assert at_ewr(hub) == []


def test_what_nobody_has_signed_is_passed_on_as_ever(hub: Hub) -> None:
    dialog = ask(hub, "EWR", signer=None)
    carry(hub)
    (only,) = headers(hub.ewr)
    assert only.keys() == {"content-type", "saf-hops", "saf-dialog"}
    with connect(hub.ewr) as connection:
        ((id_,),) = fetch(connection, "SELECT conversation_id FROM saf.inbox")
    assert id_ != uuid5(dialog.conversation_id, DEPARTURES)
    end(hub.app, replace(dialog, signer=OF_SHOP))
    carry(hub)
    assert "saf-origin" not in headers(hub.ewr)[1], "its place could not be verified"


@pytest.mark.parametrize("keys", [saf.Keys(KEYS), None])
def test_who_requires_origins_names_the_routers(hub: Hub, keys: saf.Keys | None) -> None:
    with pytest.raises(UsageError, match="needs the"):
        dialogs.receive(hub.ewr, "EWR", require_signed="origin", keys=keys)


def test_another_requirement_is_refused(hub: Hub) -> None:
    with pytest.raises(UsageError, match="'orign': expected True, False, or 'origin'"):
        saf.Worker(hub.ewr, "EWR", require_signed=cast("bool", "orign"), keys=KEYS)


# Large bodies


def large(hub: Hub, *before: object, **options: Any) -> saf.Dialog:
    dialog = ask(hub, *before, **options)
    with hub.app.connect(role="test") as connection:
        dialog.send(connection, LARGE, fragment_bytes=1000, headers={"n": 1.50})
        dialog.send(connection, "after")
    return dialog


def by_beginning(hub: Hub) -> None:
    with connect(hub.hub) as connection:
        name = "tests.classifiers:by_beginning_once"
        add_router(connection, DEPARTURES, "python", name, mode="forward")


@pytest.mark.parametrize("first", [True, False])
def test_a_large_body_is_verified_as_a_whole(hub: Hub, first: bool) -> None:
    if first:
        by_beginning(hub)
        body = b"EWR" + b"." * 10_000
        dialog = ask(hub)
        with hub.app.connect(role="test") as connection:
            dialog.send(connection, body, fragment_bytes=1000)
    else:
        body = LARGE
        large(hub, "EWR")
    carry(hub, signer=OF_HUB)
    found: list[tuple[bytes, saf.Origin | None]] = []
    at_ewr(hub, lambda _, message: found.append((message.body, message.origin)), max_messages=3)
    assert body in dict(found)
    assert {one and one.signed_by for _, one in found} == {"shop-1"}
    assert refused(hub.ewr) == []


@pytest.mark.parametrize("number", [2, 6, 12])
def test_a_large_body_that_its_router_has_altered_is_refused_whichever_part(
    hub: Hub, number: int
) -> None:
    large(hub, "EWR")
    carry(hub, signer=OF_HUB)
    alter(hub.ewr, f"body = set_byte(body, 3, 99) WHERE sequence = {number}")
    sign_again(hub.ewr, f"sequence = {number}")
    assert said(at_ewr(hub)) == ["EWR"]
    assert refused(hub.ewr) == ["altered"]
    assert states(hub.ewr) == ["conversing"]
    with connect(hub.ewr) as connection:
        decide.retry(connection, DeadLetters(), "again")
    assert at_ewr(hub) == []
    assert refused(hub.ewr) == ["altered"]


def test_fragments_of_a_router_that_does_not_sign_are_refused(hub: Hub) -> None:
    large(hub, "EWR")
    carry(hub)
    assert said(at_ewr(hub)) == ["EWR"]
    assert set(refused(hub.ewr)) == {"unsigned"}


def test_a_body_that_was_sent_in_one_part_is_passed_on_in_one(hub: Hub) -> None:
    by_beginning(hub)
    dialog = ask(hub)
    with hub.app.connect(role="test") as connection:
        dialog.send(connection, b"EWR" * 1_000_000, fragment_bytes=2**22)
        dialog.send(connection, "after")
    carry(hub)
    found: list[bytes] = []
    at_ewr(hub, lambda _, message: found.append(message.body))
    assert found == [b"EWR" * 1_000_000, b"after"]


def test_a_body_without_its_hash_is_of_no_known_origin(hub: Hub) -> None:
    dialog = ask(hub, "EWR")
    with hub.app.connect(role="test") as connection:
        dialog.send(connection, LARGE, fragment_bytes=1000)
        # as a version before has signed it: each fragment alone
        ((text, number, body, message_id),) = fetch(
            connection,
            "SELECT headers::text, sequence, body, message_id FROM saf.outbox "
            "WHERE headers ? 'saf-whole'",
        )
        known = json.loads(text)
        del known["saf-whole"]["sha256"], known["saf-signature"]
        row = Row(
            message_id=message_id, from_service=SHOP, to_service=DEPARTURES, to_broker=None,
            key=str(dialog.conversation_id), message_type=None, headers=json.dumps(known),
            body=body, deliver_at=None, expires_at=None,
        )  # fmt: skip
        signed = OF_SHOP.sign(
            row, conversation_id=str(dialog.conversation_id), from_initiator=True, sequence=number
        )
        connection.execute(
            "UPDATE saf.outbox SET headers = %s::jsonb WHERE message_id = %s",
            [signed.headers, message_id],
        )
    carry(hub, signer=OF_HUB)
    assert said(at_ewr(hub)) == ["EWR"]
    assert refused(hub.ewr) == ["unsigned"]
    with connect(hub.ewr) as connection:
        decide.retry(connection, DeadLetters(), "as before")
    assert len(at_ewr(hub, require_signed=True)) == 1


def test_a_further_subscription_gets_no_fragment_that_it_cannot_verify(hub: Hub) -> None:
    with connect(hub.ewr) as connection:
        create_subscription(connection, "audit", service="EWR")
    large(hub, "EWR")
    carry(hub, signer=OF_HUB)
    heard = dialogs.receive(hub.ewr, "audit", **ORIGIN)
    assert said(heard) == ["EWR", "after"]
    assert set(refused(hub.ewr)) == {"unsigned"}
    assert len(refused(hub.ewr)) == 11


def test_an_end_or_an_error_is_no_fragment(hub: Hub) -> None:
    ask(hub, "EWR")
    carry(hub, signer=OF_HUB)
    conversation = headers(hub.ewr) and uuid5(_only(hub.app), DEPARTURES)
    with connect(hub.ewr) as connection:
        for kind, body in ((END, ""), (ERROR, '{"code": 7, "text": "no"}')):
            connection.execute(
                "INSERT INTO saf.inbox (message_id, from_service, to_service, key, "
                "conversation_id, from_initiator, sequence, message_type, headers, body) VALUES "
                "(gen_random_uuid(), %s, 'EWR', %s, %s, true, 2, %s, "
                """'{"saf-fragment": 1}', %s)""",
                [DEPARTURES, str(conversation), conversation, kind, body.encode()],
            )
    sign_again(hub.ewr, "sequence = 2")
    assert said(at_ewr(hub)) == ["EWR"]
    assert refused(hub.ewr) == ["unsigned", "unsigned"]


def _only(dsn: Dsn) -> UUID:
    with connect(dsn) as connection:
        ((id_,),) = fetch(connection, "SELECT conversation_id FROM saf.conversation")
    return UUID(str(id_))


def test_a_trace_of_the_routing_service_is_not_added_to_what_was_signed(hub: Hub) -> None:
    from opentelemetry import context, trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    ask(hub, "EWR")
    hub.forward()
    span = SpanContext(7, 7, is_remote=False, trace_flags=TraceFlags(1))
    token = context.attach(trace.set_span_in_context(NonRecordingSpan(span)))
    try:
        hub.service().drain()
    finally:
        context.detach(token)
    hub.forward()
    assert said(at_ewr(hub)) == ["EWR"]
