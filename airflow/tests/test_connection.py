"""The connection type ``saf``, its form, and DSNs of Airflow's connections."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from airflow.sdk import Connection
from conftest import AIRFLOW, PYTHON, SAF, Site

from saf_airflow import Saf, SafForwardedTrigger, SafHook, SafPendingTrigger
from saf_airflow.connection import dsn, of_connection, resolved

SECRET = "p@ss/w:rd?%$#&"


def fields(text: str) -> dict[str, Any]:
    """The fields of a conninfo: ``host=… dbname=…``."""
    return dict(word.split("=", 1) for word in text.split())


def postgres(text: str, **more: Any) -> str:
    """The variable of an Airflow connection to a database of the tests."""
    parts = fields(text)
    given = {
        "conn_type": "postgres",
        "host": parts["host"],
        "schema": parts["dbname"],
        "login": parts["user"],
        "password": SECRET,  # the server asks for none
        "extra": {"sslmode": "prefer", "cursor": "dictcursor"},
        **more,
    }
    return json.dumps({name: value for name, value in given.items() if value is not None})


@pytest.fixture
def connected(site: Site, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """A saf.toml without a dsn, and connections for its variables; the environment for them."""
    text = site.config.read_text()
    for dsn_, variable in ((site.shop, "SHOP_DSN"), (site.mom, "MOM_DSN")):
        text = text.replace(json.dumps(dsn_), f'"${{{variable}}}"')
    site.config.write_text(text + "chunk_rows = 1\n")
    extra = {
        "command": str(SAF),
        "config": str(site.config),
        "connections": {"SHOP_DSN": "shop_db", "MOM_DSN": "mom_db"},
    }
    given = {
        "AIRFLOW_CONN_SAF": json.dumps({"conn_type": "saf", "extra": extra}),
        "AIRFLOW_CONN_SHOP_DB": postgres(site.shop),
        "AIRFLOW_CONN_MOM_DB": postgres(site.mom),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


def ran(site: Site, dag: str, environment: Mapping[str, str]) -> str:
    """Run ``airflow dags test``; return its log."""
    done = subprocess.run(
        [AIRFLOW, "dags", "test", dag],
        env={**site.environment, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


def test_airflow_lists_the_provider_its_connection_type_and_its_form(site: Site) -> None:
    script = (
        "import json\n"
        "from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService\n"
        "(found,) = [one for one in HookMetaService.hook_meta_data()"
        " if one.connection_type == 'saf']\n"
        "print(found.model_dump_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=site.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    form = json.loads(done.stdout.splitlines()[-1])
    assert form["hook_name"] == SafHook.hook_name
    assert {"command", "config", "environment", "connections"} == set(form["extra_fields"])
    assert form["standard_fields"]["password"]["hidden"] is True

    def listed(*words: str) -> list[dict[str, str]]:
        done = subprocess.run(
            [AIRFLOW, "providers", *words, "--output", "json"],
            env=site.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found: list[dict[str, str]] = json.loads(done.stdout[done.stdout.index("[{") :])
        return found

    assert "saf-airflow" in {one["package_name"] for one in listed("list")}
    (hook,) = [one for one in listed("hooks") if one["connection_type"] == "saf"]
    assert hook["class"] == "saf_airflow.connection.SafHook"
    assert hook["conn_id_attribute_name"] == "saf_conn_id"


def test_a_dag_forwards_with_the_dsns_of_airflows_connections_and_shows_no_password(
    site: Site, connected: Mapping[str, str]
) -> None:
    site.send(2)
    site.dag("connected", "SafForwardOperator(task_id='forward', saf_conn_id='saf')")
    output = ran(site, "connected", connected)
    assert site.stored() == 2, output
    assert SECRET not in output


def test_templates_choose_the_configuration_the_arguments_and_the_environment(
    site: Site, connected: Mapping[str, str]
) -> None:
    site.send(2)
    (site.folder / "connected.toml").write_text(site.config.read_text())
    site.config.write_text("[brokers.shop]\nnothing = 1\n")
    site.dag(
        "connected",
        "SafForwardOperator(task_id='forward', saf_conn_id='saf',"
        f" config='{site.folder}/{{{{ dag.dag_id }}}}.toml',"
        " arguments=['--spark', '{{ params.spark }}'],"
        " environment={'SAF_FORWARDER__CHUNK_ROWS': '{{ 1 + 1 }}'},"
        " params={'spark': 'auto'})",
    )
    output = ran(site, "connected", connected)
    assert site.stored() == 2, output


def test_the_sensor_and_the_triggers_take_the_connection_too(
    site: Site, connected: Mapping[str, str]
) -> None:
    site.dag(
        "sensor",
        "SafForwardedSensor(task_id='wait', saf_conn_id='saf', poke_interval=1, timeout=60)",
    )
    assert "Marking run" in ran(site, "sensor", connected)
    assert site.states("sensor")["wait"][0] == "success"
    site.send()
    found = asyncio.run(SafPendingTrigger(saf_conn_id="saf")._found())
    assert found == {"pending": ["shop"]}
    described = of_connection(SafHook.get_connection("saf"))
    trigger = SafForwardedTrigger(
        command=described.command,
        config=described.config,
        connections=described.connections,
        question=["outbox", "forwarded", "--json", "--until", "2020-01-01T00:00:00Z"],
    )
    stored = json.dumps(trigger.serialize()[1])
    assert "shop_db" in stored
    assert "@" not in stored, "a trigger's arguments are kept in Airflow's database"

    async def first() -> Any:
        return (await anext(trigger.run())).payload

    assert asyncio.run(first()) == {"state": "forwarded", "said": ""}


@pytest.mark.usefixtures("connected")
def test_the_hook_runs_commands_and_says_whether_the_databases_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.send(3)
    hook = SafHook("saf")
    assert hook.run("forward", "--json")["forwarded"] == 3
    assert hook.test_connection() == (True, "all brokers of saf.toml answer")
    with pytest.raises(Exception, match="saf purge --nonsense has ended with exit code 2") as error:
        hook.run("purge", "--nonsense")
    assert type(error.value).__name__ == "AirflowFailException"
    gone = postgres(site.shop, host="/nonexistent")
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", gone)
    is_up, why = hook.test_connection()
    assert not is_up
    assert "/nonexistent" in why
    assert SECRET not in why


def connection(**given: Any) -> Connection:
    extra = given.pop("extra", None)
    return Connection(conn_id="db", extra=extra and json.dumps(extra), **given)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({"host": "db1", "schema": "shop"}, "postgresql://db1/shop"),
        (
            {"host": "db1", "port": 6432, "login": "a b", "password": SECRET, "schema": "s/1"},
            "postgresql://a%20b:p%40ss%2Fw%3Ard%3F%25%24%23%26@db1:6432/s%2F1",
        ),
        ({"host": "::1", "schema": "shop"}, "postgresql://[::1]/shop"),
        ({"host": "/run/pg", "login": "x", "schema": "shop"}, "postgresql://x@%2Frun%2Fpg/shop"),
        (
            {"host": "db1", "schema": "shop", "extra": {"sslmode": "verify-full", "cursor": "x"}},
            "postgresql://db1/shop?sslmode=verify-full",
        ),
        (
            {"host": "db1", "schema": "shop", "extra": {"options": "-c a=b c", "keepalives": True}},
            "postgresql://db1/shop?options=-c%20a%3Db%20c&keepalives=1",
        ),
    ],
)
def test_a_postgres_connection_is_a_dsn(given: dict[str, Any], url: str) -> None:
    assert dsn(connection(conn_type="postgres", **given)) == url
    shown = subprocess.run(
        [
            PYTHON,
            "-c",
            "import sys; from saf.database import Dsn; print(Dsn(sys.argv[1]).parts)",
            url,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    if password := given.get("password"):
        assert repr(password) in shown.stdout
        assert unquote(urlsplit(url).password or "") == password


def test_a_connection_of_another_type_is_its_uri() -> None:
    given = connection(conn_type="redis", host="queue", port=6379, password="a/b")
    assert dsn(given) == "redis://:a%2Fb@queue:6379"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"comand": "/x"}, "its extra has comand; it may have command, config, environment, conn"),
        ({"command": 7}, "command 7: it must be a path"),
        ({"connections": ["shop_db"]}, "has connections, which must be strings by name"),
        ({"environment": "A=b"}, "has environment, which must be JSON such as"),
        ({"environment": {"A": 1}}, "has environment, which must be strings by name"),
    ],
)
def test_a_connection_that_is_none_of_saf_is_refused_by_its_field(
    extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="connection 'db': ") as error:
        of_connection(connection(conn_type="saf", extra=extra))
    assert said in str(error.value)


def test_fields_that_the_form_leaves_empty_have_their_defaults() -> None:
    extra = {"command": "", "config": None, "connections": None, "environment": '{"A": "b"}'}
    found = of_connection(connection(conn_type="saf", extra=extra))
    assert found == Saf(environment={"A": "b"})


def test_a_postgres_connection_that_libpq_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match="iam: saf needs a password"):
        dsn(connection(conn_type="postgres", extra={"iam": True}))
    with pytest.raises(ValueError, match="has a, which must be a string or a number"):
        dsn(connection(conn_type="postgres", extra={"a": {"b": 1}}))


def test_a_command_shows_no_value_of_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DB", json.dumps({"conn_type": "postgres", "password": SECRET}))
    found = resolved(Saf(connections={"SHOP_DSN": "db"}, environment={"TOKEN": SECRET}))
    assert "%" in found.environment["SHOP_DSN"]
    assert SECRET not in repr(found)
    assert "%40" not in repr(found)


def test_a_dag_with_a_connection_of_a_wrong_form_fails_at_once(
    site: Site, connected: Mapping[str, str]
) -> None:
    site.dag(
        "wrong",
        "SafForwardOperator(task_id='forward', saf_conn_id='saf', retries=1,"
        " retry_delay=timedelta(0))",
    )
    wrong = {**connected, "AIRFLOW_CONN_SAF": '{"conn_type": "saf", "extra": {"path": "/x"}}'}
    assert "its extra has path" in ran(site, "wrong", wrong)
    assert site.states("wrong")["forward"] == ("failed", 1)
