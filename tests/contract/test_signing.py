"""Signing: what was altered between the sender and the target is refused, and nothing else is."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

import saf
from saf import Message, Outbox
from saf.broker.senders import add_senders
from saf.database import Dsn, fetch
from saf.operating import decide
from saf.routing.routers import add_router
from saf.setaside.selection import DeadLetters
from saf.signing.signer import number
from tests.pipeline import connect, let_time_pass, run
from tests.receivers import SUBSCRIPTION, dead, effect, effects, prepare, waiting
from tests.signing import ED25519, HMAC, SECRET, key, signer
from tests.waits import until

every_postgresql = pytest.mark.every_postgresql

KEYS = {"shop-1": key()}


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


def send(app: Dsn, body: object = "A-1", **options: Any) -> UUID:
    """By the shop's application, which signs."""
    outbox = options.pop("outbox", None) or Outbox(from_service="shop", signer=signer())
    with app.connect(role="test") as connection:
        return outbox.send(connection, "billing", body, **options)


def receive(mom: Dsn, **options: Any) -> list[saf.Received]:
    """Receive all that is due."""
    options = {"require_signed": True, "keys": KEYS, **options}
    received: list[saf.Received] = []
    while True:
        with saf.receive(mom, SUBSCRIPTION, **options) as delivery:
            if not delivery:
                return received
            received += delivery


def alter(dsn: Dsn, change: str, table: str = "inbox") -> None:
    with connect(dsn) as connection:
        assert connection.execute(f"UPDATE saf.{table} SET {change}".encode()).rowcount


def refused(mom: Dsn) -> list[tuple[str, str]]:
    with connect(mom) as connection:
        return [(one.reason, one.error) for one in DeadLetters().rows(connection)]


# What arrives as it was sent

ODD = {
    "one": 1,
    "one point zero": 1.0,
    "large": 1e300,
    "larger than a float": 10**40,
    "small": 5e-324,
    "exponent": 1e16,
    "negative": -1.5e-7,
    "minus zero": -0.0,
    "text": 'grüezi 好 \U0001f600 \x01 \x7f \\ " / \u2028',
    "": "a name that is empty",
    "ü": {"nested": [1, [2.50, {"deeper": [None, True, False, {}, [], ""]}]]},
    "Zeta": 1,
    "alpha": 2,
    "longer name": 3,
    "Content-Encoding": "gzip",
}


