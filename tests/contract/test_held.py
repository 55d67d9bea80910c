"""Messages by name: sent once, taken back, later."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from saf.errors import InvalidMessage
from saf.forwarding import moving
from saf.operating.maintenance import purge_broker
from saf.sending import held
from tests.pipeline import bodies, connect, run

LATER = datetime(2199, 1, 1, tzinfo=UTC)
HELD = """
SELECT name, convert_from(body, 'UTF8'), due IS NOT NULL FROM saf.held ORDER BY held_id
"""
DUE = "UPDATE saf.held SET due = now() - interval '1 s' WHERE due IS NOT NULL"
OVER = "UPDATE saf.held SET forget_at = now() - interval '1 s' WHERE forget_at IS NOT NULL"
MINUTE = timedelta(minutes=1)

outbox = saf.Outbox()
autocommit = saf.Outbox(allow_autocommit=True)


def rows(dsn: Dsn) -> list[tuple[Any, ...]]:
    with connect(dsn) as connection:
        return fetch(connection, HELD)


def sent(dsn: Dsn) -> list[str]:
    with connect(dsn) as connection:
        found = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id")
    return [body for (body,) in found]


def change(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


def move(dsn: Dsn) -> int:
    with connect(dsn) as connection:
        return held.move(connection)[0]


@pytest.mark.every_postgresql
def test_a_message_that_is_due_later_is_held_and_then_delivered(app: Dsn, mom: Dsn) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(connection, "billing", "1", key="k", deliver_at=LATER)
        assert first.is_new
    run(app, mom=mom)
    assert (sent(app), bodies(mom)) == ([], [])
    assert rows(app) == [(None, "1", True)]
    change(app, DUE)
    run(app, mom=mom)
    assert bodies(mom) == ["1"]
    assert rows(app) == []
    with connect(mom) as connection:
        assert fetch(connection, "SELECT message_id, key FROM saf.inbox") == [(first, "k")]


def test_a_time_that_is_past_goes_straight_into_the_outbox(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", deliver_at=datetime.now(UTC) - MINUTE)
    assert (sent(app), rows(app)) == (["1"], [])


@pytest.mark.every_postgresql
def test_a_name_is_sent_once(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(connection, "billing", "1", name="n")
        again = outbox.send(connection, "billing", "2", name="n")
        other = outbox.send(connection, "shipping", "3", name="n")
    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert again == first
    assert sent(app) == ["1", "3"]


def test_cancel_takes_a_held_message_back_and_frees_its_name(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n", deliver_at=LATER)
        assert outbox.cancel(connection, "billing", "n")
        assert not outbox.cancel(connection, "billing", "n")
        assert outbox.send(connection, "billing", "2", name="n").is_new
        assert not outbox.cancel(connection, "billing", "n")
        assert not outbox.cancel(connection, "billing", "unknown")
    assert sent(app) == ["2"]


def test_reschedule_moves_a_held_message_to_another_time(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n", deliver_at=LATER)
        assert outbox.reschedule(connection, "billing", "n", datetime.now(UTC))
        assert not outbox.reschedule(connection, "billing", "unknown", datetime.now(UTC))
    assert move(app) == 1
    with app.connect(role="test") as connection:
        assert not outbox.reschedule(connection, "billing", "n", LATER)
    assert sent(app) == ["1"]


def test_what_is_sent_is_a_uuid(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(connection, "billing", "1", name="n")
        again = outbox.send(connection, "billing", "1", name="n")
        assert isinstance(first, UUID)
        assert first == UUID(str(first))
        assert copy.copy(again).is_new is False
        assert fetch(connection, "SELECT %(id)s", {"id": first}) == [(first,)]
        outbox.send(connection, "billing", {"id": first})
    assert json.loads(sent(app)[-1]) == {"id": str(first)}


# What a name means


def body_held(dsn: Dsn) -> list[str]:
    return [body for _, body, is_held in rows(dsn) if is_held]


@pytest.mark.every_postgresql
def test_replace_puts_a_message_in_the_place_of_the_held_one(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(connection, "billing", "1", key="a", name="n", deliver_at=LATER)
        second = outbox.send(
            connection,
            *("billing", "2"),
            key="b",
            name="n",
            deliver_at=LATER + MINUTE,
            if_there="replace",
            headers={"x": 1},
            message_type="t",
            expires_at=LATER + 2 * MINUTE,
        )
        assert (second.is_new, second != first) == (False, True)
        assert fetch(
            connection,
            "SELECT message_id, key, headers ->> 'x', message_type, due, expires_at FROM saf.held",
        ) == [(second, "b", "1", "t", LATER + MINUTE, LATER + 2 * MINUTE)]
    assert body_held(app) == ["2"]


def test_replace_without_a_time_sends_at_once_and_only_this_message(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n", deliver_at=LATER)
        assert not outbox.send(connection, "billing", "2", name="n", if_there="replace").is_new
    assert (sent(app), body_held(app)) == (["2"], [])
    change(app, DUE)
    assert move(app) == 0


@pytest.mark.parametrize("if_there", saf.message.IF_THERE)
def test_what_was_sent_is_not_sent_again_within_its_window_and_then_is(
    app: Dsn, if_there: saf.message.IfThere
) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(connection, "billing", "1", name="n")
        again = outbox.send(
            connection, "billing", "2", name="n", if_there=if_there, deliver_at=LATER
        )
        assert (again, again.is_new) == (first, False)
    assert (sent(app), body_held(app)) == (["1"], [])
    change(app, OVER)
    with app.connect(role="test") as connection:
        third = outbox.send(
            connection, "billing", "3", name="n", if_there=if_there, once_for=timedelta(days=7)
        )
        assert (third.is_new, third != first) == (True, True)
        assert not outbox.send(connection, "billing", "4", name="n", if_there=if_there).is_new
    assert sent(app) == ["1", "3"]


@pytest.mark.parametrize("by", ["send", "move"])
def test_the_window_begins_with_the_sending_and_is_as_long_as_asked(app: Dsn, by: str) -> None:
    with app.connect(role="test") as connection:
        outbox.send(
            connection,
            *("billing", "1"),
            name="n",
            once_for=timedelta(hours=5),
            deliver_at=None if by == "send" else datetime.now(UTC) + timedelta(days=3),
        )
    change(app, "UPDATE saf.held SET created_at = created_at - interval '1 day'")
    change(app, DUE)
    move(app)
    left = "SELECT forget_at - clock_timestamp() FROM saf.held"
    with connect(app) as connection:
        ((window,),) = fetch(connection, left)
    assert timedelta(hours=4.9) < window <= timedelta(hours=5)


def test_the_window_is_seven_days_unless_asked_and_none_for_later(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n")
        outbox.send(connection, "billing", "1", name="r", if_there="replace")
        outbox.send(connection, "billing", "1", name="l", if_there="later")
        connection.execute("SELECT saf.send('billing', '1', name => 'sn')")
        connection.execute("SELECT saf.send('billing', '1', name => 'sl', if_there => 'later')")
        week = timedelta(days=7)
        assert fetch(connection, "SELECT name, once_for FROM saf.held ORDER BY held_id") == [
            *(("n", week), ("r", week), ("l", timedelta(0))),
            *(("sn", week), ("sl", timedelta(0))),
        ]
        assert outbox.send(connection, "billing", "2", name="l", if_there="later").is_new


OUTCOMES: list[tuple[dict[str, Any], str]] = [
    ({}, "sent"),
    ({"deliver_at": LATER}, "held"),
    ({"name": "n", "deliver_at": LATER}, "held"),
    ({"name": "n", "deliver_at": LATER}, "kept"),
    ({"name": "n", "deliver_at": LATER, "if_there": "replace"}, "replaced"),
    ({"name": "n", "deliver_at": LATER, "if_there": "later"}, "replaced"),
    ({"name": "n", "if_there": "replace"}, "replaced"),
    ({"name": "n"}, "already_sent"),
    ({"name": "n", "if_there": "replace"}, "already_sent"),
    ({"name": "n", "if_there": "later"}, "already_sent"),
    ({"name": "m"}, "sent"),
]
"""Arguments of sends that follow each other, and what becomes of each."""


@pytest.mark.every_postgresql
def test_the_outcome_says_whether_a_message_is_in(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        found = [outbox.send(connection, "a", "1", **arguments) for arguments, _ in OUTCOMES]
        assert [one.outcome for one in found] == [outcome for _, outcome in OUTCOMES]
        assert [one.is_new for one in found] == [
            outcome in ("sent", "held") for _, outcome in OUTCOMES
        ]
        many = [saf.Message(service="b", body="1", **arguments) for arguments, _ in OUTCOMES]
        for message, (_, outcome) in zip(many, OUTCOMES, strict=True):
            assert [one.outcome for one in outbox.send_many(connection, [message])] == [outcome]
    assert copy.copy(found[4]).outcome == "replaced"


@pytest.mark.every_postgresql
@pytest.mark.parametrize("body", ["'1'::text", "'1'::jsonb", "'1'::bytea"])
def test_the_outcome_and_the_id_are_columns_in_sql(app: Dsn, body: str) -> None:
    with app.connect(role="test") as connection:
        for arguments, outcome in OUTCOMES:
            given = "".join(f", {name} => %({name})s" for name in arguments)
            statement = f"SELECT message_id, outcome FROM saf.send('a', {body}{given})"
            ((message_id, found),) = fetch(connection, statement, arguments)
            assert found == outcome
            if outcome in ("sent", "held", "replaced"):
                stored = "SELECT FROM saf.{} WHERE message_id = %(id)s"
                assert any(
                    fetch(connection, stored.format(table), {"id": message_id})
                    for table in ("held", "outbox")
                )


def test_without_a_window_a_name_is_free_once_it_was_sent(app: Dsn) -> None:
    never = timedelta(0)
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n", once_for=never, deliver_at=LATER)
        assert not outbox.send(connection, "billing", "2", name="n", once_for=never).is_new
    change(app, DUE)
    assert move(app) == 1
    with app.connect(role="test") as connection:
        assert outbox.send(connection, "billing", "3", name="n", once_for=never).is_new
        assert outbox.send(connection, "billing", "4", name="n", once_for=never).is_new
    assert sent(app) == ["1", "3", "4"]


def due(dsn: Dsn) -> datetime:
    with connect(dsn) as connection:
        ((moment,),) = fetch(connection, "SELECT due FROM saf.held")
    assert isinstance(moment, datetime)
    return moment


def postpone(dsn: Dsn, body: str, by: timedelta, limit: timedelta | None = None) -> bool:
    with dsn.connect(role="test") as connection:
        return outbox.send(
            connection,
            *("search", body),
            name="reindex",
            deliver_at=datetime.now(UTC) + by,
            if_there="later",
            later_limit=limit,
        ).is_new


@pytest.mark.every_postgresql
def test_later_postpones_with_the_newest_body_but_never_brings_forward(app: Dsn) -> None:
    assert postpone(app, "1", MINUTE)
    first = due(app)
    assert not postpone(app, "2", 2 * MINUTE)
    second = due(app)
    assert second > first + 0.9 * MINUTE
    assert not postpone(app, "3", MINUTE)
    assert due(app) == second
    with app.connect(role="test") as connection:
        outbox.send(connection, "search", "4", name="reindex", if_there="later")
    assert (due(app), body_held(app), sent(app)) == (second, ["4"], [])


def test_later_postpones_at_most_to_the_limit_counted_from_the_first_send(app: Dsn) -> None:
    postpone(app, "1", MINUTE, 5 * MINUTE)
    with connect(app) as connection:
        ((created,),) = fetch(connection, "SELECT created_at FROM saf.held")
    for minutes in (4, 8, 20):
        postpone(app, str(minutes), minutes * MINUTE, 5 * MINUTE)
    assert due(app) == created + 5 * MINUTE
    assert body_held(app) == ["20"]


def test_the_limit_does_not_shorten_the_first_wait(app: Dsn) -> None:
    postpone(app, "1", 10 * MINUTE, MINUTE)
    first = due(app)
    postpone(app, "2", 20 * MINUTE, MINUTE)
    assert due(app) == first > datetime.now(UTC) + 9 * MINUTE


def test_what_is_rolled_back_leaves_nothing(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="n")
        outbox.send(connection, "billing", "2", name="m", deliver_at=LATER)
        connection.rollback()
        assert outbox.send(connection, "billing", "3", name="m", deliver_at=LATER).is_new
        connection.commit()
        assert outbox.cancel(connection, "billing", "m")
        connection.rollback()
        assert outbox.send(connection, "billing", "4", name="n").is_new
    assert (sent(app), body_held(app)) == (["4"], ["3"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": ""}, "name: is empty"),
        ({"name": "x" * 256}, "name: 256 bytes are more than 255"),
        ({"name": "a\0"}, "name: .*NUL"),
        ({"name": 7}, "name: expected str, got int"),
        (
            {"name": "n", "if_there": "skp"},
            "if_there: expected 'skip', 'replace', 'later', got 'skp'",
        ),
        ({"if_there": "replace"}, "if_there: 'replace' needs a name"),
        ({"name": "n", "once_for": 7}, "once_for: 7 is not a datetime.timedelta"),
        ({"name": "n", "once_for": -MINUTE}, "once_for: .* is not between 0 and 36,525 days"),
        ({"name": "n", "later_limit": MINUTE}, "later_limit: needs if_there='later'"),
        ({"name": "n", "if_there": "later", "later_limit": 7}, "later_limit: 7 is not a"),
        ({"name": "n", "if_there": "later", "later_limit": -MINUTE}, "later_limit: .* is not betw"),
        (
            {"deliver_at": LATER, "expires_at": LATER},
            "expires_at: 2199-01-01.* is not after deliver_at 2199-01-01.*: nobody would get",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    app: Dsn, wrong: dict[str, Any], says: str
) -> None:
    with app.connect(role="test") as connection:
        with pytest.raises(InvalidMessage, match=says):
            outbox.send(connection, "billing", "1", **wrong)
        with pytest.raises(InvalidMessage, match=rf"messages\[1\]\.{says}"):
            outbox.send_many(
                connection,
                [saf.Message(service="a", body=b""), saf.Message(service="a", body=b"", **wrong)],
            )
        for call in (outbox.cancel, outbox.reschedule):
            with pytest.raises(InvalidMessage, match=r"name: is empty$"):
                call(connection, "billing", "", *[LATER] * (call == outbox.reschedule))
        with pytest.raises(InvalidMessage, match=r"deliver_at: .* has no time zone"):
            outbox.reschedule(connection, "billing", "n", datetime(2199, 1, 1))
    assert (sent(app), rows(app)) == ([], [])


@pytest.mark.parametrize("held_", [False, True])
def test_a_name_has_up_to_255_bytes_of_any_text(app: Dsn, held_: bool) -> None:
    name = "ü" * 127 + "x"
    with app.connect(role="test") as connection:
        assert outbox.send(
            connection, "billing", "1", name=name, deliver_at=LATER if held_ else None
        ).is_new
        assert not outbox.send(connection, "billing", "1", name=name).is_new
        assert outbox.send(connection, "billing", "1", name=name.upper()).is_new


# Many


def test_many_keep_their_order_and_each_name_its_first(app: Dsn) -> None:
    names = [None, "b", "a", None, "b", "c"]
    messages = [
        saf.Message(service="billing", body=str(n), name=name, key="k")
        for n, name in enumerate(names)
    ]
    with app.connect(role="test") as connection:
        ids = outbox.send_many(connection, messages)
        assert [one.is_new for one in ids] == [True, True, True, True, False, True]
        assert ids[4] == ids[1]
        more = [*messages, saf.Message(service="billing", body="later", deliver_at=LATER)]
        again = outbox.send_many(connection, more)
        assert [one.is_new for one in again] == [True, False, False, True, False, False, True]
    assert sent(app) == ["0", "1", "2", "3", "5", "0", "3"]
    assert body_held(app) == ["later"]
    with connect(app) as connection:
        found = fetch(connection, "SELECT message_id FROM saf.outbox ORDER BY id")
    assert [one for (one,) in found] == [*ids[:4], ids[5], again[0], again[3]]


def test_many_without_names_and_times_are_copied_as_ever(app: Dsn, monkeypatch: Any) -> None:
    monkeypatch.setattr("saf.outbox.HOLD_MANY", "not SQL")
    with app.connect(role="test") as connection:
        messages = [saf.Message(service="billing", body=str(n)) for n in range(200)]
        assert all(one.is_new for one in outbox.send_many(connection, messages))
        outbox.send(connection, "billing", "200")
    assert sent(app) == [*map(str, range(201))]


def test_one_statement_is_one_transaction_in_autocommit(app: Dsn) -> None:
    with connect(app) as connection:
        autocommit.send(connection, "billing", "1", name="n")
        autocommit.send_many(connection, [saf.Message(service="a", body="2", name="n")])
        assert not autocommit.cancel(connection, "billing", "n")
        with pytest.raises(saf.AutocommitError):
            outbox.send(connection, "billing", "3", name="m")
        with pytest.raises(saf.AutocommitError, match="message would be cancelled even if"):
            outbox.cancel(connection, "billing", "n")
        with pytest.raises(saf.AutocommitError, match="message would be rescheduled even if"):
            outbox.reschedule(connection, "billing", "n", LATER)
    assert sent(app) == ["1", "2"]


# Moving


def hold(dsn: Dsn, *bodies: str, **more: Any) -> None:
    with dsn.connect(role="test") as connection:
        outbox.send_many(
            connection,
            [
                saf.Message(service="billing", body=body, deliver_at=LATER, **more)
                for body in bodies
            ],
        )


def test_messages_move_in_the_order_of_their_times_and_then_of_their_holding(app: Dsn) -> None:
    hold(app, *map(str, range(20)), key="k")
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "first", key="k", deliver_at=LATER - MINUTE)
    change(app, "UPDATE saf.held SET due = due - interval '200 years'")
    assert move(app) == 21
    assert sent(app) == ["first", *map(str, range(20))]


def test_a_name_that_is_used_again_has_its_place_in_the_order_of_its_new_message(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "old", name="n", once_for=timedelta(0))
    hold(app, "1")
    hold(app, "2", name="n")
    change(app, DUE)
    assert move(app) == 2
    assert sent(app) == ["old", "1", "2"]


def test_chunks_follow_each_other_in_order_until_nothing_is_due(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "MOST", 3)
    hold(app, *map(str, range(10)), key="k")
    change(app, DUE)
    with connect(app) as connection:
        assert held.move(connection) == (10, False)
    assert sent(app) == [*map(str, range(10))]
    hold(app, *map(str, range(10)))
    change(app, DUE)
    with connect(app) as connection:
        assert held.move(connection, seconds=-1) == (3, True)


def test_a_message_that_moves_is_new_in_the_outbox_and_the_same_message(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        first = outbox.send(
            connection,
            *("billing", {"a": 1}),
            key="k",
            headers={"x": 1},
            message_type="t",
            from_service="shop",
            to_broker=UUID(int=7),
            deliver_at=datetime.now(UTC) + MINUTE,
            expires_at=LATER,
            name="n",
        )
        outbox.send(connection, "billing", "between")
    change(app, "UPDATE saf.held SET created_at = now() - interval '1 day', due = now()")
    moment = due(app)
    assert move(app) == 1
    columns = (
        "message_id, from_service, to_service, to_broker, key, message_type, headers, body, "
        "deliver_at, expires_at"
    )
    with connect(app) as connection:
        assert fetch(connection, f"SELECT {columns} FROM saf.outbox ORDER BY id DESC LIMIT 1") == [
            (
                *(first, "shop", "billing", UUID(int=7), "k", "t"),
                {"content-type": "application/json", "x": 1},
                *(b'{"a":1}', moment, LATER),
            )
        ]
        late = "SELECT created_at > now() - interval '1 minute' FROM saf.outbox"
        assert fetch(connection, late) == [(True,), (True,)]
        kept = "SELECT name, body, headers, key, message_id FROM saf.held"
        assert fetch(connection, kept) == [("n", b"", None, None, first)]


def test_a_message_that_the_outbox_rejects_stays_with_the_reason_and_stops_no_other(
    app: Dsn, mom: Dsn
) -> None:
    change(app, "ALTER TABLE saf.outbox ADD CONSTRAINT no_bad CHECK (key <> 'bad')")
    hold(app, "1", "2")
    hold(app, "rejected", key="bad")
    hold(app, "3")
    change(app, DUE)
    run(app, mom=mom)
    assert bodies(mom) == ["1", "2", "3"]
    with connect(app) as connection:
        ((body, refused),) = fetch(connection, "SELECT body, refused FROM saf.held")
        assert (body, "no_bad" in refused) == (b"rejected", True)
        assert moving.due_in(connection) is None
    change(app, "ALTER TABLE saf.outbox DROP CONSTRAINT no_bad")
    assert move(app) == 0
    change(app, "UPDATE saf.held SET refused = NULL")
    run(app, mom=mom)
    assert bodies(mom) == ["1", "2", "3", "rejected"]


SECRET = "'secret body'"
BAD = [
    ("send(NULL, {0}::text)", "service: is NULL"),
    ("send('', {0}::text)", "service: is empty"),
    ("send(repeat('x', 300), {0}::bytea)", "service: 300 bytes are more than 255"),
    ("send('a', NULL::text)", "body: is NULL"),
    ("send('a', NULL::jsonb)", "body: is NULL"),
    ("send('a', {0}, '')", "key: is empty; if it does not exist, pass None, in SQL NULL"),
    ("send('a', {0}, repeat('x', 1025))", "key: 1,025 bytes are more than 1,024"),
    ("send('a', {0}, message_type => '')", "message_type: is empty; if it does not exist, "),
    ("send('a', {0}, from_service => repeat('x', 256))", "from_service: 256 bytes are more than"),
    ("send('a', {0}, name => '')", "name: is empty; if it does not exist, pass None"),
    ("send('a', {0}, name => repeat('ü', 150))", "name: 300 bytes are more than 255"),
    ("send('a', {0}, headers => '[]')", "headers: expected a mapping of names to JSON values"),
    (
        "send('a', {0}, headers => jsonb_build_object('x', repeat('x', 1048577)))",
        "headers: 1,048,6.. bytes are more than 1,048,576",
    ),
    (
        "send('a', {0}, name => 'n', if_there => 'skp')",
        "if_there: expected 'skip', 'replace', 'later', got 'skp'",
    ),
    ("send('a', {0}, name => 'n', if_there => NULL)", "if_there: expected .*, got NULL"),
    ("send('a', {0}, if_there => 'replace')", "if_there: 'replace' needs a name"),
    ("send('a', {0}, name => 'n', once_for => '-1 s')", "once_for: -00:00:01 is not between 0 and"),
    ("send('a', {0}, name => 'n', once_for => '102 y')", "once_for: 102 years is not between"),
    ("send('a', {0}, later_limit => '1 s')", "later_limit: needs if_there='later'"),
    ("send('a', {0}, name => 'n', later_limit => '1 s')", "later_limit: needs if_there='later'"),
    (
        "send('a', {0}, name => 'n', if_there => 'later', later_limit => '-1 s')",
        "later_limit: -00:00:01 is not between 0 and 36,525 days",
    ),
    ("send('a', {0}, deliver_at => 'infinity')", "deliver_at: infinity is before 0001-01-01 or"),
    ("send('a', {0}, deliver_at => '-infinity')", "deliver_at: -infinity is before 0001-01-01 or"),
    ("send('a', {0}, expires_at => 'infinity')", "expires_at: infinity is .*: leave it out for"),
    ("send('a', {0}, expires_at => now())", "expires_at: .* is over: nobody would get the message"),
    (
        "send('a', {0}, deliver_at => '2199-01-02', expires_at => '2199-01-01')",
        "expires_at: 2199-01-01 .* is not after deliver_at 2199-01-02 .*: nobody would get",
    ),
    ("cancel('a', '')", "name: is empty"),
    ("cancel('a', NULL)", "name: is NULL"),
    ("cancel('', 'n')", "service: is empty"),
    ("cancel('a', repeat('x', 256))", "name: 256 bytes are more than 255"),
    ("reschedule('a', '', now())", "name: is empty"),
    ("reschedule(NULL, 'n', now())", "service: is NULL"),
    ("reschedule('a', 'n', 'infinity')", "deliver_at: infinity is before 0001-01-01 or after"),
    ("reschedule('a', 'n', NULL)", r"deliver_at: is NULL: to send the message now, give now\(\)"),
]


@pytest.mark.every_postgresql
def test_sql_refuses_what_python_refuses_with_its_texts_and_without_the_body(app: Dsn) -> None:
    for call, says in BAD:
        statement = f"SELECT saf.{call.format(SECRET)}"
        with (
            connect(app) as connection,
            pytest.raises(psycopg.errors.InvalidParameterValue) as refused,
        ):
            connection.execute(statement.encode())
        report = refused.value.diag
        assert re.match(says, str(report.message_primary)), (call, report.message_primary)
        assert report.constraint_name == "argument_valid"
        assert report.column_name == says.split(":", maxsplit=1)[0]
        assert report.message_detail is None
        assert "secret" not in str(refused.value)
    assert (rows(app), sent(app)) == ([], [])


def test_a_held_message_does_not_move_to_a_time_at_which_it_has_expired(app: Dsn) -> None:
    hold(app, "1", name="n", expires_at=LATER + MINUTE)
    with app.connect(role="test") as connection:
        with (
            pytest.raises(InvalidMessage, match=r"2199-01-01 .* is not before expires_at") as no,
            connection.transaction(),
        ):
            outbox.reschedule(connection, "billing", "n", LATER + MINUTE)
        assert no.value.field == "deliver_at"
        soon: dict[str, Any] = {
            "expires_at": datetime.now(UTC) + MINUTE,
            "if_there": "later",
            "name": "n",
        }
        with (
            pytest.raises(InvalidMessage, match=r"is not after deliver_at 2199") as no,
            connection.transaction(),
        ):
            outbox.send(connection, "billing", "2", **soon)
        assert no.value.field == "expires_at"
        assert outbox.reschedule(connection, "billing", "n", LATER + MINUTE / 2)
    assert body_held(app) == ["1"]


def test_names_are_forgotten_when_their_time_is_over_and_others_are_kept(app: Dsn) -> None:
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "1", name="old")
    change(app, OVER)
    with app.connect(role="test") as connection:
        outbox.send(connection, "billing", "2", name="young")
        outbox.send(connection, "billing", "3", name="held", deliver_at=LATER)
    with connect(app) as connection:
        outcome = purge_broker(connection, retention_seconds=86400, rotate_after_seconds=86400)
        assert outcome.names == 1
    assert [name for name, *_ in rows(app)] == ["young", "held"]


def test_names_are_forgotten_in_chunks(app: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST", 3)
    with app.connect(role="test") as connection:
        for number in range(10):
            outbox.send(connection, "billing", "1", name=str(number))
    change(app, OVER)
    with connect(app) as connection:
        ((most,),) = fetch(connection, held.FORGET, {"most": held.MOST})
        assert most == 3
        assert held.forget(connection) == 7
    assert rows(app) == []


USED = """
SELECT coalesce(sum(seq_scan), 0), coalesce(sum(idx_tup_fetch), 0) FROM pg_stat_user_tables
WHERE relid = 'saf.held'::regclass
"""


@pytest.mark.every_postgresql
def test_to_find_what_is_due_among_many_reads_only_what_is_due(app: Dsn) -> None:
    change(
        app,
        "INSERT INTO saf.held (to_service, body, due, sender) "
        "SELECT 'billing', '', now() + interval '1 day' + n * interval '1 s', 'x' "
        "FROM generate_series(1, 20000) AS n; ANALYZE saf.held",
    )
    hold(app, "1")
    change(app, "UPDATE saf.held SET due = now() WHERE due > '2190-01-01'")
    for query in (
        f"SELECT {held.DUE_IN}",
        "SELECT message_id FROM saf.held WHERE due <= clock_timestamp() AND refused IS NULL "
        "ORDER BY due, held_id LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED",
    ):
        with connect(app) as connection:
            plan = "\n".join(row for (row,) in fetch(connection, f"EXPLAIN {query}"))
        assert "held_due" in plan, plan
        assert "Seq Scan" not in plan
        assert "Sort" not in plan
    with connect(app) as connection:
        ((scans, _),) = fetch(connection, USED)
        connection.execute("SELECT pg_stat_force_next_flush()")
    assert move(app) == 1
    with connect(app) as connection:
        ((after, read),) = fetch(connection, USED)
    assert after == scans
    assert read < 100
