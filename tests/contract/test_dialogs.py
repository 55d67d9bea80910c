"""Dialogs: two-way, in order, exactly once, and ended at both ends."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest

import saf
from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.errors import (
    DialogElsewhere,
    DialogEnded,
    DialogError,
    DialogNotFound,
    InvalidMessage,
    NoSuchContract,
    NoSuchService,
)
from tests.dialogs import (
    END,
    ERROR,
    SHOP,
    WAREHOUSE,
    begin,
    end,
    forward,
    prepare,
    put,
    receive,
    said,
    say,
    states,
)
from tests.pipeline import connect

every_postgresql = pytest.mark.every_postgresql


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def target(mom: Dsn) -> saf.Dialog:
    """The only end there."""
    with connect(mom) as connection:
        ((handle,),) = fetch(connection, "SELECT handle FROM saf.conversation")
        return saf.open_dialog(connection, handle)


# There and back


@every_postgresql
def test_a_dialog_goes_there_and_back_and_is_over_when_both_ends_have_ended(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "an order", "and a note")
    assert states(app) == ["conversing"]
    forward(app, mom)

    def reply(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        assert message.dialog.conversation_id == dialog.conversation_id
        message.dialog.send(connection, f"got {message.text()}")

    assert said(receive(mom, WAREHOUSE, reply)) == ["an order", "and a note"]
    assert states(mom) == ["conversing"]
    forward(app, mom)
    replies = receive(app, SHOP)
    assert said(replies) == ["got an order", "got and a note"]
    assert {one.dialog and one.dialog.handle for one in replies} == {dialog.handle}
    end(app, dialog)
    assert states(app) == ["disconnected_outbound"]
    forward(app, mom)
    (last,) = receive(mom, WAREHOUSE)
    assert said([last]) == [END]
    assert states(mom) == ["disconnected_inbound"]
    assert last.dialog is not None
    end(mom, last.dialog)
    assert states(mom) == ["closed"]
    forward(app, mom)
    assert receive(app, SHOP) == []
    assert states(app) == ["closed"]


def test_what_a_transaction_says_that_rolls_back_was_never_said(app: Dsn, mom: Dsn) -> None:
    with app.connect(role="test") as connection:
        saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        connection.rollback()
    dialog = begin(app, "1")
    with app.connect(role="test") as connection:
        dialog.send(connection, "never")
        connection.rollback()
    say(app, dialog, "2")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1", "2"]


def test_a_dialog_is_picked_up_again_by_its_handle(app: Dsn, mom: Dsn) -> None:
    handle = begin(app, "1", contract=None).handle
    with app.connect(role="test") as connection:
        again = saf.open_dialog(connection, handle)
        again.send(connection, "2")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1", "2"]


@pytest.mark.parametrize("kind", ["session", "connection", "cursor"])
def test_whatever_connection_the_application_has_will_do(app: Dsn, mom: Dsn, kind: str) -> None:
    from sqlalchemy.orm import Session

    if kind == "cursor":
        with app.connect(role="test") as connection, connection.cursor() as cursor:
            dialog = saf.begin_dialog(
                cursor, from_service=SHOP, to_service=WAREHOUSE, contract="ordering", lifetime=60
            )
            dialog.send(cursor, {"amount": 1}, message_type="order")
            dialog.start_timer(cursor, 60)
            dialog.end_with_error(cursor, 1, "changed: my mind")
    else:
        engine = app.engine()
        with Session(engine) as session, session.begin():
            conn = session if kind == "session" else session.connection()
            dialog = saf.begin_dialog(
                conn, from_service=SHOP, to_service=WAREHOUSE, contract="ordering", lifetime=60
            )
            dialog.send(conn, {"amount": 1}, message_type="order")
            dialog.start_timer(conn, 60)
            saf.open_dialog(conn, dialog.handle).end_with_error(conn, 1, "changed: my mind")
        engine.dispose()
    forward(app, mom)
    (message,) = receive(mom, WAREHOUSE)
    assert message.json() == {"code": 1, "text": "changed: my mind"}


def test_the_end_that_a_message_is_for_is_only_the_services_own_subscription(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as connection:
        create_subscription(connection, "audit", service=WAREHOUSE)
    begin(app, "1", "2")
    forward(app, mom)
    heard = receive(mom, "audit")
    assert said(heard) == ["1", "2"]
    assert {one.dialog for one in heard} == {None}
    assert states(mom) == []
    assert said(receive(mom, WAREHOUSE)) == ["1", "2"]


def test_a_service_holds_dialogs_with_itself(app: Dsn) -> None:
    dialog = begin(app, "1", to_service=SHOP)
    forward(app, app)

    def reply(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        if not message.dialog.is_initiator:
            message.dialog.send(connection, "2")

    receive(app, SHOP, reply)
    forward(app, app)
    (answer,) = receive(app, SHOP, reply)
    assert answer.dialog is not None
    assert answer.dialog.handle == dialog.handle
    assert sorted(states(app)) == ["conversing", "conversing"]


# Order, and once


@every_postgresql
def test_a_repeat_is_dropped_and_what_is_ahead_waits_for_what_is_missing(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app)
    for sequence in (1, 1, 3, 4, 6, 3):
        put(mom, dialog, sequence, str(sequence))
    begin(app, "of another")
    forward(app, mom)
    assert sorted(said(receive(mom, WAREHOUSE))) == ["1", "of another"]
    put(mom, dialog, 2, "2")
    put(mom, dialog, 1, "1")
    assert said(receive(mom, WAREHOUSE)) == ["2", "3", "4"]
    assert receive(mom, WAREHOUSE) == []
    put(mom, dialog, 7, "7")
    put(mom, dialog, 5, "5")
    assert said(receive(mom, WAREHOUSE)) == ["5", "6", "7"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []
        assert fetch(connection, "SELECT FROM saf.backoff") == []


@pytest.mark.parametrize("max_messages", [1, 2, 100])
def test_any_order_of_arrival_is_received_in_the_order_of_sending(
    app: Dsn, mom: Dsn, max_messages: int
) -> None:
    dialog = begin(app)
    for sequence in (9, 2, 8, 3, 3, 5, 1, 7, 6, 4, 8, 1):
        put(mom, dialog, sequence, str(sequence))
    received = receive(mom, WAREHOUSE, max_messages=max_messages)
    assert said(received) == [str(number) for number in range(1, 10)]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


def test_a_first_message_that_comes_again_does_not_begin_a_closed_dialog_anew(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    end(app, dialog)
    forward(app, mom)
    (_, last) = receive(mom, WAREHOUSE)
    assert last.dialog is not None
    end(mom, last.dialog)
    put(mom, dialog, 1, "1")
    put(mom, dialog, 2, "", message_type=END)
    assert receive(mom, WAREHOUSE) == []
    assert states(mom) == ["closed"]


def test_what_is_set_aside_was_not_received(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1", "2", "3")
    end(app, dialog)
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        first, second, *_ = delivery
        delivery.park(second, "not now")
    assert said([first]) == ["1"]
    assert states(mom) == ["conversing"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT receive_sequence FROM saf.conversation") == [(1,)]
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
    assert said(receive(mom, WAREHOUSE)) == ["2", "3", END]
    assert states(mom) == ["disconnected_inbound"]


# Ending


def test_after_the_other_end_has_ended_nothing_can_be_sent_until_one_ends_too(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    end(app, dialog)
    forward(app, mom)
    receive(mom, WAREHOUSE)
    mine = target(mom)
    with mom.connect(role="test") as connection:
        with pytest.raises(DialogEnded, match="the other end has ended it: end it here too") as no:
            mine.send(connection, "2")
        assert no.value.state == "disconnected_inbound"
    assert states(mom) == ["disconnected_inbound"]
    end(mom, mine)
    assert states(mom) == ["closed"]


def test_after_this_end_has_ended_nothing_can_be_sent_and_what_comes_is_dropped(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    say(mom, target(mom), "too late", "this too")
    end(app, dialog)
    with app.connect(role="test") as connection:
        with pytest.raises(DialogEnded, match="this end has ended it"):
            dialog.send(connection, "2")
        with pytest.raises(DialogEnded, match="this end has ended it"):
            dialog.end(connection)
    forward(app, mom)
    assert receive(app, SHOP) == []
    assert states(app) == ["disconnected_outbound"]
    receive(mom, WAREHOUSE)
    end(mom, target(mom))
    forward(app, mom)
    assert receive(app, SHOP) == []
    assert states(app) == ["closed"]


def test_a_dialog_that_ends_before_it_has_sent_anything_bothers_nobody(app: Dsn) -> None:
    end(app, begin(app))
    with app.connect(role="test") as connection:
        begin(app).end_with_error(connection, 1, "never mind")
    assert states(app) == ["closed", "closed"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT FROM saf.outbox") == []


def test_ending_with_an_error_drops_pending_sends_and_the_peer_gets_code_and_text(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1"]
    say(app, dialog, "2", "3")
    with app.connect(role="test") as connection:
        dialog.end_with_error(connection, 17, "no such article")
    assert states(app) == ["closed"]
    put(mom, dialog, 7, "after it")
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.message_type == ERROR
    assert error.json() == {"code": 17, "text": "no such article"}
    assert states(mom) == ["error"]
    mine = target(mom)
    with (
        mom.connect(role="test") as connection,
        pytest.raises(DialogEnded, match=r"it has failed .17: no such article.: end it"),
    ):
        mine.send(connection, "?")
    end(mom, mine)
    assert states(mom) == ["closed"]
    forward(app, mom)
    assert receive(app, SHOP) == []


def test_an_error_does_not_wait_for_what_is_missing(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    put(mom, dialog, 3, "3")
    assert receive(mom, WAREHOUSE) == []
    put(mom, dialog, 5, '{"code": 1, "text": "no"}', message_type=ERROR)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    put(mom, dialog, 2, "2")
    assert receive(mom, WAREHOUSE) == []
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


# What cannot be


def test_a_dialog_begins_from_a_service_that_lives_here_under_a_contract_that_is_known(
    app: Dsn,
) -> None:
    with app.connect(role="test") as connection:
        with pytest.raises(NoSuchService, match="service 'nobody' does not live in database"):
            saf.begin_dialog(connection, from_service="nobody", to_service=WAREHOUSE)
        with pytest.raises(NoSuchContract, match="contract 'barter' is not known in database"):
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE, contract="barter")
        with pytest.raises(DialogNotFound):
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE, related=uuid4())
        with pytest.raises(DialogError, match="a lifetime of 0 seconds"):
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE, lifetime=0)
        with pytest.raises(InvalidMessage, match="service"):
            saf.begin_dialog(connection, from_service=SHOP, to_service="")


def test_a_handle_that_nobody_knows_and_one_of_another_database_are_told_apart(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    with mom.connect(role="test") as connection:
        with pytest.raises(DialogNotFound, match=r"has no conversation .* of another database"):
            saf.open_dialog(connection, dialog.handle)
        with pytest.raises(DialogElsewhere, match=r"lives at broker .*, and this connection is to"):
            dialog.send(connection, "2")


def test_reserved_types_and_codes_are_not_the_applications(app: Dsn) -> None:
    dialog = begin(app)
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage, match="is for saf's own"):
            dialog.send(connection, b"", message_type=END)
        for code in (-1, 0, 2**31):
            with pytest.raises(DialogError, match="an application's are from 1 to 2147483647"):
                dialog.end_with_error(connection, code, "over")
        dialog.end_with_error(connection, 2**31 - 1, "over")
    assert states(app) == ["closed"]
