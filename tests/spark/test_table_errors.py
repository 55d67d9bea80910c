"""Whatever is wrong with a read is said in one sentence, which Spark lets through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from saf.errors import (
    ConfigurationError,
    Restored,
    SafError,
    SchemaMissing,
    Unavailable,
    UsageError,
)
from saf.spark.table import part
from saf.spark.table.options import options_of
from tests.pipeline import connect
from tests.programs import configuration
from tests.spark.tables import Tables

GIVEN = {"broker": "app", "log": "outbox"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**GIVEN, "brokr": "x"}, "unknown option 'brokr' of the format saf (did you mean 'br"),
        ({"log": "outbox"}, "which broker?"),
        ({}, "Say CREATE TEMPORARY VIEW … USING saf OPTIONS (…)"),
        ({**GIVEN, "option.log": "outbox"}, "makes no table: Spark's catalog does not pass"),
        ({**GIVEN, "provider": "saf"}, "Say CREATE TEMPORARY VIEW … USING saf"),
        ({**GIVEN, "dsn_from": "X"}, "which broker?"),
        ({**GIVEN, "broker": ""}, "the option broker names nobody (''): give it a name"),
        ({**GIVEN, "broker": " , "}, "the option broker names nobody (' , ')"),
        ({"dsn_from": "X", "log": "inbox", "config": "x"}, "config goes with broker"),
        ({**GIVEN, "log": "Outbox"}, "the option log is outbox or inbox, and not 'Outbox'"),
        ({"broker": "app"}, "the option log is outbox or inbox, and not ''"),
        ({**GIVEN, "partitions": "0"}, "from 1 to 1024, and not '0'"),
        ({**GIVEN, "partitions": "many"}, "from 1 to 1024, and not 'many'"),
        ({**GIVEN, "path": "x"}, "unknown option 'path'"),
    ],
)
def test_an_option_that_is_wrong_is_named(options: Mapping[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        options_of(options)
    assert said in str(failure.value)


def test_a_dsn_in_an_option_is_refused_and_not_repeated() -> None:
    for name in ("dsn", "url", "password"):
        with pytest.raises(ConfigurationError, match="would be shown by Spark") as failure:
            options_of({**GIVEN, name: "postgresql://u:hunter2@h/d"})
        assert "hunter2" not in str(failure.value)


def test_names_of_options_are_of_any_case() -> None:
    assert options_of({"BROKER": "app", "Log": "inbox", "Partitions": "3"}).partitions == 3


@pytest.fixture
def tables(app: Dsn, mom: Dsn, tmp_path: Path) -> Tables:
    return Tables(tmp_path, mom, app=app)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"broker": "ap"}, None, "saf.toml has no such broker (did you mean 'app'?)"),
        ({"broker": "files"}, None, "is of kind 'jsonl', and no broker"),
        ({"log": "mailbox"}, None, "the option log is outbox or inbox, and not 'mailbox'"),
        ({"config": "/no/such.toml"}, None, "cannot read /no/such.toml"),
        ({}, "id long, keys string", "an outbox has no column 'keys' (did you mean 'key'?)"),
        ({}, "id int", "the column 'id' of an outbox is a bigint, and not a int"),
        ({}, "received_at timestamp", "an outbox has no column 'received_at'"),
        ({}, "headers map<string,int>", "is a map<string,string> or a string, and not a map"),
    ],
)
def test_spark_lets_the_sentence_through(
    tables: Tables, tmp_path: Path, options: dict[str, str], schema: str | None, said: str
) -> None:
    with tables.config.open("a") as file:
        file.write(f'\n[destinations.files]\nkind = "jsonl"\nfolder = "{tmp_path}"\n')
    with pytest.raises(Exception) as failure:  # noqa: PT011 - Spark has several
        tables(**{**GIVEN, **options}, schema=schema).collect()
    assert said in str(failure.value)


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch, app: Dsn) -> None:
    options = options_of({"dsn_from": "SAF_TEST_DSN", "log": "outbox"})
    monkeypatch.delenv("SAF_TEST_DSN", raising=False)
    with pytest.raises(ConfigurationError, match="'SAF_TEST_DSN': this environment variable is"):
        options.dsn()
    monkeypatch.setenv("SAF_TEST_DSN", app.conninfo)
    assert options.dsn() == app
    assert options.what == "the broker of $SAF_TEST_DSN"


def taking(dsn: Dsn, error: type[SafError], said: str) -> None:
    with pytest.raises(error, match=said):
        part.take("broker 'app'", dsn, "outbox")


def test_a_database_without_the_schema_is_refused(new_database: Callable[[str], Dsn]) -> None:
    taking(new_database("bare"), SchemaMissing, "run `saf migrate")


def test_a_restored_broker_is_refused(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("UPDATE saf.broker SET system_identifier = system_identifier + 1")
    taking(app, Restored, "Run `saf rebase` first")


def test_a_standby_is_refused(own_server: EmbeddedServer) -> None:
    app = own_server.create_database("app")
    migrate(app)
    own_server.stop()
    (own_server.data_dir / "standby.signal").touch()
    own_server.start()
    taking(app, Unavailable, "server is in hot standby mode")


def test_a_schema_of_another_version_is_refused(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("UPDATE saf.alembic_version SET version_num = '0001'")
    taking(app, UsageError, "has saf schema 0001")


def test_a_broker_of_a_fleet_is_found_and_one_that_is_not_there_is_named(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    config = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    with config.open("a") as file:
        file.write(f'\n[fleets.tenants]\ndsn = "{app.conninfo}"\ndatabases = "{app.database}"\n')

    def dsn(name: str) -> Dsn:
        return options_of({"broker": name, "log": "outbox", "config": str(config)}).dsn()

    assert dsn(f"tenants/{app.database}").database == app.database
    with pytest.raises(ConfigurationError, match="'tenants/x': not in the fleet"):
        dsn("tenants/x")