@every_postgresql
@pytest.mark.parametrize("algorithm", [HMAC, ED25519])
def test_what_was_not_altered_arrives_whoever_sends_it_by_whatever_way(
    app: Dsn, inbox: Dsn, algorithm: Any
) -> None:
    outbox = Outbox(from_service="shop", signer=signer(algorithm))
    soon = datetime.now(UTC) + timedelta(hours=9, microseconds=1)
    with connect(inbox) as connection:
        ((broker,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    send(app, outbox=outbox)
    send(app, {"größe": 1.0}, outbox=outbox, headers=ODD, key="好", message_type="Größe")
    send(app, b"\x00\xff", outbox=outbox, to_broker=broker, from_service="news")
    send(app, b"", outbox=outbox, deliver_at=datetime.now(UTC) - timedelta(days=400))
    send(app, "x" * 3_000_000, outbox=outbox, expires_at=soon)
    late = timedelta(hours=-11)
    elsewhere = datetime.now(UTC).astimezone(tz=datetime.now().astimezone(None).tzinfo) - late
    send(app, "zone", outbox=outbox, expires_at=elsewhere)
    with app.connect(role="test") as connection:
        outbox.send_many(
            connection, [Message(service="billing", body=n, headers=ODD) for n in range(3)]
        )

    async def asynchronously() -> None:
        connection = await psycopg.AsyncConnection.connect(app.conninfo)
        async with connection:
            await outbox.asend(connection, "billing", "async", headers={"a": 1e3})
            await outbox.asend_many(connection, [Message(service="billing", body="async many")])

    asyncio.run(asynchronously())
    run(app, mom=inbox)
    received = receive(inbox, keys={"shop-1": key(algorithm)})
    assert refused(inbox) == []
    assert len(received) == 11
    assert {one.signed_by for one in received} == {"shop-1"}
    odd = next(one for one in received if one.key == "好")
    assert {name: odd.headers[name] for name in ODD} == {**ODD, "large": int("1" + "0" * 300)}
    assert math.copysign(1, odd.headers["minus zero"]) == 1  # PostgreSQL has no -0


def test_a_number_is_signed_as_postgresql_writes_it(app: Dsn) -> None:
    with connect(app) as connection:

        @given(
            st.floats(allow_nan=False, allow_infinity=False)
            | st.integers(min_value=-(10**60), max_value=10**60)
        )
        def agree(value: float) -> None:
            text = json.dumps(value)
            ((written,),) = fetch(connection, "SELECT %(n)s::jsonb::text", {"n": text})
            assert number(text) == written

        agree()


# What was altered

ALTERED = {
    "body": "body = 'A-2'",
    "an empty body": "body = ''",
    "key": "key = 'A-2'",
    "no key": "key = NULL",
    "message_id": "message_id = gen_random_uuid()",
    "message_type": "message_type = 'OrderCancelled'",
    "no message_type": "message_type = NULL",
    "from_service": "from_service = 'bank'",
    "no from_service": "from_service = NULL",
    "to_broker": "to_broker = (SELECT broker_id FROM saf.broker)",
    "deliver_at": "deliver_at = '2020-01-01'",
    "expires_at": "expires_at = now() + interval '1 year'",
    "conversation_id": "conversation_id = gen_random_uuid()",
    "sequence": "sequence = 1",
    "a header": """headers = headers || '{"total": 91}'""",
    "the form of a number": """headers = headers || '{"total": 90.0}'""",
    "a number into text": """headers = headers || '{"total": "90"}'""",
    "a header more": """headers = headers || '{"admin": true}'""",
    "a header less": "headers = headers - 'total'",
    "a header in other letters": """headers = headers || '{"Saf-Verified-From": 1}'""",
    "a header of saf": """headers = headers || '{"saf-hops": 1}'""",
    "no header but the signature": """
        headers = jsonb_build_object('saf-signature', headers -> 'saf-signature')""",
    "the key's name": """headers = jsonb_set(headers, '{saf-signature,key}', '"shop-2"')""",
    "the key's name as a number": "headers = jsonb_set(headers, '{saf-signature,key}', '2')",
    "the service in the signature": """
        headers = jsonb_set(headers, '{saf-signature,to}', '"departures"')""",
    "the version": "headers = jsonb_set(headers, '{saf-signature,version}', '2')",
    "the version's form": "headers = jsonb_set(headers, '{saf-signature,version}', '1.0')",
    "the signature": f"""headers = jsonb_set(headers, '{{saf-signature,value}}',
        '"{base64.b64encode(bytes(32)).decode()}"')""",
    "a signature that is none": """headers = jsonb_set(headers, '{saf-signature,value}', '"ä"')""",
    "a signature that is empty": """headers = jsonb_set(headers, '{saf-signature,value}', '""')""",
    "a signature of another form": """headers = headers || '{"saf-signature": "v1,abc"}'""",
    "a signature that is a list": """headers = headers || '{"saf-signature": [1]}'""",
    "an expiry in the signature": """
        headers = jsonb_set(headers, '{saf-signature,expires_at}', '9999999999999999')""",
    "an absurd expiry in the signature": f"""
        headers = jsonb_set(headers, '{{saf-signature,expires_at}}', '{"9" * 5000}')""",
    "an expiry that is none": """
        headers = jsonb_set(headers, '{saf-signature,expires_at}', '"never"')""",
}


@pytest.mark.parametrize("algorithm", [HMAC, ED25519])
def test_each_part_of_a_message_that_is_altered_between_makes_it_a_dead_letter(
    app: Dsn, inbox: Dsn, algorithm: Any
) -> None:
    keys = {"shop-1": key(algorithm), "shop-2": key(algorithm)}
    outbox = Outbox(from_service="shop", signer=signer(algorithm))
    headers = {"total": 90}
    sent = {
        what: send(app, what, outbox=outbox, key="A", message_type="Order", headers=headers)
        for what in [*ALTERED, "nothing"]
    }
    run(app, mom=inbox)
    for what, change in ALTERED.items():
        alter(inbox, f"{change} WHERE message_id = '{sent[what]}'")
    assert [one.text() for one in receive(inbox, keys=keys)] == ["nothing"]  # its key goes on
    assert [reason for reason, _ in refused(inbox)] == ["altered"] * len(ALTERED)


def test_what_is_altered_before_it_is_forwarded_is_refused_too(app: Dsn, inbox: Dsn) -> None:
    send(app, "A-1")
    send(app, "A-2")
    alter(app, "body = 'A-9' WHERE body = 'A-1'", "outbox")
    run(app, mom=inbox)
    assert [one.text() for one in receive(inbox)] == ["A-2"]
    assert dead(inbox) == [("A-9", "altered")]


def test_a_removed_signature_makes_a_message_unsigned(app: Dsn, inbox: Dsn) -> None:
    for change in ("headers - 'saf-signature'", "NULL", "'null'", "'[]'", "'{}'"):
        sent = send(app)
        run(app, mom=inbox)
        alter(inbox, f"headers = {change} WHERE message_id = '{sent}'")
        assert receive(inbox) == []
        assert refused(inbox)[-1] == ("unsigned", "it is not signed")


def test_a_signature_of_one_message_is_none_of_another(app: Dsn, inbox: Dsn) -> None:
    sent, other = send(app, "100 to Ann"), send(app, "1 to Bob")
    run(app, mom=inbox)
    alter(
        inbox,
        f"headers = (SELECT headers FROM saf.inbox WHERE message_id = '{sent}') "
        f"WHERE message_id = '{other}'",
    )
    assert [one.text() for one in receive(inbox)] == ["100 to Ann"]
    assert dead(inbox) == [("1 to Bob", "altered")]


def test_a_message_to_one_service_is_not_taken_by_another(app: Dsn, inbox: Dsn) -> None:
    send(app)
    run(app, mom=inbox)
    with connect(inbox) as connection:
        saf.create_service(connection, "audit")
    alter(inbox, "to_service = 'audit'")
    with saf.receive(inbox, "audit", require_signed=True, keys=KEYS) as delivery:
        assert not delivery
    ((reason, error),) = refused(inbox)
    assert reason == "altered"
    assert "sent to service 'billing', and redirected to service 'audit'" in error


def test_a_message_to_one_broker_is_not_taken_by_another(
    app: Dsn, inbox: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    with connect(inbox) as connection:
        ((here,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    send(app, to_broker=here)
    run(app, mom=inbox)
    elsewhere = new_broker("elsewhere")
    prepare(elsewhere)
    columns = (
        "message_id, from_service, to_service, to_broker, key, message_type, headers::text, body, "
        "created_at"
    )
    with connect(inbox) as connection, connect(elsewhere) as other:
        (row,) = fetch(connection, f"SELECT {columns} FROM saf.inbox")
        names = columns.replace("::text", "")
        other.execute(f"INSERT INTO saf.inbox ({names}) VALUES ({', '.join(['%s'] * 9)})", row)
    assert receive(elsewhere) == []
    ((reason, error),) = refused(elsewhere)
    assert reason == "altered"
    assert f"sent to broker {here}" in error
    assert len(receive(inbox)) == 1


# Which keys


def test_unsigned_unknown_and_altered_are_told_apart_and_their_neighbours_go_on(
    app: Dsn, inbox: Dsn
) -> None:
    plain = Outbox(from_service="shop")
    unknown = Outbox(from_service="shop", signer=saf.Signer("bank-1", HMAC, bytes(32)))
    with_its_name = Outbox(from_service="shop", signer=saf.Signer("shop-1", HMAC, bytes(32)))
    for number_, outbox in enumerate((None, plain, None, unknown, None, with_its_name, None)):
        send(app, str(number_), key="A-1", outbox=outbox)
    run(app, mom=inbox)
    with capture_logs() as logs:
        assert [one.text() for one in receive(inbox)] == ["0", "2", "4", "6"]
    assert dead(inbox) == [("5", "altered"), ("3", "unknown_key"), ("1", "unsigned")]
    assert waiting(inbox) == []
    told = [one for one in logs if one["event"] == "message_refused"]
    assert {(one["log_level"], one["reason"], one["key"]) for one in told} == {
        ("warning", reason, "A-1") for reason in ("altered", "unknown_key", "unsigned")
    }
    assert all(one["message_id"] and one["subscription"] == "billing" for one in told)
    assert SECRET not in str(logs)
    assert "key 'bank-1'" in refused(inbox)[1][1]


def test_a_name_that_a_stranger_made_up_does_not_fill_the_errors(app: Dsn, inbox: Dsn) -> None:
    for part in ("key", "to"):
        sent = send(app)
        run(app, mom=inbox)
        long = "to_jsonb(repeat('x' || chr(27), 40000))"
        alter(
            inbox,
            f"headers = jsonb_set(headers, '{{saf-signature,{part}}}', {long}) "
            f"WHERE message_id = '{sent}'",
        )
        assert receive(inbox) == []
        error = refused(inbox)[-1][1]
        assert len(error) < 2000
        assert chr(27) not in error


def test_during_a_rotation_the_old_key_and_the_new_one_are_valid(app: Dsn, inbox: Dsn) -> None:
    old = signer(key_id="shop-1")
    new = signer(ED25519, key_id="shop-2")
    send(app, "old", outbox=Outbox(signer=old))
    send(app, "new", outbox=Outbox(signer=new))
    run(app, mom=inbox)
    both = saf.Keys({"shop-1": key(), "shop-2": key(ED25519)})
    assert [(one.text(), one.signed_by) for one in receive(inbox, keys=both)] == [
        ("old", "shop-1"),
        ("new", "shop-2"),
    ]
    send(app, "too late", outbox=Outbox(signer=old))
    run(app, mom=inbox)
    assert receive(inbox, keys={"shop-2": key(ED25519)}) == []
    assert dead(inbox) == [("too late", "unknown_key")]


def test_a_public_key_is_no_secret_of_hmac(app: Dsn, inbox: Dsn) -> None:
    """Whoever signs with HMAC by a public key cannot pass for the owner of the private one."""
    from tests.signing import PUBLIC

    send(app, outbox=Outbox(signer=saf.Signer("shop-1", HMAC, PUBLIC)))
    run(app, mom=inbox)
    assert receive(inbox, keys={"shop-1": key(ED25519)}) == []
    assert [reason for reason, _ in refused(inbox)] == ["altered"]


def test_the_owner_of_a_key_speaks_only_for_its_services(app: Dsn, inbox: Dsn) -> None:
    keys = {"shop-1": saf.Key(HMAC, SECRET, from_services=["shop", "news"])}
    for service in ("shop", "news", "bank", None):
        send(app, service or "nobody", outbox=Outbox(from_service=service, signer=signer()))
    run(app, mom=inbox)
    assert [one.text() for one in receive(inbox, keys=keys)] == ["shop", "news"]
    assert refused(inbox) == [
        ("unknown_key", "key 'shop-1' may not speak for service 'bank'"),
        ("unknown_key", "key 'shop-1' may not speak for nobody"),
    ]


def test_a_message_that_was_refused_for_its_key_is_taken_when_the_key_is_known(
    app: Dsn, inbox: Dsn
) -> None:
    hour = datetime.now(UTC) + timedelta(hours=1)
    send(app, "A-1", key="A-1", expires_at=hour)
    run(app, mom=inbox)
    assert receive(inbox, keys={"bank-1": key()}) == []
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(reason="unknown_key"), "the key was missing")
    assert [one.text() for one in receive(inbox)] == ["A-1"]
    assert dead(inbox) == []


@pytest.mark.parametrize("max_messages", [1, 7])
def test_what_was_read_ahead_is_verified_as_it_is_delivered(
    app: Dsn, inbox: Dsn, max_messages: int
) -> None:
    outbox = Outbox(from_service="shop", signer=signer())
    with app.connect(role="test") as connection:
        outbox.send_many(
            connection, [Message(service="billing", body=str(n), key="A-1") for n in range(90)]
        )
    run(app, mom=inbox)
    # each thirtieth, in the middle of what is read ahead; and two deliveries of nothing else
    with connect(inbox) as connection:
        connection.execute(
            "UPDATE saf.inbox SET body = body || '!' "
            "WHERE convert_from(body, 'UTF8')::int % 30 = 29 "
            "   OR convert_from(body, 'UTF8')::int BETWEEN 40 AND 55"
        )
    worker = saf.Worker(
        inbox, SUBSCRIPTION, max_messages=max_messages, require_signed=True, keys=KEYS
    )

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)

    with capture_logs() as logs:
        assert worker.drain() == 90 - 19
    altered = [n for n in range(90) if n % 30 == 29 or 40 <= n <= 55]
    assert effects(inbox) == [str(n) for n in range(90) if n not in altered]
    assert dead(inbox) == [(f"{n}!", "altered") for n in altered]
    assert worker.summary.buried == len(altered)
    assert len([one for one in logs if one["event"] == "message_refused"]) == len(altered)


# What is not required


def test_with_keys_that_are_not_required_only_what_is_signed_wrongly_is_refused(
    app: Dsn, inbox: Dsn
) -> None:
    send(app, "signed")
    send(app, "unsigned", outbox=Outbox(from_service="shop"))
    send(app, "unknown", outbox=Outbox(signer=saf.Signer("bank-1", HMAC, bytes(32))))
    send(app, "forged", outbox=Outbox(signer=saf.Signer("shop-1", HMAC, bytes(32))))
    run(app, mom=inbox)
    received = receive(inbox, require_signed=False)
    assert [(one.text(), one.signed_by) for one in received] == [
        ("signed", "shop-1"),
        ("unsigned", None),
        ("unknown", None),
    ]
    assert dead(inbox) == [("forged", "altered")]


def test_who_has_signed_is_not_what_a_message_says_but_what_was_verified(
    app: Dsn, inbox: Dsn
) -> None:
    send(app)
    run(app, mom=inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:
        (message,) = delivery
        assert "saf-signature" in message.headers
        assert message.signed_by is None


def test_a_broker_that_vouches_and_a_forged_header_leave_the_signature_valid(
    app: Dsn, inbox: Dsn
) -> None:
    name = f"signing_{app.database}"
    with connect(app) as owner:
        send(app, "forged", headers={"saf-verified-from": {"broker": str(uuid4())}})
        owner.execute(f"CREATE ROLE {name}".encode())
        try:
            add_senders(owner, name, "shop")
            send(app, "vouched")
            run(app, mom=inbox)
        finally:
            owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())
    forged, vouched = receive(inbox)
    assert forged.verified_from is None
    assert "saf-claimed-from" in forged.headers
    assert vouched.verified_from is not None
    assert vouched.verified_from.service == "shop"


# What changes on the way, by right


@pytest.mark.every_postgresql
def test_a_message_that_waited_and_was_retried_is_still_the_one_that_was_signed(
    app: Dsn, inbox: Dsn
) -> None:
    now = datetime.now(UTC)
    send(app, "late", key="A-1", deliver_at=now + timedelta(seconds=1.5))
    send(app, "fails", key="A-2", expires_at=now + timedelta(days=1))
    send(app, "behind", key="A-2")
    run(app, mom=inbox)
    worker = saf.Worker(
        inbox,
        SUBSCRIPTION,
        policy=saf.Policy(max_attempts=2, first_wait_seconds=0),
        require_signed=True,
        keys=KEYS,
    )
    fails = True

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        assert message.signed_by == "shop-1"
        if fails and message.text() == "fails":
            raise ZeroDivisionError
        effect(connection, message)

    def forwarded_and_handled() -> bool:
        run(app, mom=inbox)
        return worker.drain() == 0 and len(effects(inbox)) == 2

    until(forwarded_and_handled)
    assert dead(inbox) == [("fails", "failed")]
    assert sorted(effects(inbox)) == ["behind", "late"]
    fails = False
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "mended")  # removes expires_at
    worker.drain()
    assert dead(inbox) == []
    assert "fails" in effects(inbox)


def test_a_message_that_has_expired_is_not_brought_back_on_its_way(app: Dsn, inbox: Dsn) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1)
    send(app, expires_at=soon)
    run(app, mom=inbox)
    alter(inbox, "expires_at = NULL")
    while datetime.now(UTC) <= soon:
        pass
    assert receive(inbox) == []
    ((reason, error),) = refused(inbox)
    assert (reason, error) == ("altered", "its expires_at was removed after it had passed")
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "it is still of use")
    assert len(receive(inbox)) == 1  # a person says so, here


