"""One suite for the library and the functions of SQL: they write the same and refuse the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import saf
from saf.database import Dsn, fetch
from tests.dialogs import ERROR, SHOP, WAREHOUSE, forward, prepare, receive, said, states
from tests.pipeline import connect
from tests.sql_api import Api, Python, Sql, constraint

APIS: dict[str, Api] = {"python": Python(), "sql": Sql()}

both = pytest.mark.parametrize("api", APIS.values(), ids=APIS)

# Without what differs between any two dialogs: ids and times
ENDS = """
SELECT is_initiator, monolog, state, service, far_service, far_broker IS NOT NULL, contract,
       contract_version, send_sequence, receive_sequence, ended_here, ended_there, error_code,
       error_text, timer IS NOT NULL, expires_at - created_at, lineage
FROM saf.conversation ORDER BY send_sequence, error_code
"""
SENT = """
SELECT from_service, to_service, to_broker IS NOT NULL, key = conversation_id::text,
       from_initiator, sequence, message_type, headers - 'saf-dialog',
       (headers -> 'saf-dialog') - 'broker',
       headers -> 'saf-dialog' ->> 'broker' = (SELECT broker_id::text FROM saf.broker),
       CASE WHEN headers ->> 'content-type' = 'application/json'
            THEN convert_from(body, 'UTF8')::jsonb ELSE to_jsonb(body) END,
       deliver_at, expires_at, message_id IS NOT NULL
FROM saf.outbox ORDER BY id
"""
TO_ONESELF = """
SELECT from_service, to_service, key = conversation_id::text, from_initiator, sequence,
       message_type, headers, convert_from(body, 'UTF8')::jsonb, deliver_at - created_at,
       source = (SELECT broker_id FROM saf.broker)
