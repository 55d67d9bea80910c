"""Routers whose classifier is a function of the database, called by their routing service."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import saf
from saf.database import Dsn, fetch
from saf.engine.resolving import Matcher, Resolver
from saf.errors import ConfigurationError, UsageError
from saf.operating.dry_run import try_out
from saf.routing import functions
from saf.routing.functions import check, parsed
from saf.routing.matching import Router, Routes
from saf.routing.routers import add_router
from saf.routing.routes import NOTHING
from saf.routing_service import RoutingService
from saf.testing.databases import Database
from tests.dialogs import SHOP, begin, receive, said
from tests.hub import CLASSIFY, DEPARTURES, Hub, classify_in_database, replica
from tests.pipeline import bodies, connect
from tests.processes import start, wait
from tests.receivers import dead, let_the_server_notice, waiting

NOTED = """
CREATE TABLE noted (body text, at timestamptz DEFAULT statement_timestamp());
GRANT ALL ON noted TO PUBLIC;
CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO noted VALUES (convert_from(body, 'UTF8'));
    IF body = 'fail' THEN
        RAISE EXCEPTION 'told to fail' USING DETAIL = 'as it was told';
    END IF;
    RETURN nullif(convert_from(body, 'UTF8'), 'nobody');
END $$;
"""
"""A classifier that writes a row for each message."""

CALLED = Router(service=DEPARTURES, kind="function", expression="public.classify")


@pytest.fixture
def hub(new_broker: Any) -> Hub:
    """With a classifier in PL/pgSQL."""
    hub = Hub.at(new_broker)
    with connect(hub.hub) as connection:
        classify_in_database(connection)
    return hub


def send(hub: Hub, *texts: str | bytes, **more: Any) -> None:
    with hub.app.connect(role="test") as connection:
        for text in texts:
            saf.Outbox(from_service=SHOP).send(connection, DEPARTURES, text, **more)


def execute(hub: Hub, statement: str) -> None:
    with connect(hub.hub) as connection:
        connection.execute(statement.encode())


def at_hub(hub: Hub, query: str) -> list[tuple[Any, ...]]:
    with connect(hub.hub) as connection:
        return list(fetch(connection, query))


def noted(hub: Hub) -> list[str]:
    return sorted(body for (body,) in at_hub(hub, "SELECT body FROM noted"))


def errors(hub: Hub) -> list[str]:
    return [error for (error,) in at_hub(hub, "SELECT error FROM saf.dead_letter ORDER BY id")]


# What is called, and how


def test_a_function_of_the_database_names_the_service_of_each_message(hub: Hub) -> None:
    send(hub, "EWR", "JFK", "EWR", key="N1")
    assert hub.carry() == 3
    assert (bodies(hub.ewr), bodies(hub.jfk)) == (["EWR", "EWR"], ["JFK"])


@pytest.mark.parametrize("engine", ["dsn", "sqlalchemy"])
def test_one_statement_calls_it_for_all_messages_of_a_delivery(hub: Hub, engine: str) -> None:
    execute(hub, NOTED)
    send(hub, *["EWR"] * 40)
    hub.forward()
    there: Any = hub.hub if engine == "dsn" else sa.create_engine(Database(hub.hub).url)
    assert RoutingService(there, DEPARTURES).drain() == 40
    if engine == "sqlalchemy":
        there.dispose()
    assert at_hub(hub, "SELECT count(*), count(DISTINCT at) FROM noted") == [(40, 1)]
    hub.forward()
    assert len(bodies(hub.ewr)) == 40


def test_many_large_bodies_take_several_calls(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MOST_BYTES", 9)
    execute(hub, NOTED)
    send(hub, *["EWR"] * 10, key="N1")
    hub.carry()
    assert at_hub(hub, "SELECT count(*), count(DISTINCT at) FROM noted") == [(10, 4)]
    assert len(bodies(hub.ewr)) == 10


def test_it_gets_the_bytes_of_a_body_whatever_they_are(hub: Hub) -> None:
    execute(
        hub,
        "CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE sql "
        "AS $$ SELECT CASE WHEN body = '\\x5c00ff27'::bytea THEN 'EWR' ELSE 'JFK' END $$",
    )
    send(hub, b"\\\x00\xff'", b"")
    hub.carry()
    with connect(hub.ewr) as connection:
        assert fetch(connection, "SELECT body FROM saf.inbox") == [(b"\\\x00\xff'",)]
    assert bodies(hub.jfk) == [""]


def test_of_a_dialog_it_sees_the_first_message_and_of_a_key_if_the_router_says_so(
    hub: Hub,
) -> None:
    execute(hub, NOTED)
    begin(hub.app, "EWR", "JFK", "x", to_service=DEPARTURES)
    hub.carry()
    assert said(receive(hub.ewr, "EWR")) == ["EWR", "JFK", "x"]
    assert noted(hub) == ["EWR"]
    with connect(hub.hub) as connection:
        add_router(
            *(connection, DEPARTURES, "function", "public.classify"), mode="forward", once_per="key"
        )
    send(hub, "JFK", "EWR", "y", key="N1")
    hub.carry()
    assert bodies(hub.jfk) == ["JFK", "EWR", "y"]
    assert noted(hub) == ["EWR", "JFK"]


ODD = '"My ""app"".%s"'


def test_a_name_is_quoted_as_in_sql_and_tables_beside_the_function_are_found(hub: Hub) -> None:
    name = f'{ODD}."Which, then?"'
    execute(
        hub,
        f"CREATE SCHEMA {ODD}; CREATE TABLE {ODD}.place (body bytea, service text);"
        "CREATE TABLE public.place (body bytea, service text);"
        f"INSERT INTO {ODD}.place VALUES ('1', 'EWR'); INSERT INTO public.place VALUES ('1', 'x');"
        f"CREATE FUNCTION {name}(bytea) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN (SELECT service FROM place WHERE place.body = $1); END $$",
    )
    with connect(hub.hub) as connection:
        add_router(connection, DEPARTURES, "function", f" {name} ", mode="forward")
    send(hub, "1")
    hub.carry()
    assert bodies(hub.ewr) == ["1"]


def test_what_it_does_to_the_session_s_settings_ends_with_the_call(hub: Hub) -> None:
    execute(
        hub,
        "CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM set_config('search_path', 'nowhere', false);"
        "PERFORM set_config('role', 'pg_monitor', false); RETURN 'EWR'; END $$",
    )
    with connect(hub.hub) as connection:
        add_router(
            *(connection, DEPARTURES, "function", "public.classify"), mode="forward", once_per="key"
        )
    send(hub, "1", "2", key="N1")
    hub.carry()
    assert bodies(hub.ewr) == ["1", "2"]
    assert dead(hub.hub) == []


# Failures


def test_an_error_or_no_answer_is_of_one_message_and_all_others_continue(hub: Hub) -> None:
    execute(hub, NOTED)
    texts = [b"EWR", b"fail", b"JFK", b"nobody", b"\xff", b"EWR", b"LGA", b"JFK", b"fail"]
    send(hub, *texts)
    assert hub.carry() == 4
    assert (bodies(hub.ewr), bodies(hub.jfk)) == (["EWR"] * 2, ["JFK"] * 2)
    assert sorted(errors(hub)) == [
        "router 'departures': it names 'LGA', which no route leads to",
        "router 'departures': its classifier raised CharacterNotInRepertoire: "
        'invalid byte sequence for encoding "UTF8": 0xff',
        *["router 'departures': its classifier raised RaiseException: told to fail; "
          "DETAIL: as it was told"] * 2,
        "router 'departures': its classifier returns no service",
    ]  # fmt: skip
    assert {reason for _, reason in at_hub(hub, "SELECT 1, reason FROM saf.dead_letter")} == {
        "unresolved"
    }
    assert noted(hub) == sorted(["EWR", "JFK", "nobody", "EWR", "LGA", "JFK"]), "each once"


def test_an_initiator_is_told_that_its_dialog_cannot_be_resolved(hub: Hub) -> None:
    failed = begin(hub.app, "fail", to_service=DEPARTURES)
    hub.carry()
    (error,) = receive(hub.app, SHOP)
    assert error.dialog == failed
    why = "router 'departures': its classifier raised RaiseException: told to fail"
    assert error.json()["text"] == why


def test_what_it_writes_commits_with_the_messages_or_not_at_all(hub: Hub) -> None:
    execute(hub, NOTED)
    send(hub, *["EWR"] * 5, *["JFK"] * 5)
    hub.forward()
    assert wait(start(replica, hub.hub, failpoint="receive_settled:1")) == -signal.SIGKILL
    let_the_server_notice(hub.hub)
    assert noted(hub) == []
    while hub.service().drain() or waiting(hub.hub):
        pass
    hub.forward()
    assert noted(hub) == ["EWR"] * 5 + ["JFK"] * 5
    assert (len(bodies(hub.ewr)), len(bodies(hub.jfk))) == (5, 5)


def test_what_it_has_written_stays_if_another_message_cannot_be_sent_on(hub: Hub) -> None:
    execute(hub, NOTED)
    execute(
        hub,
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not this one'; END $$;"
        "CREATE TRIGGER refuses BEFORE INSERT ON saf.outbox FOR EACH ROW "
        "WHEN (NEW.key = 'refused') EXECUTE FUNCTION refuses()",
    )
    send(hub, "EWR", key="N1")
    send(hub, "JFK", key="refused")
    hub.forward()
    assert hub.service(policy=saf.Policy()).drain() == 1
    assert noted(hub) == ["EWR", "JFK"]
    hub.forward()
    assert bodies(hub.ewr) == ["EWR"]


def test_an_error_that_is_not_about_a_message_makes_no_message_unresolved(hub: Hub) -> None:
    execute(
        hub,
        "CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN (SELECT max(service) FROM airports); END $$",
    )
    send(hub, "1", "2", "3")
    hub.forward()
    with pytest.raises(psycopg.errors.UndefinedTable):
        hub.service().drain()
    assert dead(hub.hub) == []
    execute(hub, "CREATE TABLE airports AS SELECT 'EWR' AS service")
    handled = 0
    while handled < 3:
        handled += hub.service().drain()
    hub.forward()
    assert sorted(bodies(hub.ewr)) == ["1", "2", "3"]
    assert dead(hub.hub) == []


# Deployment


def test_a_function_that_is_dropped_ends_its_service_and_nothing_is_received(hub: Hub) -> None:
    send(hub, "EWR")
    hub.forward()
    execute(hub, "DROP FUNCTION public.classify(bytea)")
    with pytest.raises(ConfigurationError, match=r"has no function public\.classify, only none"):
        hub.service().run()
    assert (dead(hub.hub), waiting(hub.hub)) == ([], [])
    execute(hub, "CREATE FUNCTION classify(text) RETURNS text LANGUAGE sql AS $$ SELECT $1 $$")
    with pytest.raises(ConfigurationError, match=r"has public\.classify\(text\) RETURNS text, and"):
        hub.service().run()
    execute(hub, CLASSIFY)
    hub.carry()
    assert bodies(hub.ewr) == ["EWR"]


def test_a_function_that_is_dropped_while_messages_are_in_hand_makes_no_dead_letter(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(connection: psycopg.Connection[Any], router: Router, *, calls: bool) -> None:
        check(connection, router, calls=calls)
        execute(hub, "DROP FUNCTION IF EXISTS public.classify(bytea)")

    send(hub, "EWR", "JFK")
    hub.forward()
    service = hub.service()
    service._check()
    with monkeypatch.context() as patched:
        patched.setattr(functions, "check", checked)
        patched.setattr(service, "_check", lambda: None)
        with pytest.raises(psycopg.errors.UndefinedFunction):
            service.drain()
    assert dead(hub.hub) == []
    execute(hub, CLASSIFY)
    hub.carry()
    hub.carry()
    assert (bodies(hub.ewr), bodies(hub.jfk)) == (["EWR"], ["JFK"])


def test_a_function_that_is_replaced_counts_from_the_next_delivery_on(hub: Hub) -> None:
    service = hub.service()
    for name in ("EWR", "JFK"):
        execute(
            hub,
            "CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE sql "
            f"AS $$ SELECT '{name}' $$",
        )
        send(hub, "1")
        hub.forward()
        service.drain()
    hub.forward()
    assert (bodies(hub.ewr), bodies(hub.jfk)) == (["1"], ["1"])


@pytest.mark.every_postgresql
@pytest.mark.parametrize(
    ("created", "why"),
    [
        ("FUNCTION f(bytea) RETURNS text LANGUAGE sql AS $$ SELECT '' $$", None),
        ("FUNCTION f(bytea, OUT answer text) LANGUAGE sql AS $$ SELECT '' $$", None),
        ("FUNCTION f(bytea) RETURNS text LANGUAGE sql AS $$ SELECT '' $$; CREATE FUNCTION "
         "f(text) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$", None),
        ("SCHEMA empty", "has no function public.f, only none of that name"),
        ("FUNCTION length(bytea) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$",
         "has no function public.f, only none"),
        ("PROCEDURE f(bytea) LANGUAGE sql AS $$ $$", "has PROCEDURE public.f(IN bytea), and"),
        ("FUNCTION f(bytea) RETURNS SETOF text LANGUAGE sql AS $$ SELECT '' $$",
         "has public.f(bytea) RETURNS SETOF text, and a classifier is"),
        ("FUNCTION f(text) RETURNS text LANGUAGE sql AS $$ SELECT '' $$", "public.f(text)"),
        ("FUNCTION f(bytea, int) RETURNS text LANGUAGE sql AS $$ SELECT '' $$", "(bytea, integer)"),
        ("FUNCTION f(VARIADIC bytea[]) RETURNS text LANGUAGE sql AS $$ SELECT '' $$", "VARIADIC"),
        ("FUNCTION f(bytea) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$", "RETURNS integer"),
        ("AGGREGATE f(bytea) (SFUNC = byteacat, STYPE = bytea)", "has AGGREGATE public.f"),
        ("SCHEMA app; CREATE FUNCTION app.f(bytea) RETURNS text LANGUAGE sql AS $$ SELECT '' $$",
         "only app.f(bytea) RETURNS text of that name"),
    ],
)  # fmt: skip
def test_something_else_than_a_function_of_a_body_is_refused_with_what_it_is(
    app: Dsn, created: str, why: str | None
) -> None:
    router = replace(CALLED, expression="public.f")
    with connect(app) as connection:
        connection.execute(f"CREATE {created}".encode())
        if why is None:
            check(connection, router, calls=True)
            assert functions.call(connection, router, [b"1", b"2"]) == ["", ""]
            return
        with pytest.raises(ConfigurationError) as refused:
            check(connection, router)
    assert why in str(refused.value)
    assert "public.f(body bytea) RETURNS text" in str(refused.value)


# What is refused


@pytest.mark.parametrize(
    "name", ["classify", "a.b.c", "a:b", "public.", "public.f(bytea)", "1.f", ""]
)
def test_a_name_without_a_schema_is_refused(app: Dsn, name: str) -> None:
    with connect(app) as connection, pytest.raises(UsageError, match=r"not schema\.function"):
        add_router(connection, "s", "function", name, mode="forward")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Public.Classify", ("public", "classify")),
        ("public . classify", ("public", "classify")),
        ('"Public"."a.""b"', ("Public", 'a."b')),
        ("äpp.ÄF$1", ("äpp", "Äf$1")),
    ],
)
def test_a_name_is_read_as_postgresql_reads_it(
    app: Dsn, written: str, name: tuple[str, str]
) -> None:
    found = parsed(replace(CALLED, expression=written))
    assert (found.schema, found.function) == name
    with connect(app) as connection:
        assert fetch(connection, "SELECT parse_ident(%(written)s)", {"written": written}) == [
            ([*name],)
        ]


def test_a_router_that_redirects_cannot_call_a_function_of_the_database(app: Dsn) -> None:
    with connect(app) as connection:
        with pytest.raises(UsageError, match="only a routing service does: add --mode forward"):
            add_router(connection, "s", "function", "public.classify")
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute(
                "INSERT INTO saf.router (service, kind, expression) VALUES ('s', 'function', 'a.b')"
            )
    resolver = Resolver([CALLED], Matcher(Routes()), memory=None)  # type: ignore[arg-type]
    assert "only a routing service does" in str(resolver._routers[DEPARTURES].problem)


# A dry run


def test_a_dry_run_asks_the_function_and_leaves_nothing(hub: Hub) -> None:
    execute(hub, NOTED)
    with connect(hub.hub) as connection:
        found = {
            text: try_out(connection, saf.Message(service=DEPARTURES, body=text), None, NOTHING)
            for text in ("JFK", "fail", "nobody")
        }
        assert found["JFK"].goes.service == "JFK"
        assert "raised RaiseException: told to fail" in str(found["fail"].dead)
        assert "returns no service" in str(found["nobody"].dead)
        assert noted(hub) == []
        connection.execute("DROP TABLE noted")
        waits = try_out(connection, saf.Message(service=DEPARTURES, body="JFK"), None, NOTHING)
        assert "raised UndefinedTable" in str(waits.waits)
        connection.execute("DROP FUNCTION public.classify")
        waits = try_out(connection, saf.Message(service=DEPARTURES, body="JFK"), None, NOTHING)
        assert "has no function public.classify" in str(waits.waits)