def test_what_a_router_has_redirected_is_taken_if_that_is_said(app: Dsn, inbox: Dsn) -> None:
    with connect(app) as connection:
        add_router(connection, "departures", "arrow", "tests.classifiers:by_body")
    with app.connect(role="test") as connection:
        Outbox(signer=signer()).send(connection, "departures", "billing")
    run(app, mom=inbox)
    assert receive(inbox) == []
    assert "'departures', and redirected to service 'billing'" in refused(inbox)[0][1]
    with connect(inbox) as connection:
        decide.retry(connection, DeadLetters(), "the router may")
    keys = saf.Keys(KEYS, redirected_from=["departures"])
    assert [one.text() for one in receive(inbox, keys=keys)] == ["billing"]


# Who receives


def test_workers_and_processors_refuse_it_too_and_count_it(app: Dsn, inbox: Dsn) -> None:
    send(app, "signed")
    send(app, "unsigned", outbox=Outbox())
    run(app, mom=inbox)
    worker = saf.Worker(inbox, SUBSCRIPTION, require_signed=True, keys=KEYS)
    worker.handler()(lambda message, connection: effect(connection, message))
    assert worker.run(drain=True) == 1
    assert effects(inbox) == ["signed"]
    assert str(worker.summary) == "handled 1 message, made 1 dead letter"
    assert worker.summary.exit_code == 1

    class Remembers(saf.Processor):
        @saf.handles()
        def any(self, message: saf.Received, connection: Any) -> None:
            assert message.signed_by == "shop-1"
            effect(connection, message)

    send(app, "unsigned too", outbox=Outbox(), key="A-1")
    run(app, mom=inbox)
    runner = saf.Processors(inbox, SUBSCRIPTION, Remembers, require_signed=True, keys=KEYS)
    assert runner.run(drain=True) == 0
    assert runner.summary.exit_code == 1  # also where all of a delivery was refused
    send(app, "signed too", key="A-1")
    run(app, mom=inbox)
    assert runner.run(drain=True) == 1
    assert effects(inbox) == ["signed", "signed too"]


