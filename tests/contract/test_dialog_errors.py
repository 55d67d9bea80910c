"""Errors reach both ends: of lifetimes, poison messages and broken contracts; and timers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.dialogs import conversations
from saf.dialogs.conversations import fail
from saf.dialogs.statements import TELL, Code
from saf.errors import (
    ConfigurationError,
    DialogEnded,
    DialogExpired,
    InvalidMessage,
    SchemaViolation,
    TypeNotInContract,
    UsageError,
    WrongDirection,
)
from saf.operating.decide import discard, retry
from saf.routing.routes import add_route, add_topic
from saf.setaside.dropped import dropped
from saf.setaside.isolation import MAX_ERROR
from saf.setaside.selection import DeadLetters
from saf.testing.clock import let_time_pass
from tests.dialogs import (
    END,
    ERROR,
    REFUSES,
    SHOP,
    TIMER,
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
from tests.pipeline import Cycle, connect, forwarding_rules, run
from tests.receivers import dead, let_keys_be_due


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)


def pass_seconds(seconds: float, *dsns: Dsn) -> None:
    for dsn in dsns:
        let_time_pass(dsn, timedelta(seconds=seconds))


# Lifetime


def test_at_the_end_of_its_lifetime_both_ends_get_an_error_and_operations_fail_until_it_is_ended(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1", lifetime=600)
    forward(app, mom)
    (message,) = receive(mom, WAREHOUSE)
    assert message.dialog is not None
    pass_seconds(590, app, mom)
    assert receive(app, SHOP) == receive(mom, WAREHOUSE) == []
    say(app, dialog, "2")
    pass_seconds(10, app, mom)
    for dsn, one in ((app, dialog), (mom, message.dialog)):
        with (
            dsn.connect(role="test") as connection,
            pytest.raises(DialogExpired, match="was over at"),
        ):
            one.send(connection, "3")
    forward(app, mom)
    for dsn, service, one in ((app, SHOP, dialog), (mom, WAREHOUSE, message.dialog)):
        (error,) = receive(dsn, service)
        assert error.message_type == ERROR
        assert error.json() == {"code": Code.EXPIRED, "text": "the lifetime is over"}
        assert error.dialog == one
        assert states(dsn) == ["error"]
        with dsn.connect(role="test") as connection, pytest.raises(DialogExpired):
            one.send(connection, "4")
        end(dsn, one)
        assert states(dsn) == ["closed"]
    forward(app, mom)
    assert receive(app, SHOP) == receive(mom, WAREHOUSE) == []


def test_a_dialog_whose_ends_have_ended_in_time_hears_nothing_of_its_lifetime(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1", lifetime=600)
    end(app, dialog)
    forward(app, mom)
    (*_, last) = receive(mom, WAREHOUSE)
    assert last.dialog is not None
    end(mom, last.dialog)
    forward(app, mom)
    receive(app, SHOP)
    pass_seconds(601, app, mom)
    assert receive(app, SHOP) == receive(mom, WAREHOUSE) == []
    assert states(app) == states(mom) == ["closed"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []


def test_a_dialog_that_arrives_after_its_lifetime_is_an_error_there(app: Dsn, mom: Dsn) -> None:
    begin(app, "1", lifetime=10)
    pass_seconds(11, app, mom)
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    assert states(mom) == ["error"]


def test_to_end_is_possible_also_after_the_lifetime(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1", lifetime=10)
    pass_seconds(11, app, mom)
    end(app, dialog)
    assert states(app) == ["closed"]
    assert receive(app, SHOP) == []


# Timers


def test_a_timer_is_a_message_to_oneself_and_a_newer_one_replaces_it(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1")
    with app.connect(role="test") as connection:
        dialog.start_timer(connection, 60)
    pass_seconds(59, app)
    assert receive(app, SHOP) == []
    with app.connect(role="test") as connection:
        dialog.start_timer(connection, 60)
    pass_seconds(59, app)
    assert receive(app, SHOP) == []
    pass_seconds(1, app)
    (timer,) = receive(app, SHOP)
    assert timer.message_type == TIMER
    assert timer.dialog == dialog
    pass_seconds(600, app)
    assert receive(app, SHOP) == []
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1"]


def test_a_timer_that_is_stopped_or_whose_end_has_ended_is_not_heard_of(app: Dsn) -> None:
    stopped, ended = begin(app, "1"), begin(app, "1")
    with app.connect(role="test") as connection:
        stopped.start_timer(connection, 60)
        ended.start_timer(connection, 60)
        stopped.stop_timer(connection)
        ended.end(connection)
        with pytest.raises(DialogEnded):
            ended.start_timer(connection, 60)
    pass_seconds(61, app)
    assert receive(app, SHOP) == []


def test_a_timer_that_was_started_stays_when_a_later_message_is_set_aside(
    app: Dsn, mom: Dsn
) -> None:
    begin(app, "1", "2")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        first, second = delivery
        assert first.dialog is not None
        first.dialog.start_timer(delivery.connection, 0)
        delivery.park(second, "not now")
    let_keys_be_due(mom)
    assert said(receive(mom, WAREHOUSE)) == ["2", TIMER]


# Contracts


def test_a_type_outside_the_contract_or_from_the_wrong_side_is_rejected(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, contract="ordering")
    with app.connect(role="test") as connection:
        with pytest.raises(TypeNotInContract, match="has no message type 'gift', only 'cancel', "):
            dialog.send(connection, b"", message_type="gift")
        with pytest.raises(TypeNotInContract, match="has no message type None"):
            dialog.send(connection, b"")
        with pytest.raises(WrongDirection, match="'delivery' is sent by the target only"):
            dialog.send(connection, b"", message_type="delivery")
        with pytest.raises(SchemaViolation, match=r"at \$\.amount: 'many' is not of") as wrong:
            dialog.send(connection, {"amount": "many"}, message_type="order")
        assert wrong.value.path == "$.amount"
        with pytest.raises(SchemaViolation, match=r"at \$: not JSON"):
            dialog.send(connection, b"{", message_type="order")
        with pytest.raises(SchemaViolation, match="expected no body, got 1 bytes"):
            dialog.send(connection, b"x", message_type="cancel")
        dialog.send(connection, {"amount": 2}, message_type="order")
        dialog.send(connection, b"", message_type="cancel")
        dialog.send(connection, "by the way", message_type="note")
    forward(app, mom)
    received = receive(mom, WAREHOUSE)
    assert [one.message_type for one in received] == ["order", "cancel", "note"]
    mine = received[0].dialog
    assert mine is not None
    with mom.connect(role="test") as connection:
        with pytest.raises(WrongDirection, match="'order' is sent by the initiator only"):
            mine.send(connection, {"amount": 2}, message_type="order")
        mine.send(connection, b"...", message_type="delivery")
    forward(app, mom)
    assert [one.message_type for one in receive(app, SHOP)] == ["delivery"]


def test_what_breaks_the_contract_on_arrival_is_an_error_at_both_ends(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, contract="ordering")
    with app.connect(role="test") as connection:
        dialog.send(connection, {"amount": 1}, message_type="order")
    forward(app, mom)
    put(mom, dialog, 2, '{"amount": "many"}', message_type="order")
    put(mom, dialog, 3, '{"amount": 3}', message_type="order")
    received = receive(mom, WAREHOUSE)
    assert [one.message_type for one in received] == ["order", ERROR]
    forward(app, mom)
    (error,) = receive(app, SHOP)
    for said_there in (received[1], error):
        assert said_there.json()["code"] == Code.VIOLATION
        assert "at $.amount: 'many' is not of type 'integer'" in said_there.json()["text"]
    assert states(app) == states(mom) == ["error"]
    assert dead(mom) == [('{"amount": "many"}', "rejected")]


def test_a_contract_that_the_target_does_not_know_is_an_error_at_both_ends(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        saf.create_contract(connection, "ordering", {"gift": "any"}, version=2)
    dialog = begin(app, contract="ordering")
    with app.connect(role="test") as connection:
        dialog.send(connection, b"", message_type="gift")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    forward(app, mom)
    (error,) = receive(app, SHOP)
    assert error.json() == {
        "code": Code.NO_CONTRACT,
        "text": "contract 'ordering' version 2 is not known at the target",
    }


def test_a_version_never_changes_and_a_dialog_keeps_the_one_that_it_began_with(app: Dsn) -> None:
    dialog = begin(app, contract="ordering")
    with connect(app) as connection:
        assert not saf.create_message_type(connection, "cancel", validation="empty")
        with pytest.raises(ConfigurationError, match="Create version 2 instead"):
            saf.create_message_type(connection, "cancel", validation="json")
        with pytest.raises(ConfigurationError, match="Create version 2 instead"):
            saf.create_contract(connection, "ordering", {"cancel": "any"})
        assert saf.create_message_type(connection, "cancel", version=2, validation="json")
        assert saf.create_contract(connection, "ordering", {"cancel": "any"}, version=2)
        assert not saf.create_contract(connection, "ordering", {"cancel": "any"}, version=2)
        again: dict[str, Any] = {"name": "ordering", "types": {"cancel": "any"}, "version": 2}
        assert not saf.create_contract(connection, **again, type_versions={"cancel": 2})
        with pytest.raises(ConfigurationError, match="Create version 3 instead"):
            saf.create_contract(connection, **again, type_versions={"cancel": 1})
    newer = begin(app, contract="ordering")
    with app.connect(role="test") as connection:
        saf.open_dialog(connection, dialog.handle).send(connection, b"", message_type="cancel")
        newer.send(connection, {}, message_type="cancel")
        with pytest.raises(TypeNotInContract, match="contract 'ordering' version 2 has no"):
            newer.send(connection, {}, message_type="order")


@pytest.mark.parametrize(
    ("definition", "said_"),
    [
        ({"name": "saf/mine"}, "is for saf's own"),
        ({"name": ""}, "1 to 255 bytes of printable"),
        ({"name": "a", "version": 0}, "version 0 is less than 1"),
        ({"name": "a", "validation": "xml"}, "one of none, empty, json, json_schema"),
        ({"name": "a", "schema": {}}, "a schema belongs to validation 'json_schema'"),
        (
            {"name": "a", "validation": "json_schema", "schema": {"type": "number!"}},
            r"no JSON Schema: at \$\.type",
        ),
        *(
            (
                {"name": "a", "validation": "json_schema", "schema": schema},
                "no JSON Schema: it refers to '.*', which is not there",
            )
            for schema in (
                {"$ref": "#/$defs/nothing"},
                {"$ref": "#/type/0x", "type": "object"},
                {"properties": {"a": {"items": {"$ref": "https://example.invalid/schema"}}}},
                {"$id": "https://example.invalid/a", "$defs": {"b": {"$dynamicRef": "#c"}}},
            )
        ),
    ],
)
def test_a_message_type_that_cannot_be_is_refused(
    app: Dsn, definition: dict[str, Any], said_: str
) -> None:
    with connect(app) as connection, pytest.raises(UsageError, match=said_):
        saf.create_message_type(connection, **definition)


def test_a_schema_may_refer_to_itself_and_to_the_drafts_of_json_schema(app: Dsn) -> None:
    schema = {
        "$id": "https://example.invalid/tree",
        "properties": {
            "nodes": {"items": {"$ref": "tree"}},
            "name": {"$ref": "#/$defs/name"},
            "schema": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        },
        "$defs": {"name": {"type": "string"}},
    }
    with connect(app) as connection:
        saf.create_message_type(connection, "tree", validation="json_schema", schema=schema)
        saf.create_contract(connection, "trees", {"tree": "any"})
    dialog = begin(app, contract="trees")
    with app.connect(role="test") as connection:
        dialog.send(connection, {"nodes": [{"name": "a"}]}, message_type="tree")
        with pytest.raises(SchemaViolation, match=r"nodes\[0\]\.name"):
            dialog.send(connection, {"nodes": [{"name": 1}]}, message_type="tree")


@pytest.mark.parametrize(
    ("schema", "body"),
    [('{"$ref": "#/nowhere"}', b"1"), ('{"multipleOf": 0.5}', b"1e400")],
    ids=["a reference to nothing", "a number that no computer divides"],
)
def test_a_body_that_its_schema_cannot_check_fails_its_dialog_and_holds_nobody_up(
    app: Dsn, mom: Dsn, schema: str, body: bytes
) -> None:
    """The schema was written before it was refused, or by somebody else."""
    with connect(mom) as connection:
        connection.execute("UPDATE saf.message_type SET schema = %s WHERE name = 'order'", [schema])
    dialog = begin(app, contract="ordering")
    hello = '{"saf-dialog": {"contract": "ordering", "version": 1}}'
    put(mom, dialog, 1, body, message_type="order", headers=hello)
    put(mom, begin(app), 1, "other", key=str(dialog.conversation_id))
    assert sorted(said(receive(mom, WAREHOUSE))) == ["other", ERROR]
    ((rejected, reason),) = dead(mom)
    assert (rejected.encode(), reason) == (body, "rejected")
    with connect(mom) as connection:
        assert "cannot be checked" in str(fetch(connection, "SELECT error FROM saf.dead_letter"))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (rb'{"a\u0000b": "one"}', "['a\ufffdb']"),
        (rb'{"a\ud800b": "one"}', "['a?b']"),
        (b'{"many": [%s0]}' % (b"0, " * 100_000), "$.many: [0, 0"),
    ],
    ids=["NUL", "half of a character", "long"],
)
def test_however_a_violation_reads_the_initiator_gets_its_error_and_the_neighbours_come_once(
    app: Dsn, mom: Dsn, body: bytes, told: str
) -> None:
    schema = '{"additionalProperties": {"type": "integer"}}'
    with connect(mom) as connection:
        connection.execute("UPDATE saf.message_type SET schema = %s WHERE name = 'order'", [schema])
    dialog = begin(app, contract="ordering")
    hello = '{"saf-dialog": {"contract": "ordering", "version": 1}}'
    put(mom, begin(app), 1, "before")
    put(mom, dialog, 1, body, message_type="order", headers=hello)
    put(mom, begin(app), 1, "after")
    assert sorted(said(receive(mom, WAREHOUSE))) == ["after", "before", ERROR]
    with connect(mom) as connection:
        ((reason, error),) = fetch(connection, "SELECT reason, error FROM saf.dead_letter")
    assert reason == "rejected"
    assert told in error
    assert len(error) <= MAX_ERROR
    forward(app, mom)
    (at_the_initiator,) = receive(app, SHOP)
    assert at_the_initiator.dialog == dialog
    assert at_the_initiator.json() == {"code": Code.VIOLATION, "text": error}


# Poison


def test_a_conversation_that_is_purged_while_it_is_to_fail_stops_nobody(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialog = begin(app)

    def purged(connection: Any, handle: UUID) -> saf.Dialog:
        with connect(app) as other:
            other.execute("DELETE FROM saf.conversation")
        return saf.open_dialog(connection, handle)

    monkeypatch.setattr(conversations, "open_dialog", purged)
    with connect(app) as connection:
        fail(connection, dialog.conversation_id, False, Code.GIVEN_UP, "given up")
        assert fetch(connection, "SELECT FROM saf.outbox") == []


def test_five_rollbacks_on_one_message_end_its_conversation_with_an_error_and_others_go_on(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "poison", "after it")
    begin(app, "fine")
    forward(app, mom)
    attempts: list[str] = []

    def handle(_: psycopg.Connection[Any], message: saf.Received) -> None:
        if message.message_type == ERROR:
            return
        attempts.append(message.text())
        if message.text() == "poison":
            raise ZeroDivisionError

    for _ in range(12):
        with suppress(ZeroDivisionError):
            receive(mom, WAREHOUSE, handle)
        let_keys_be_due(mom)
    assert attempts.count("poison") == 5
    assert "after it" not in attempts
    assert "fine" in attempts
    assert sorted(states(mom)) == ["conversing", "error"]
    forward(app, mom)
    (error,) = receive(app, SHOP)
    assert error.dialog == dialog
    assert error.json() == {"code": Code.QUARANTINED, "text": "message 1 could not be handled"}
    assert dead(mom) == [("poison", "failed")]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.parked") == []
        assert fetch(connection, "SELECT FROM saf.backoff") == []


def test_a_worker_ends_what_the_other_end_has_ended_and_gives_up_what_nobody_handles(
    app: Dsn, mom: Dsn
) -> None:
    worker = saf.Worker(mom, WAREHOUSE, unhandled="dead")
    handled: list[str] = []

    @worker.handler("note")
    def note(message: saf.Received, _: psycopg.Connection[Any]) -> None:
        handled.append(message.text())

    ended, failed, unknown = begin(app), begin(app), begin(app)
    with app.connect(role="test") as connection:
        for dialog in (ended, failed):
            dialog.send(connection, "1", message_type="note")
        unknown.send(connection, "1", message_type="gift")
    forward(app, mom)
    worker.drain()
    with app.connect(role="test") as connection:
        ended.end(connection)
        failed.end_with_error(connection, 1, "no")
    forward(app, mom)
    worker.drain()
    forward(app, mom)
    assert handled == ["1", "1"]
    assert states(mom) == ["closed"] * 3
    assert said(receive(app, SHOP)) == [ERROR]
    assert sorted(states(app)) == ["closed", "closed", "error"]


def test_the_end_of_a_dialog_that_a_handler_has_ended_in_the_same_delivery_fails_nothing(
    app: Dsn, mom: Dsn
) -> None:
    worker = saf.Worker(mom, WAREHOUSE)

    @worker.handler("note")
    def note(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        assert message.dialog is not None
        message.dialog.end(connection)

    dialog = begin(app)
    put(mom, dialog, 1, message_type="note")
    put(mom, dialog, 2, message_type=END)
    assert worker.drain() == 2
    assert states(mom) == ["closed"]
    with connect(mom) as connection:
        assert fetch(connection, "SELECT FROM saf.backoff") == []


def test_an_error_whose_own_handling_fails_is_a_dead_letter_and_no_further_error(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    with app.connect(role="test") as connection:
        dialog.end_with_error(connection, 1, "no")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        delivery.reject(delivery[0], "cannot")
    assert receive(mom, WAREHOUSE) == []
    assert [reason for _, reason in dead(mom)] == ["failed"]
    assert states(mom) == ["error"]


def test_what_comes_after_a_dead_letter_of_its_dialog_counts_as_dropped_also_if_it_comes_with_it(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1", "2", "3", "4")
    begin(app, "other")
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        for message in delivery:
            if message.text() == "2":
                delivery.reject(message, "cannot")
    say(app, dialog, "5")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    with connect(mom) as connection:
        counted = [(one.reason, one.messages) for one in dropped(connection)]
    assert counted == [("ended", 3)]


def test_both_ends_are_told_of_a_dead_letter_that_came_with_an_error_of_its_dialog(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    (first,) = receive(mom, WAREHOUSE)
    assert first.dialog is not None
    say(mom, first.dialog, "bad")
    forward(app, mom)
    told = {"conversation_id": [dialog.conversation_id], "is_initiator": [True]}
    with connect(app) as connection:
        connection.execute(TELL, {**told, "error": ["no route"]})
    with saf.receive(app, SHOP) as delivery:
        assert len(delivery) == 2
        delivery.reject(delivery[0], "cannot")
    (error,) = receive(app, SHOP)
    text = "message 1 could not be handled"
    assert error.json() == {"code": Code.QUARANTINED, "text": text}
    assert states(app) == ["error"]
    with connect(app) as connection:
        assert [(one.reason, one.messages) for one in dropped(connection)] == [("ended", 1)]
    forward(app, mom)
    assert [one.json() for one in receive(mom, WAREHOUSE)] == [error.json()]


def test_a_dead_letter_of_a_dialog_takes_nothing_else_of_its_key_with_it(
    app: Dsn, mom: Dsn
) -> None:
    """A router that names a key gives it to several dialogs, and to other messages."""
    bad, good = begin(app), begin(app)
    for number in (1, 2):
        put(mom, bad, number, f"bad {number}", key="C-1")
        put(mom, good, number, f"good {number}", key="C-1")
    with connect(mom) as connection:
        connection.execute(
            "INSERT INTO saf.inbox (to_service, key, body) VALUES (%s, 'C-1', 'alone')", [WAREHOUSE]
        )
    given: list[str] = []
    with saf.receive(mom, WAREHOUSE) as delivery:
        for message in delivery:
            given.append(message.text())
            if message.text() == "bad 1":
                delivery.reject(message, "cannot")
            elif message.text() == "good 2":
                delivery.park(message, "not yet")
    assert given == ["bad 1", "good 1", "good 2"]
    assert (delivery.handled, delivery.parked) == (1, 2)
    let_keys_be_due(mom)
    received = said(receive(mom, WAREHOUSE))
    received.remove(ERROR)
    assert received == ["good 2", "alone"]
    assert dead(mom) == [("bad 1", "failed")]
    with connect(mom) as connection:
        counted = [(one.reason, one.messages) for one in dropped(connection)]
    assert counted == [("ended", 1)]


def test_an_end_that_has_failed_hears_so_though_the_other_ends_error_comes_with_it(
    app: Dsn, mom: Dsn
) -> None:
    dialog = begin(app, "1")
    forward(app, mom)
    receive(mom, WAREHOUSE)
    with connect(mom) as connection:
        fail(connection, dialog.conversation_id, True, Code.GIVEN_UP, "message 2 was given up")
    with app.connect(role="test") as connection:
        dialog.end_with_error(connection, 17, "sold out")
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.json() == {"code": Code.GIVEN_UP, "text": "message 2 was given up"}


def test_an_end_that_is_set_aside_is_received_again(app: Dsn, mom: Dsn) -> None:
    dialog = begin(app, "1")
    end(app, dialog)
    forward(app, mom)
    with saf.receive(mom, WAREHOUSE) as delivery:
        delivery.park(delivery[1], "not now")
    assert states(mom) == ["conversing"]
    let_keys_be_due(mom)
    assert said(receive(mom, WAREHOUSE)) == [END]
    assert states(mom) == ["disconnected_inbound"]


def test_a_body_too_large_is_refused_before_anything_is_written(app: Dsn) -> None:
    dialog = begin(app)
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage, match="body"):
            dialog.send(connection, b"x" * 11, max_bytes=10)
        dialog.send(connection, b"x" * 10, max_bytes=10)


# Dead letters on the way

HUGE = "X" * 100


@pytest.mark.parametrize("why", ["rejected", "over_size"])
def test_a_dialog_whose_message_is_a_dead_letter_on_its_way_waits_for_a_persons_word(
    app: Dsn, mom: Dsn, why: str
) -> None:
    dialog = _without_the_second(app, mom, why)
    with connect(mom) as connection:
        (there,) = conversations.conversations(connection)
        assert (there.receive_sequence, there.ahead) == (1, 1)
        connection.execute("DROP TRIGGER IF EXISTS refuses ON saf.inbox")
    with connect(app) as connection:
        assert len(retry(connection, DeadLetters(), "mended")) == 1
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [HUGE, "3"]
    say(app, dialog, "4")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["4"]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("why", ["rejected", "over_size"])
def test_a_dialog_whose_message_was_given_up_on_its_way_fails_at_both_ends(
    app: Dsn, mom: Dsn, why: str, ended: bool
) -> None:
    dialog = _without_the_second(app, mom, why)
    if ended:
        end(app, dialog)
    with connect(app) as connection:
        assert len(discard(connection, DeadLetters(), "nobody needs it")) == 1
    forward(app, mom)
    heard = [*receive(mom, WAREHOUSE), *receive(app, SHOP)]
    assert said(heard) == [ERROR] * (2 - ended)
    for error in heard:
        assert error.json()["code"] == Code.GIVEN_UP
        assert (
            f"message 2 was given up by postgres: it was a dead letter on its way, {why}"
            == (error.json()["text"])
        )
    assert states(app) == ["closed" if ended else "error"]
    assert states(mom) == ["error"]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("why", "waiting"), [("rejected", True), ("rejected", False), ("over_size", True)]
)
def test_a_dialog_whose_first_message_was_given_up_fails_at_both_ends_with_all_that_waits_for_it(
    app: Dsn, mom: Dsn, why: str, waiting: bool, ended: bool
) -> None:
    dialog = _without_the_first(app, mom, why)
    if waiting:
        assert receive(mom, WAREHOUSE) == []
        assert parked(mom) == 2
    if ended:
        end(app, dialog)
    _give_up(app, mom, why, 2 - ended)
    assert states(app) == ["closed" if ended else "error"]
    # what waited has ended; what comes together with the Error is overtaken, the End among it
    counts = {"ended": 2 * waiting, "overtaken": 2 * (not waiting) + ended}
    with connect(mom) as connection:
        assert {one.reason: one.messages for one in dropped(connection)} == {
            reason: count for reason, count in counts.items() if count
        }


@pytest.mark.parametrize("ended", [False, True])
def test_a_dialog_whose_first_message_was_given_up_after_its_lifetime_is_over_at_the_target_too(
    app: Dsn, mom: Dsn, ended: bool
) -> None:
    dialog = _without_the_first(app, mom, "rejected", lifetime=600)
    assert receive(mom, WAREHOUSE) == []
    pass_seconds(601, app, mom)
    (expired,) = receive(app, SHOP)
    assert expired.json()["code"] == Code.EXPIRED
    if ended:
        end(app, dialog)
    _give_up(app, mom, "rejected", 1)
    assert states(app) == ["closed" if ended else "error"]


def test_a_first_message_that_is_retried_after_the_lifetime_takes_with_it_what_waits_for_it(
    app: Dsn, mom: Dsn
) -> None:
    _without_the_first(app, mom, "rejected", lifetime=600)
    assert receive(mom, WAREHOUSE) == []
    pass_seconds(601, app, mom)
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER refuses ON saf.inbox")
    with connect(app) as connection:
        assert len(retry(connection, DeadLetters(), "mended")) == 1
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.json()["code"] == Code.EXPIRED
    assert parked(mom) == 0


def test_a_dialog_of_which_nothing_has_come_but_an_error_is_begun_and_failed_by_it(
    app: Dsn, mom: Dsn
) -> None:
    dialog = _without_the_first(app, mom, "rejected", contract="ordering", lifetime=600)
    with app.connect(role="test") as connection:
        dialog.end_with_error(connection, 17, "sold out")
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.json() == {"code": 17, "text": "sold out"}
    assert error.dialog is not None
    assert error.dialog.contract == dialog.contract
    with connect(mom) as connection:
        (there,) = conversations.conversations(connection)
    assert (there.state, there.service, there.far_service) == ("error", WAREHOUSE, SHOP)
    assert there.expires_at is not None
    with connect(app) as connection:
        assert len(discard(connection, DeadLetters(), "nobody needs it")) == 1
    end(mom, error.dialog)
    pass_seconds(601, app, mom)
    forward(app, mom)
    assert receive(mom, WAREHOUSE) == receive(app, SHOP) == []
    assert states(app) == states(mom) == ["closed"]
    assert parked(app) == parked(mom) == 0


def test_the_first_message_that_comes_after_an_error_of_its_dialog_does_not_begin_it_again(
    app: Dsn, mom: Dsn
) -> None:
    dialog = _without_the_first(app, mom, "rejected")
    with app.connect(role="test") as connection:
        dialog.end_with_error(connection, 17, "sold out")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == [ERROR]
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER refuses ON saf.inbox")
    with connect(app) as connection:
        assert len(retry(connection, DeadLetters(), "mended")) == 1
    forward(app, mom)
    assert receive(mom, WAREHOUSE) == []
    assert states(mom) == ["error"]
    assert parked(mom) == 0


def test_subscribers_of_a_monolog_get_an_error_in_place_of_what_was_given_up(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    other = new_broker("other")
    with connect(app) as connection:
        add_topic(connection, WAREHOUSE)
        for there in ("mom", "other"):
            add_route(connection, there, service=WAREHOUSE)
    with connect(other) as connection:
        create_service(connection, WAREHOUSE)
    with connect(mom) as connection:
        connection.execute(REFUSES.format(number=2))
    with app.connect(role="test") as connection:
        monolog = saf.begin_monolog(connection, from_service=SHOP, topic=WAREHOUSE)
        for body in ("1", HUGE, "3"):
            monolog.send(connection, body)
    run(app, mom=mom, other=other)
    assert dead(app) == [(HUGE, "rejected")]
    with connect(app) as connection:
        assert len(discard(connection, DeadLetters(), "nobody needs it")) == 1
    with connect(mom) as connection:
        connection.execute("DROP TRIGGER refuses ON saf.inbox")
    run(app, mom=mom, other=other)
    *told, error = receive(mom, WAREHOUSE)
    assert said(told) == ["1", "3"]
    assert (error.message_type, error.sequence) == (ERROR, 2)
    assert error.conversation_id == monolog.conversation_id
    assert error.json()["code"] == Code.GIVEN_UP
    assert "message 2 was given up by postgres" in error.json()["text"]
    assert said(receive(other, WAREHOUSE)) == ["1", HUGE, "3"], "nothing is missing there"
    say(app, monolog, "4")
    run(app, mom=mom, other=other)
    assert said(receive(mom, WAREHOUSE)) == ["4"]


def parked(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        return len(fetch(connection, "SELECT FROM saf.parked"))


def _without_the_first(app: Dsn, mom: Dsn, why: str, **options: Any) -> saf.Dialog:
    """A dialog of which the first message does not get through, and two others do."""
    dialog = begin(app, **options)
    with app.connect(role="test") as connection:
        for body in (HUGE, "2", "3"):
            dialog.send(connection, body, message_type="note")
    _forward_without(1, app, mom, why)
    return dialog


def _without_the_second(app: Dsn, mom: Dsn, why: str) -> saf.Dialog:
    """A dialog of which the second message does not get through."""
    dialog = begin(app, "1")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["1"]
    say(app, dialog, HUGE, "3")
    _forward_without(2, app, mom, why)
    assert receive(mom, WAREHOUSE) == []
    return dialog


def _forward_without(number: int, app: Dsn, mom: Dsn, why: str) -> None:
    if why == "rejected":
        with connect(mom) as connection:
            connection.execute(REFUSES.format(number=number))
    rules = forwarding_rules("exactly_once", 1000, there=mom)
    if why == "over_size":
        rules = replace(rules, max_bytes=50)
    with Cycle(app, rules) as cycle:
        while cycle.run():
            pass
    assert dead(app) == [(HUGE, why)]


def _give_up(app: Dsn, mom: Dsn, why: str, times: int) -> None:
    """A person gives up a dialog's first message, and so many of its ends are told."""
    with connect(app) as connection:
        assert len(discard(connection, DeadLetters(), "nobody needs it")) == 1
    forward(app, mom)
    heard = [*receive(mom, WAREHOUSE), *receive(app, SHOP)]
    assert said(heard) == [ERROR] * times
    for error in heard:
        assert error.json() == {
            "code": Code.GIVEN_UP,
            "text": f"message 1 was given up by postgres: it was a dead letter on its way, {why}",
        }
    forward(app, mom)
    assert receive(mom, WAREHOUSE) == receive(app, SHOP) == []
    assert states(mom) == ["error"]
    assert parked(app) == parked(mom) == 0