FROM saf.inbox ORDER BY id
"""
GROUPS = "SELECT group_id, count(*) FROM saf.conversation GROUP BY 1 ORDER BY 2"


def written(dsn: Dsn) -> list[list[tuple[Any, ...]]]:
    with connect(dsn) as connection:
        return [fetch(connection, query) for query in (ENDS, SENT, TO_ONESELF)]


def a_whole_life(api: Api, connection: psycopg.Connection[Any]) -> None:
    """Each kind of begin, message and end."""
    plain = api.begin(connection)
    api.say(connection, plain, {"order": 7}, message_type="anything")
    api.say(connection, plain, "grüezi", headers={"Trace": 1})
    api.say(connection, plain, b"\x00\xff", headers={"Content-Type": "image/png"})
    api.end(connection, plain)
    strict = api.begin(connection, contract="ordering", lifetime=600, to_broker=uuid4())
    api.say(connection, strict, "", message_type="cancel")
    api.say(connection, strict, "a note", message_type="note")
    api.end(connection, strict, 17, "no stock")
    silent = api.begin(connection, related=strict)
    api.end(connection, silent)
    api.end(connection, api.begin(connection), 3, "changed my mind")


@pytest.mark.every_postgresql
def test_both_write_the_same_rows(app: Dsn, mom: Dsn) -> None:
    for dsn, api in ((app, APIS["python"]), (mom, APIS["sql"])):
        prepare(dsn, dsn)
        with dsn.connect(role="test") as connection:
            a_whole_life(api, connection)
    assert written(app) == written(mom)
    ends, sent, to_oneself = written(mom)
    assert (len(ends), len(sent), len(to_oneself)) == (4, 7, 1)
    for dsn in (app, mom):
        with connect(dsn) as connection:
            assert [count for _, count in fetch(connection, GROUPS)] == [1, 1, 2]


@both
def test_a_dialog_runs_from_begin_to_end_in_order(api: Api, app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    with app.connect(role="test") as connection:
        handle = api.begin(connection, contract="ordering")
        sent = [api.say(connection, handle, f"{n}", message_type="note") for n in range(3)]
    forward(app, mom)

    def answer(connection: psycopg.Connection[Any], message: saf.Received) -> None:
        assert message.dialog is not None
        if message.text() == "2":
            api.say(connection, message.dialog.handle, "done", message_type="delivery")
            api.end(connection, message.dialog.handle)

    received = receive(mom, WAREHOUSE, answer)
    assert [message.message_id for message in received] == sent
    forward(app, mom)
    assert said(receive(app, SHOP)) == ["done", "saf/end-dialog"]
    with app.connect(role="test") as connection:
        api.end(connection, handle)
    forward(app, mom)
    receive(mom, WAREHOUSE)
    assert (states(app), states(mom)) == (["closed"], ["closed"])


@both
def test_an_error_ends_both_sides(api: Api, app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    with app.connect(role="test") as connection:
        handle = api.begin(connection)
        api.say(connection, handle, "1")
        api.end(connection, handle, 17, "no “stock”")
    forward(app, mom)
    (error,) = receive(mom, WAREHOUSE)
    assert error.message_type == ERROR
    assert json.loads(error.body) == {"code": 17, "text": "no “stock”"}
    assert (states(app), states(mom)) == (["closed"], ["error"])


@both
def test_what_is_rolled_back_was_never_said(api: Api, app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    with app.connect(role="test") as connection:
        handle = api.begin(connection)
        api.say(connection, handle, "kept")
    with app.connect(role="test") as connection:
        api.say(connection, handle, "undone")
        api.end(connection, handle)
        connection.rollback()
    with app.connect(role="test") as connection:
        api.say(connection, handle, "also kept")
    forward(app, mom)
    assert said(receive(mom, WAREHOUSE)) == ["kept", "also kept"]


@both
def test_the_end_of_the_lifetime_reaches_this_end_too(api: Api, app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    with app.connect(role="test") as connection:
        handle = api.begin(connection, lifetime=600)
        api.say(connection, handle, "1")
    with connect(app) as connection:
        connection.execute("UPDATE saf.conversation SET expires_at = now() - interval '1 s'")
        connection.execute("UPDATE saf.inbox SET deliver_at = now() - interval '1 s'")
    with app.connect(role="test") as connection, pytest.raises(Exception, match="lifetime") as late:
        api.say(connection, handle, "2")
    assert constraint(late.value) == "dialog_over"
    assert said(receive(app, SHOP)) == [ERROR]
    assert states(app) == ["error"]


def begun(api: Api, connection: psycopg.Connection[Any], **options: Any) -> UUID:
    handle = api.begin(connection, **options)
    api.say(connection, handle, "a", message_type="note")
    return handle


def ended(api: Api, connection: psycopg.Connection[Any]) -> UUID:
    handle = begun(api, connection)
    api.end(connection, handle)
    return handle


REFUSED: dict[str, Callable[[Api, psycopg.Connection[Any]], object]] = {
    "begin: no such service": lambda a, c: a.begin(c, from_service="shopp"),
    "begin: no such contract": lambda a, c: a.begin(c, contract="orderings"),
    "begin: no such related dialog": lambda a, c: a.begin(c, related=uuid4()),
    "begin: no service named": lambda a, c: a.begin(c, to=""),
    "begin: too long a name": lambda a, c: a.begin(c, to="x" * 256),
    "begin: no time": lambda a, c: a.begin(c, lifetime=0),
    "begin: time without end": lambda a, c: a.begin(c, lifetime=1e11),
    "say: unknown handle": lambda a, c: a.say(c, uuid4(), "a"),
    "say: after the end": lambda a, c: a.say(c, ended(a, c), "a"),
    "say: type not in contract": lambda a, c: a.say(
        c, begun(a, c, contract="ordering"), "a", message_type="ordr"
    ),
    "say: no type": lambda a, c: a.say(c, begun(a, c, contract="ordering"), "a"),
    "say: wrong direction": lambda a, c: a.say(
        c, begun(a, c, contract="ordering"), "a", message_type="delivery"
    ),
    "say: body where none may be": lambda a, c: a.say(
        c, begun(a, c, contract="ordering"), "a", message_type="cancel"
    ),
    "say: not JSON": lambda a, c: a.say(c, begun(a, c, contract="typed"), "{", message_type="any"),
    "say: reserved type": lambda a, c: a.say(c, begun(a, c), "a", message_type="saf/error"),
    "say: reserved header": lambda a, c: a.say(c, begun(a, c), "a", headers={"SAF-Whole": 1}),
    "say: large headers": lambda a, c: a.say(c, begun(a, c), "a", headers={"x": "y" * 1048577}),
    "end: unknown handle": lambda a, c: a.end(c, uuid4()),
    "end: twice": lambda a, c: a.end(c, ended(a, c)),
    "end: with error after the end": lambda a, c: a.end(c, ended(a, c), 1, "a"),
    "end: code of saf": lambda a, c: a.end(c, begun(a, c), -1, "a"),
    "end: code zero": lambda a, c: a.end(c, begun(a, c), 0, "a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_both_refuse_the_same_and_write_nothing(case: str, app: Dsn) -> None:
    prepare(app, app)
    with connect(app) as connection:
        saf.create_message_type(connection, "any", validation="json")
        saf.create_contract(connection, "typed", {"any": "any", "note": "any"})
    found = []
    for api in APIS.values():
        with app.connect(role="test") as connection:
            with pytest.raises((saf.SafError, psycopg.Error)) as refused:
                REFUSED[case](api, connection)
            connection.rollback()
        found.append(constraint(refused.value))
    assert found[0] is not None
    assert found[0] == found[1]
    assert written(app) == [[], [], []]


@both
def test_what_the_contract_allows_is_sent(api: Api, app: Dsn) -> None:
    prepare(app, app)
    with connect(app) as connection:
        saf.create_message_type(connection, "any", validation="json")
        saf.create_contract(connection, "typed", {"any": "any"})
    with app.connect(role="test") as connection:
        handle = api.begin(connection, contract="typed")
        for body in ({"a": 1}, '["\\u0000"]', b"7"):
            api.say(connection, handle, body, message_type="any")
    assert len(written(app)[1]) == 3


SPEAKS = "SELECT saf.say(%(handle)s, %(body)s::{type}, message_type => %(of)s)"


def test_sql_refuses_a_type_with_a_schema_by_its_name(app: Dsn) -> None:
    prepare(app, app)
    with app.connect(role="test") as connection:
        handle = Sql().begin(connection, contract="ordering")
        with pytest.raises(psycopg.errors.FeatureNotSupported, match=r"'order'.*JSON Schema") as no:
            Sql().say(connection, handle, {"amount": 1}, message_type="order")
    assert no.value.diag.constraint_name == "needs_library"
    assert no.value.diag.message_hint == "Send it with the Python library."


def test_sql_sends_a_body_up_to_the_size_of_a_fragment_and_refuses_a_larger_one(app: Dsn) -> None:
    prepare(app, app)
    with app.connect(role="test") as connection:
        handle = Sql().begin(connection)
        Sql().say(connection, handle, b"x" * 1048576)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="fragments") as no:
            Sql().say(connection, handle, b"x" * 1048577)
    assert no.value.diag.constraint_name == "needs_library"
    assert "xxx" not in str(no.value)


def test_a_null_is_refused_with_the_name_of_the_argument(app: Dsn) -> None:
    prepare(app, app)
    with app.connect(role="test", autocommit=True) as connection:
        handle = Sql().begin(connection)
        for call, name in (
            (f"saf.say('{handle}', NULL::text)", "body"),
            ("saf.say(NULL, 'a'::text)", "conversation NULL"),
            ("saf.begin_dialog(NULL, 'b')", "from_service"),
            ("saf.begin_dialog('shop', NULL)", "to_service"),
            ("saf.end_dialog(NULL)", "conversation NULL"),
            (f"saf.end_dialog('{handle}', 1)", "error_text"),
            (f"saf.end_dialog('{handle}', NULL, 'a')", "error_code"),
        ):
            with pytest.raises(psycopg.Error, match=name):
                connection.execute(f"SELECT {call}".encode())


def test_two_sessions_number_the_messages_of_one_end_in_turn(app: Dsn) -> None:
    prepare(app, app)
    with app.connect(role="test") as one:
        handle = Sql().begin(one)
    with app.connect(role="test") as one, app.connect(role="test") as other:
        Sql().say(one, handle, "1")
        other.execute("SET LOCAL lock_timeout = '10ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            Sql().say(other, handle, "2")
        other.rollback()
        one.commit()
        Sql().say(other, handle, "2")
        other.commit()
    assert [row[5] for row in written(app)[1]] == [1, 2]
