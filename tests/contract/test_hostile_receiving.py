"""No message holds up another's at the receivers: it becomes a dead letter that says why.

Hostile messages lie between others, in one shard, in an inbox without bounds.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import saf
from saf.broker.services import create_subscription
from saf.database import Dsn, fetch
from saf.dialogs.statements import Code
from saf.setaside.selection import DeadLetters
from tests import dialogs
from tests.hostile import LONG_KEY, error_of, unbounded
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, dead, effect, effects, keys_of_one_shard, prepare

KEYS = keys_of_one_shard(4)
HOSTILE = uuid4()

BEGUN_AT = datetime(2026, 1, 1, tzinfo=UTC)
LAST_NOON = datetime(9999, 12, 31, 12, tzinfo=UTC)
DEEP = "[" * 3000 + "]" * 3000
DIGITS = "9" * 5001


def hello(**said: Any) -> dict[str, Any]:
    return first(headers=json.dumps({"saf-dialog": said}))


def first(**columns: Any) -> dict[str, Any]:
    """The first message of a dialog."""
    return {
        "from_initiator": True,
        "conversation_id": HOSTILE,
        "sequence": 1,
        "from_service": "shop",
        **columns,
    }


MESSAGES: dict[str, dict[str, Any]] = {
    "a dialog's, with no conversation": first(conversation_id=None),
    "a dialog's, with no sender": first(from_service=None),
    "a dialog's, with no number to count": first(sequence=-(2**63)),
    "a version that no contract has": hello(contract="c", version=1e30),
    "a lifetime that ends with the calendar": {
        **hello(lifetime_seconds=(LAST_NOON - BEGUN_AT).total_seconds()),
        "created_at": BEGUN_AT,
    },
    "a lifetime beyond all calendars": hello(lifetime_seconds=1e300),
    "a dialog begun by a list": first(headers='{"saf-dialog": [1]}'),
    "a dialog begun by deep headers": first(headers=f'{{"x": {DEEP}}}'),
    "a dialog begun by a long number": first(headers=f'{{"x": {DIGITS}}}'),
    "numbers that grow as text": {"headers": f"[{','.join(['1e100000'] * 10_000)}]"},
    "a key that is too large to be read": {"key_": "x" * 100_000},
}


def put(mom: Dsn, hostile: dict[str, Any]) -> None:
    """Four keys of a shard with two messages each, and the hostile one in the middle."""
    unbounded(mom)
    with connect(mom) as connection:
        for number in range(2):
            for key in KEYS:
                insert(connection, f"{key} {number}", key=key)
            if number == 0:
                insert(connection, "hostile", **{"key": "one shard", **hostile})


def insert(connection: psycopg.Connection[Any], body: str | bytes, **columns: Any) -> None:
    row: dict[str, Any] = {
        "to_service": SUBSCRIPTION,
        "body": body if isinstance(body, bytes) else body.encode(),
    }
    row |= {name.rstrip("_"): value for name, value in columns.items()}
    connection.execute(
        f"INSERT INTO saf.inbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
        list(row.values()),
    )


GOOD = sorted(f"{key} {number}" for number in range(2) for key in KEYS)


@pytest.mark.parametrize("hostile", MESSAGES.values(), ids=MESSAGES)
def test_a_hostile_message_is_a_dead_letter_and_its_shard_goes_on(
    mom: Dsn, hostile: dict[str, Any]
) -> None:
    prepare(mom)
    put(mom, hostile)
    worker = saf.Worker(mom, SUBSCRIPTION)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        if message.dialog is None:
            effect(connection, message)

    worker.drain()
    assert sorted(effects(mom)) == GOOD
    ((body, reason),) = dead(mom)
    assert (body, reason in ("rejected", "over_size")) == ("hostile", True)
    assert error_of(mom)
    with connect(mom) as connection:
        (letter,) = DeadLetters().rows(connection)
    assert json.dumps(letter.as_dict())


@pytest.mark.parametrize(
    "hostile",
    [{"headers": f'{{"x": {DEEP}}}'}, {"headers": f'{{"x": {DIGITS}}}'}, {"key_": LONG_KEY}],
    ids=["deep headers", "a long number", "a long key"],
)
def test_what_a_handler_cannot_handle_is_a_dead_letter_whatever_it_is(
    mom: Dsn, hostile: dict[str, Any]
) -> None:
    prepare(mom)
    put(mom, hostile)
    worker = saf.Worker(mom, SUBSCRIPTION, policy=saf.Policy(max_attempts=1))

    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        assert message.headers == {}
        assert message.key != LONG_KEY

    worker.handler()(handle)
    drain(worker, mom)
    assert sorted(effects(mom)) == GOOD
    assert [body for body, _ in dead(mom)] == ["hostile"]


def drain(worker: saf.Worker, mom: Dsn) -> None:
    """Whose delivery may fail now and then, as a thread of it goes on after that."""
    for _ in range(5):
        try:
            worker.drain()
        except psycopg.Error:
            continue
        if len(effects(mom)) == len(GOOD):
            return


@pytest.mark.parametrize(
    ("message_type", "body"),
    [
        ("saf/error", rb'{"code": 1, "text": "a\u0000b\ud800"}'),
        ("saf/error", rb'{"code": 1e30, "text": "x"}'),
        ("saf/error", b'{"code": 1, "text": "\xff"}'),
        ("saf/error", DEEP.encode()),
        ("saf/error", DIGITS.encode()),
    ],
)
def test_an_error_that_cannot_be_read_is_an_error_all_the_same(
    app: Dsn, mom: Dsn, message_type: str, body: bytes
) -> None:
    dialogs.prepare(app, mom)
    dialog = dialogs.begin(app, "one")
    dialogs.forward(app, mom)
    dialogs.receive(mom, dialogs.WAREHOUSE)
    dialogs.put(mom, dialog, 2, message_type=message_type, body=body)
    received = dialogs.receive(mom, dialogs.WAREHOUSE)
    assert [one.message_type for one in received] == ["saf/error"]
    assert dialogs.states(mom) == ["error"]


@pytest.mark.parametrize(
    "columns",
    [
        {"headers": f'{{"x": {DEEP}}}'},
        {"headers": f'{{"saf-fragment": 1, "x": {DIGITS}}}'},
        {"headers": f"[{','.join(['1e100000'] * 10_000)}]"},
    ],
    ids=["deep", "a fragment with a long number", "numbers that grow as text"],
)
def test_a_conversation_with_a_message_that_cannot_be_received_fails_at_both_ends(
    app: Dsn, mom: Dsn, columns: dict[str, Any]
) -> None:
    dialogs.prepare(app, mom)
    unbounded(mom)
    dialog = dialogs.begin(app, "one")
    dialogs.forward(app, mom)
    dialogs.receive(mom, dialogs.WAREHOUSE)
    dialogs.put(mom, dialog, 2, body=b"hostile", **columns)
    assert [one.message_type for one in dialogs.receive(mom, dialogs.WAREHOUSE)] == ["saf/error"]
    assert [body for body, _ in dead(mom)] == ["hostile"]
    dialogs.forward(app, mom)
    (error,) = dialogs.receive(app, dialogs.SHOP)
    assert (error.message_type, error.json()["code"]) == ("saf/error", Code.QUARANTINED)


def test_who_listens_in_ends_no_dialog_that_has_a_message_which_cannot_be_received(
    app: Dsn, mom: Dsn
) -> None:
    dialogs.prepare(app, mom)
    unbounded(mom)
    with connect(mom) as connection:
        create_subscription(connection, "audit", service=dialogs.WAREHOUSE)
    dialog = dialogs.begin(app, "one")
    dialogs.forward(app, mom)
    dialogs.receive(mom, dialogs.WAREHOUSE)
    dialogs.put(mom, dialog, 2, body=b"hostile", headers=f"[{','.join(['1e100000'] * 10_000)}]")
    assert dialogs.said(dialogs.receive(mom, "audit")) == ["one"]
    assert dead(mom) == [("hostile", "over_size")]
    assert dialogs.states(mom) == ["conversing"]


def test_who_begins_a_dialog_that_cannot_be_received_gets_an_error(app: Dsn, mom: Dsn) -> None:
    dialogs.prepare(app, mom)
    with connect(mom) as connection:
        connection.execute("DELETE FROM saf.contract_message; DELETE FROM saf.contract")
    dialog = dialogs.begin(app, "one")
    dialogs.put(mom, dialog, 1, headers=f'{{"x": {DEEP}}}')
    assert [one.message_type for one in dialogs.receive(mom, dialogs.WAREHOUSE)] == ["saf/error"]
    dialogs.forward(app, mom)
    errors = [one.json()["code"] for one in dialogs.receive(app, dialogs.SHOP)]
    assert errors == [Code.VIOLATION]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e12, 1e300])
def test_nothing_lasts_longer_than_the_calendar(app: Dsn, mom: Dsn, seconds: float) -> None:
    dialogs.prepare(app, mom)
    with pytest.raises(saf.DialogError, match="a lifetime of"):
        dialogs.begin(app, "one", lifetime=seconds)
    dialog = dialogs.begin(app, "one")
    with app.connect(role="test") as connection:
        with pytest.raises(saf.DialogError, match="a timer of"):
            dialog.start_timer(connection, seconds)
        assert fetch(connection, "SELECT timer FROM saf.conversation") == [(None,)]


def test_a_body_that_is_not_what_it_says_is_the_handlers_to_find_out(mom: Dsn) -> None:
    prepare(mom)
    for body in (DEEP.encode(), DIGITS.encode(), b"\xff", b"{"):
        with connect(mom) as connection:
            insert(connection, body, headers=f'{{"x": {DEEP}}}')
        with saf.receive(mom, SUBSCRIPTION) as (message,):
            assert isinstance(message.message_id, UUID)
            assert message.content_type is None
            with pytest.raises(saf.UnreadableBody, match="content type is not given"):
                message.json()
            with pytest.raises(saf.UnreadableHeaders):
                message.headers  # noqa: B018 - it raises


@pytest.mark.parametrize("zone", ["America/New_York", "UTC", "Asia/Tokyo"])
def test_the_first_day_of_the_calendar_holds_nobody_up_whatever_the_time_zone(
    mom: Dsn, zone: str
) -> None:
    """West of UTC it is a day before the calendar, which Python cannot read."""
    prepare(mom)
    with connect(mom) as connection:
        # as in an inbox that has such rows since before they were refused
        connection.execute("ALTER TABLE saf.inbox DROP CONSTRAINT inbox_in_calendar")
        connection.execute(f"ALTER DATABASE {mom.database} SET timezone = '{zone}'")
        connection.execute(
            "INSERT INTO saf.inbox (to_service, body, key, created_at, deliver_at, expires_at) "
            "SELECT %s, body, 'k', coalesce(a::timestamptz, now()), b::timestamptz, c::timestamptz "
            "FROM (VALUES ('1'::bytea, %s, NULL, NULL), ('2', NULL, %s, NULL), "
            "('3', NULL, NULL, %s), ('4', NULL, NULL, NULL)) AS m (body, a, b, c)",
            [SUBSCRIPTION, *["0001-01-01 00:00:00+00"] * 3],
        )
    with saf.receive(mom, SUBSCRIPTION) as delivery:
        assert next((one.text(), one.created_at.year) for one in delivery) == ("1", 1)
        assert [one.text() for one in delivery] == ["1", "2", "4"]
    assert dead(mom) == [("3", "expired")]
