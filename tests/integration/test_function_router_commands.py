"""Routers whose classifier is a function of the database: rights, commands, plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import saf
from saf.broker.services import create_services
from saf.config import load
from saf.database import Dsn
from saf.errors import ConfigurationError
from saf.operating.doctor import examine
from saf.routing.routers import add_router
from saf.routing.routes import configuration
from saf.routing_service import RoutingService
from tests.dialogs import SHOP
from tests.hub import CLASSIFY, DEPARTURES, QUICKLY, Hub, classify_in_database
from tests.pipeline import connect
from tests.programs import configuration as configure
from tests.programs import saf as run
from tests.receivers import dead

# roles go after the databases in which they have rights
pytestmark = pytest.mark.usefixtures("new_role")

DONE, DEAD, USAGE, TRY_AGAIN = 0, 1, 2, 75
FUNCTION = ("--function", "public.classify", "--mode", "forward")


@pytest.fixture
def hub(new_broker: Any) -> Hub:
    """With a classifier in PL/pgSQL."""
    hub = Hub.at(new_broker)
    with connect(hub.hub) as connection:
        classify_in_database(connection)
    return hub


def send(hub: Hub, *texts: str) -> None:
    with hub.app.connect(role="test") as connection:
        for text in texts:
            saf.Outbox(from_service=SHOP).send(connection, DEPARTURES, text)


def execute(dsn: Dsn, statement: str) -> None:
    with connect(dsn) as connection:
        connection.execute(statement.encode())


def test_a_role_that_may_not_call_it_is_told_what_to_grant(
    hub: Hub, granted: Callable[..., Dsn]
) -> None:
    execute(
        hub.hub,
        'CREATE SCHEMA "App"; CREATE FUNCTION "App".classify(bytea) RETURNS text LANGUAGE sql AS '
        "$$ SELECT 'EWR' $$; REVOKE ALL ON FUNCTION \"App\".classify FROM PUBLIC",
    )
    with connect(hub.hub) as connection:
        add_router(connection, DEPARTURES, "function", '"App".classify', mode="forward")
    there = granted(hub.hub, "receiver", "dialog", "router")
    send(hub, "1")
    hub.forward()
    with pytest.raises(ConfigurationError) as refused:
        RoutingService(there, DEPARTURES).drain()
    role = conninfo_to_dict(there.conninfo)["user"]
    told = str(refused.value).partition("Let the owner run: ")[2]
    assert told == (
        f'GRANT USAGE ON SCHEMA "App" TO {role}; '
        f'GRANT EXECUTE ON FUNCTION "App".classify(bytea) TO {role}'
    )
    looks, calls = told.split("; ")
    execute(hub.hub, calls)
    with pytest.raises(ConfigurationError) as refused:
        RoutingService(there, DEPARTURES).drain()
    assert str(refused.value).endswith(f"Let the owner run: {looks}")
    execute(hub.hub, looks)
    assert RoutingService(there, DEPARTURES).drain() == 1


def test_it_runs_with_the_rights_of_the_service_s_role(
    hub: Hub, granted: Callable[..., Dsn]
) -> None:
    execute(
        hub.hub,
        "CREATE TABLE secret AS SELECT 'EWR' AS service;"
        "CREATE OR REPLACE FUNCTION public.classify(body bytea) RETURNS text LANGUAGE sql "
        "AS $$ SELECT service FROM secret $$",
    )
    send(hub, "1")
    hub.forward()
    serving = RoutingService(
        granted(hub.hub, "receiver", "dialog", "router"), DEPARTURES, policy=QUICKLY
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        serving.drain()
    assert dead(hub.hub) == []


# Commands


@pytest.fixture
def folder(app: Dsn, tmp_path: Path) -> Path:
    """With a saf.toml of one broker, in which the router's service lives."""
    with connect(app) as connection:
        create_services(connection, [DEPARTURES, "EWR"])
    configure(tmp_path / "saf.toml", {"shop": app}, {"shop": app})
    return tmp_path


