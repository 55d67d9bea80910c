"""Replies: what an endpoint answers goes back to the sender, also on a dialog."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any
from xmlrpc.client import dumps

import pytest

import saf
from saf.database import Dsn, fetch
from saf.log.shards import DEFAULT_SHARDS, shard_of
from saf.message import SIGNATURE
from saf.receiving.dispatch.dispatcher import Dispatcher, run
from tests import dialogs
from tests.dialogs import SHOP, WAREHOUSE
from tests.endpoints import (
    Got,
    Partner,
    Reply,
    dispatch,
    dispatching,
    inbox,
    let_lanes_be_due,
    let_probes_be_due,
    partner,
    program,
    settings,
    state,
)
from tests.pipeline import connect, outlive_lease
from tests.processes import run as run_program
from tests.receivers import dead, put, waiting
from tests.signing import signer
from tests.waits import until

__all__ = ["inbox", "partner"]

JSON = {"content-type": "application/json"}
STORE = """
INSERT INTO saf.inbox (source, to_service, key, body, message_id, created_at)
VALUES (gen_random_uuid(), %s, %s, 'plain', gen_random_uuid(), now())
"""
BUSY = """
CREATE FUNCTION busy() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = 'lock_not_available'; END $$;
CREATE TRIGGER busy BEFORE INSERT ON saf.outbox FOR EACH ROW EXECUTE FUNCTION busy();
"""
"""A database that takes no answer for now."""
LEFT_TO_A_WORKER = "SELECT count(*) FROM saf.backoff WHERE awaits_handler"


def echo(partner: Partner) -> None:
    async def answer(got: Got) -> Reply:
        return 200, JSON, b'{"got": %s}' % (got.body or b"null")

    partner.answer = answer


def sent(broker: Dsn) -> list[tuple[Any, ...]]:
    with connect(broker) as connection:
        return fetch(
            connection,
            "SELECT from_service, to_service, key, message_type, body, headers FROM saf.outbox "
            "ORDER BY id",
        )


def test_an_answer_is_sent_to_the_sender_in_the_order_of_its_key(
    inbox: Dsn, partner: Partner
) -> None:
    echo(partner)
    put(inbox, "1", "2", "3", key="a", from_service="shop")
    dispatch(inbox, partner, reply=True, reply_type="OrderBilled")
    ids = [got.id for got in partner.accepted]
    assert sent(inbox) == [
        (
            *("billing", "shop", "a", "OrderBilled", b'{"got": %d}' % number),
            {**JSON, "in-reply-to": id_},
        )
        for number, id_ in enumerate(ids, start=1)
    ]


def test_replies_are_signed(inbox: Dsn, partner: Partner) -> None:
    echo(partner)
    put(inbox, "1", key="a", from_service="shop")
    run([Dispatcher("partner", settings(partner, reply=True), inbox, signer=signer())], drain=True)
    ((*_, headers),) = sent(inbox)
    assert headers[SIGNATURE]["key"] == "shop-1"


def test_an_answer_says_its_type_and_one_without_a_body_is_no_reply(
    inbox: Dsn, partner: Partner
) -> None:
    async def answer(got: Got) -> Reply:
        if got.body == b"1":
            return 204, {}, b""
        return 201, {"ce-type": "Order%20Billed"}, b"\x00\xff"

    partner.answer = answer
    put(inbox, "1", "2", key="a", from_service="shop")
    done = dispatch(inbox, partner, reply=True)
    assert done.summary.handled == 2
    ((*_, message_type, body, headers),) = sent(inbox)
    assert (message_type, body) == ("Order Billed", b"\x00\xff")
    assert headers["content-type"] == "application/octet-stream"


def test_a_reply_is_sent_if_and_only_if_its_message_is_marked(inbox: Dsn, partner: Partner) -> None:
    echo(partner)
    put(inbox, "1", key="a", from_service="shop")
    for at in ("dispatch_answered", "dispatch_marking"):
        assert run_program(program, inbox, partner.url, {"reply": True}, failpoint=at) == -9
        assert sent(inbox) == []
        outlive_lease(inbox)
    dispatch(inbox, partner, reply=True)
    dispatch(inbox, partner, reply=True)
    assert len(partner.accepted) == 3
    assert len(sent(inbox)) == 1


def test_a_message_that_names_no_sender_is_not_sent_where_a_reply_is_wanted(
    inbox: Dsn, partner: Partner
) -> None:
    put(inbox, "1", key="a")
    assert dispatch(inbox, partner, reply=True).summary.exit_code == 1
    assert partner.begun == []
    assert dead(inbox) == [("1", "rejected")]


def test_an_answer_of_which_no_reply_can_be_made_is_a_failure_of_its_message_alone(
    inbox: Dsn, partner: Partner
) -> None:
    deep = 20_000

    async def answer(got: Got) -> Reply:
        value = "<int>7</int>"
        if b"deep" in (got.body or b""):
            value = "<array><data><value>" * deep + value + "</value></data></array>" * deep
        value = f"<params><param><value>{value}</value></param></params>"
        return 200, {}, f"<methodResponse>{value}</methodResponse>".encode()

    partner.answer = answer
    put(inbox, '{"deep": true}', key="a", from_service="shop")
    put(inbox, "{}", key="b", from_service="shop")
    dispatch(inbox, partner, mode="xmlrpc", method="order", reply=True)
    assert [(key, body) for _, _, key, _, body, _ in sent(inbox)] == [("b", b"7")]
    assert waiting(inbox) == ["a"]


def test_a_reply_that_is_too_large_is_a_failure(inbox: Dsn, partner: Partner) -> None:
    async def answer(got: Got) -> Reply:
        return 200, {}, bytes((1 << 20) + (got.key == "b"))

    partner.answer = answer
    put(inbox, "1", key="a", from_service="shop")
    put(inbox, "2", key="b", from_service="shop")
    assert dispatch(inbox, partner, reply=True).summary.exit_code == 75
    assert waiting(inbox) == ["b"]
    assert len(sent(inbox)) == 1


def test_a_reply_that_the_database_refuses_makes_a_dead_letter_and_others_go_on(
    inbox: Dsn, partner: Partner
) -> None:
    echo(partner)
    with connect(inbox) as connection:
        connection.execute(
            "ALTER TABLE saf.outbox ADD CONSTRAINT narrow CHECK (key <> 'b') NOT VALID"
        )
    for key in "abc":
        put(inbox, "1", key=key, from_service="shop")
    assert dispatch(inbox, partner, reply=True).summary.exit_code == 1
    assert sorted(key for _, _, key, *_ in sent(inbox)) == ["a", "c"]
    assert dead(inbox) == [("1", "failed")]
    with connect(inbox) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    assert error.startswith("its reply is refused: ")


def test_what_a_call_of_xml_rpc_returns_is_a_reply_in_json(inbox: Dsn, partner: Partner) -> None:
    partner.always(200, dumps(({"number": 7},), methodresponse=True).encode())
    put(inbox, "{}", key="a", from_service="shop")
    dispatch(inbox, partner, mode="xmlrpc", method="order", reply=True)
    ((*_, body, headers),) = sent(inbox)
    assert (body, headers["content-type"]) == (b'{"number": 7}', "application/json")


# Dialogs


@pytest.fixture
def shop(app: Dsn, mom: Dsn) -> Dsn:
    dialogs.prepare(app, mom)
    with connect(app) as connection, connect(mom) as other:
        for one in (connection, other):
            saf.create_message_type(one, "question")
            saf.create_message_type(one, "answer")
            saf.create_contract(one, "asking", {"question": "initiator", "answer": "target"})
    return app


def talk(shop: Dsn, mom: Dsn, partner: Partner, **more: Any) -> Dispatcher:
    """What the shop has said goes to the endpoint, and the answers go back."""
    endpoint = settings(partner, **more).model_copy(update={"subscription": WAREHOUSE})
    one = Dispatcher("partner", endpoint, mom)
    dialogs.forward(shop, mom)
    run([one], drain=True)
    dialogs.forward(shop, mom)
    return one


def test_a_probe_that_falls_on_a_dialog_for_somebody_else_is_followed_by_another_one(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    partner.always(503)
    dialog = dialogs.begin(shop, "1")
    # in its own shard the dialog would wait, unread, until the batch of the message has an end
    its_shard = shard_of(str(dialog.conversation_id), DEFAULT_SHARDS)
    with connect(mom) as connection:
        key = next(one for one in "ab" if shard_of(one, DEFAULT_SHARDS) != its_shard)
        connection.execute(STORE, [WAREHOUSE, key])
    endpoint = settings(partner, breaker_failures=1, max_in_flight=1)
    endpoint = endpoint.model_copy(update={"subscription": WAREHOUSE})
    with dispatching(Dispatcher("partner", endpoint, mom)):
        until(lambda: state(mom) == "open")
        dialogs.forward(shop, mom)

        def left_to_a_worker() -> bool:
            let_probes_be_due(mom)
            with connect(mom) as connection:
                return fetch(connection, LEFT_TO_A_WORKER) == [(1,)]

        until(left_to_a_worker)
        partner.answer = None

        def is_up() -> bool:
            let_probes_be_due(mom)
            let_lanes_be_due(mom)
            return bool(partner.accepted)

        until(is_up)
    assert [got.body for got in partner.accepted] == [b"plain"]


def test_a_message_of_a_dialog_is_a_probe_where_the_endpoint_replies(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    partner.always(503)
    dialogs.begin(shop, "1")
    more = {"reply": True, "breaker_failures": 1}
    talk(shop, mom, partner, **more)
    assert state(mom) == "open"
    echo(partner)
    let_probes_be_due(mom)
    assert talk(shop, mom, partner, **more).exit_code == 0
    assert state(mom) == "closed"
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ['{"got": 1}']


def test_an_endpoint_answers_on_the_dialog(shop: Dsn, mom: Dsn, partner: Partner) -> None:
    echo(partner)
    dialog = dialogs.begin(shop, "1", "2", "3")
    talk(shop, mom, partner, reply=True)
    answers = [f'{{"got": {number}}}' for number in (1, 2, 3)]
    assert dialogs.said(dialogs.receive(shop, SHOP)) == answers
    assert [got.key for got in partner.accepted] == [str(dialog.conversation_id)] * 3
    dialogs.say(shop, dialog, "4")
    dialogs.end(shop, dialog)
    talk(shop, mom, partner, reply=True)
    # what the other end has ended is ended here too, and no endpoint hears of that
    assert dialogs.states(mom) == ["closed"]
    assert [got.body for got in partner.accepted] == [b"1", b"2", b"3", b"4"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]


def test_a_dialog_ends_with_the_reply_where_its_contract_is_for_one(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    echo(partner)
    with shop.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, from_service=SHOP, to_service=WAREHOUSE, contract="asking"
        )
        dialog.send(connection, "1", message_type="question")
    more = {"reply": True, "reply_type": "answer", "one_reply": ("asking",)}
    talk(shop, mom, partner, **more)
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ['{"got": 1}', dialogs.END]


def test_a_dialog_whose_answer_cannot_be_stored_now_is_answered_later(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    echo(partner)
    dialogs.begin(shop, "1")
    with connect(mom) as connection:
        connection.execute(BUSY)
    with pytest.raises(saf.Unavailable):
        talk(shop, mom, partner, reply=True)
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER busy ON saf.outbox")
    talk(shop, mom, partner, reply=True)
    assert dead(mom) == []
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ['{"got": 1}']


def test_an_answer_that_the_contract_does_not_allow_fails_the_dialog_at_both_ends(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    echo(partner)
    with shop.connect(role="test") as connection:
        dialog = saf.begin_dialog(
            connection, from_service=SHOP, to_service=WAREHOUSE, contract="asking"
        )
        dialog.send(connection, "1", message_type="question")
    done = talk(shop, mom, partner, reply=True, reply_type="question")
    assert done.summary.exit_code == 1
    assert dead(mom) == [("1", "failed")]
    (error,) = dialogs.receive(shop, SHOP)
    assert error.message_type == dialogs.ERROR


def test_an_endpoint_that_rejects_a_message_fails_the_dialog(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    partner.always(422, b"no such order")
    dialogs.begin(shop, "1", "2")
    assert talk(shop, mom, partner, reply=True).summary.exit_code == 1
    assert len(partner.begun) == 1
    assert dead(mom) == [("1", "rejected")]
    (error,) = dialogs.receive(shop, SHOP)
    assert error.message_type == dialogs.ERROR


def test_a_large_message_of_a_dialog_is_sent_whole(shop: Dsn, mom: Dsn, partner: Partner) -> None:
    async def answer(got: Got) -> Reply:
        return 200, JSON, json.dumps(len(got.body)).encode()

    partner.answer = answer
    dialog = dialogs.begin(shop)
    with shop.connect(role="test") as connection:
        dialog.send(connection, b"x" * 5000, fragment_bytes=1000)
        dialog.send(connection, b"y")
    talk(shop, mom, partner, reply=True)
    assert [got.body for got in partner.accepted] == [b"x" * 5000, b"y"]
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ["5000", "1"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.fragment") == [(0,)]


def test_a_message_of_a_dialog_waits_for_an_earlier_one_and_a_repeated_one_is_dropped(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    echo(partner)
    dialog = dialogs.begin(shop)
    dialogs.put(mom, dialog, 2, "2")
    talk(shop, mom, partner, reply=True)
    assert partner.begun == []
    dialogs.put(mom, dialog, 1, "1")
    dialogs.put(mom, dialog, 1, "1")
    talk(shop, mom, partner, reply=True)
    assert [got.body for got in partner.accepted] == [b"1", b"2"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT sum(messages) FROM saf.dropped") == [(1,)]


def test_a_message_of_a_dialog_that_failed_is_tried_again_and_answered_once(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    partner.always(500)
    dialogs.begin(shop, "1", "2")
    assert talk(shop, mom, partner, reply=True).exit_code == 75
    echo(partner)
    with connect(mom) as connection:
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    talk(shop, mom, partner, reply=True)
    assert [got.body for got in partner.accepted] == [b"1", b"2"]
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ['{"got": 1}', '{"got": 2}']


def test_what_has_waited_for_somebody_who_replies_is_sent_once_the_endpoint_does(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    echo(partner)
    dialogs.begin(shop, "1", "2")
    talk(shop, mom, partner)
    assert partner.begun == []
    talk(shop, mom, partner, reply=True)
    assert dialogs.said(dialogs.receive(shop, SHOP)) == ['{"got": 1}', '{"got": 2}']


def test_of_what_a_worker_has_left_for_handlers_all_but_dialogs_is_sent(
    shop: Dsn, mom: Dsn, partner: Partner
) -> None:
    def waits() -> list[tuple[Any, ...]]:
        with connect(mom) as connection:
            return fetch(
                connection, "SELECT subject, error, awaits_handler FROM saf.backoff ORDER BY error"
            )

    dialog = dialogs.begin(shop, "1")
    dialogs.forward(shop, mom)
    with connect(mom) as connection:
        connection.execute(STORE, [WAREHOUSE, "a"])
    worker = saf.Worker(mom, WAREHOUSE)

    @worker.handler("OrderPaid")
    def handle(message: saf.Received, _: object) -> None:
        raise AssertionError(message)

    with suppress(saf.SafError):
        worker.drain()
    before = waits()
    of_dialog = [row for row in before if row[0] == str(dialog.conversation_id)]
    assert len(before) == 2
    assert len(of_dialog) == 1
    talk(shop, mom, partner)
    assert [got.body for got in partner.accepted] == [b"plain"]
    assert waits() == of_dialog