def test_a_refused_message_holds_its_key_up_under_no_policy(app: Dsn, inbox: Dsn) -> None:
    policy = saf.Policy(block=True)
    send(app, "forged", key="A-1", outbox=Outbox())
    send(app, "A-1", key="A-1")
    run(app, mom=inbox)
    assert [one.text() for one in receive(inbox, policy=policy)] == ["A-1"]
    assert waiting(inbox) == []


def test_a_message_that_waited_unverified_is_verified_when_it_is_tried_again(
    app: Dsn, inbox: Dsn
) -> None:
    send(app, "forged", key="A-1", outbox=Outbox())
    send(app, "A-1", key="A-1")
    run(app, mom=inbox)
    with saf.receive(inbox, SUBSCRIPTION) as delivery:  # before signatures were required
        delivery.park(delivery[0], "not now")
    let_time_pass(inbox)
    assert [one.text() for one in receive(inbox)] == ["A-1"]
    assert dead(inbox) == [("forged", "unsigned")]


def test_after_a_failed_delivery_each_message_is_verified_alone(app: Dsn, inbox: Dsn) -> None:
    for body in ("1", "forged", "2"):
        send(app, body, key="A-1", outbox=Outbox() if body == "forged" else None)
    run(app, mom=inbox)
    with (
        suppress(ZeroDivisionError),
        saf.receive(inbox, SUBSCRIPTION, require_signed=True, keys=KEYS) as delivery,
    ):
        assert len(delivery) == 2
        raise ZeroDivisionError
    received = []
    for _ in range(9):
        let_time_pass(inbox)
        received += [one.text() for one in receive(inbox)]
    assert received == ["1", "2"]
    assert dead(inbox) == [("forged", "unsigned")]


def test_a_worker_that_is_told_to_stop_buries_nothing_twice(app: Dsn, inbox: Dsn) -> None:
    for body in ("1", "forged", "2", "forged", "3"):
        send(app, body, key="A-1", outbox=Outbox() if body == "forged" else None)
    run(app, mom=inbox)
    worker = saf.Worker(inbox, SUBSCRIPTION, require_signed=True, keys=KEYS)

    @worker.handler()
    def handle(message: saf.Received, connection: Any) -> None:
        effect(connection, message)
        worker.stop()

    for _ in range(9):
        worker.drain()
    assert effects(inbox) == ["1", "2", "3"]
    assert dead(inbox) == [("forged", "unsigned")] * 2


def test_headers_with_decimals_from_another_language_are_verified_by_their_digits() -> None:
    assert number("1.10") == "1.10" != number("1.1")
    assert Decimal(number("1e-2")) == Decimal("0.01")