def said(folder: Path, *arguments: str, code: int = DONE) -> str:
    done = run("router", *arguments, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code == USAGE else done.stdout


def test_a_function_is_checked_at_the_broker_unless_it_is_created_later(
    folder: Path, app: Dsn
) -> None:
    add = ("add", DEPARTURES, *FUNCTION)
    told = said(folder, *add, code=USAGE)
    assert "has no function public.classify, only none of that name" in told
    assert "CREATE FUNCTION public.classify(body bytea) RETURNS text" in told
    assert "add --elsewhere" in told
    assert "added" in said(folder, *add, "--elsewhere")
    serve = ("serve", DEPARTURES, "--broker", "shop", "--drain")
    assert "has no function public.classify" in said(folder, *serve, code=USAGE)
    execute(app, CLASSIFY)
    assert "changed" in said(folder, *add)
    assert "has sent on 0 messages" in said(folder, *serve)
    (row,) = json.loads(said(folder, "list", "--json"))["routers"]
    assert (row["kind"], row["expression"], row["mode"]) == (
        *("function", "public.classify", "forward"),
    )
    redirects = said(folder, *add[:4], code=USAGE)
    assert "only a routing service does: add --mode forward" in redirects
    assert "not schema.function" in said(
        folder, "add", DEPARTURES, "--function", "f", "--mode", "forward", code=USAGE
    )


def test_explain_asks_the_function_and_undoes_what_it_writes(folder: Path, app: Dsn) -> None:
    noted = "INSERT INTO noted VALUES (1); IF origin = 'fail' THEN"
    execute(app, "CREATE TABLE noted (n int);" + CLASSIFY.replace("IF origin = 'fail' THEN", noted))
    said(folder, "add", DEPARTURES, *FUNCTION)
    assert "becomes one for 'EWR'" in said(folder, "explain", DEPARTURES, "--body", "EWR")
    told = said(folder, "explain", DEPARTURES, "--body", "fail", code=DEAD)
    assert "its classifier raised RaiseException: told to fail" in told
    with connect(app) as connection:
        assert connection.execute("SELECT FROM noted").rowcount == 0
    execute(app, "DROP TABLE noted")
    told = said(folder, "explain", DEPARTURES, "--body", "EWR", code=TRY_AGAIN)
    assert "would wait: router 'departures': its classifier raised UndefinedTable" in told


def test_the_doctor_finds_a_router_whose_function_is_gone(folder: Path, app: Dsn) -> None:
    def wrong() -> list[str]:
        found = examine(load(folder / "saf.toml"))
        return [one.what for one in found if one.check == "routes" and one.severity == "warning"]

    execute(app, CLASSIFY)
    said(folder, "add", DEPARTURES, *FUNCTION)
    assert wrong() == []
    execute(app, "DROP FUNCTION public.classify")
    (what,) = wrong()
    assert "has no function public.classify" in what
    assert "Its routing service does not start" in what
    said(folder, "disable", DEPARTURES)
    assert wrong() == []


def test_a_plan_and_saf_toml_have_such_routers(folder: Path, app: Dsn) -> None:
    router = 'kind = "function"\nexpression = "public.classify"\n'
    plan = folder / "plan.toml"
    plan.write_text(f"[brokers.shop.routers.departures]\n{router}")
    refused = run("apply", "plan.toml", "--yes", cwd=folder)
    assert refused.returncode == USAGE
    assert "routers.departures: router 'departures' calls a function" in refused.stderr
    plan.write_text(f'[brokers.shop.routers.departures]\n{router}mode = "forward"\n')
    assert run("apply", "plan.toml", "--yes", cwd=folder).returncode == DONE
    with connect(app) as connection:
        (there,) = configuration(connection).routers
    assert (there.router.kind, there.router.expression) == ("function", "public.classify")
    exported = run("export", "--broker", "shop", cwd=folder).stdout
    plan.write_text(exported)
    assert "nothing to do" in run("apply", "plan.toml", "--prune", "--yes", cwd=folder).stdout
    file = folder / "saf.toml"
    file.write_text(file.read_text() + f'[routers.arrivals]\n{router}mode = "forward"\n')
    rows = json.loads(said(folder, "list", "--json"))["routers"]
    assert [(row["service"], row["kind"], row["origin"]) for row in rows] == [
        ("arrivals", "function", "saf.toml"),
        ("departures", "function", "saf.router"),
    ]
