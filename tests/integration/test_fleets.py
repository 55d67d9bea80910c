"""Fleets: sources found by a pattern or by a query, and what is said of those that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from saf.broker.embedded import EmbeddedServer
from saf.config import Fleet, Settings, load
from saf.database import Dsn
from saf.destinations.postgresql import Postgresql
from saf.errors import ConfigurationError, Unavailable
from saf.operating.doctor import examine
from saf.operating.places import ask, ask_all
from tests.pipeline import connect
from tests.programs import last_json, saf, send

SECRET = "tr0ub4dor"


def registry(app: Dsn, *rows: tuple[str | None, str | None]) -> Fleet:
    """A table of tenants in ``app``, and the fleet that it lists."""
    with connect(app) as connection:
        connection.execute("CREATE TABLE tenant (number int, name text, dsn text)")
        for number, (name, dsn) in enumerate(rows):
            connection.execute("INSERT INTO tenant VALUES (%s, %s, %s)", [number, name, dsn])
    return Fleet(dsn=app, query="SELECT name, dsn FROM tenant ORDER BY number")


def write(file: Path, fleet: str, mom: Dsn) -> Path:
    file.write_text(
        f"[fleets.tenants]\n{fleet}\n[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        '[forwarder]\ndefault_destination = "mom"\nmaster = "local[1]"\n'
    )
    return file


def test_a_pattern_finds_the_databases_of_the_server_with_such_names(
    new_broker: Callable[[str], Dsn], server: EmbeddedServer
) -> None:
    tenants = [new_broker("pattern_a"), new_broker("pattern_b")]
    new_broker("pattern-c")
    found = ask("tenants", Fleet(dsn=server.dsn("postgres"), databases="saf_test_*_pattern_[ab]"))
    assert {name: broker.dsn.database for name, broker in found.brokers.items()} == {
        f"tenants/{tenant.database}": tenant.database for tenant in tenants
    }
    assert not found.problems


def test_a_query_gives_names_and_dsns_and_a_bad_row_is_only_its_own_problem(
    app: Dsn, mom: Dsn
) -> None:
    fleet = registry(
        app,
        ("acme", mom.conninfo),
        (None, mom.conninfo),
        ("bad\nname", mom.conninfo),
        ("none", None),
        (f"postgresql://u:{SECRET}@h/db", f"swapped {SECRET}"),
        ("typo", f"postgresql://u:{SECRET}@h/db?nosuch=1"),
        ("acme", f"host=elsewhere dbname=x password={SECRET}"),
        ("zeta", app.conninfo),
    )
    found = ask("shops", fleet)
    assert {name: broker.dsn for name, broker in found.brokers.items()} == {
        "shops/acme": mom,
        "shops/zeta": app,
    }
    said = [str(error) for _, error in found.problems]
    assert [text.split(":")[0] for text in said] == [f"fleet 'shops', row {n}" for n in range(2, 8)]
    assert SECRET not in repr(found) + "".join(said)


def test_a_query_can_only_read(app: Dsn) -> None:
    fleet = Fleet(dsn=app, query="DELETE FROM saf.route RETURNING 'a', 'dbname=x'")
    with pytest.raises(ConfigurationError, match=r"fleets\.f\.query fails: ReadOnlySqlTransaction"):
        ask("f", fleet)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT name FROM nowhere", 'relation "nowhere" does not exist'),
        ("SELECT 1, 2, 3", "3 columns instead of two"),
        (f"SELECT 'a', ('postgresql://u:{SECRET}@h/x')::int", "InvalidTextRepresentation"),
        ("SET TIME ZONE 'UTC'", "ProgrammingError"),
    ],
)
def test_a_query_that_fails_is_said_without_what_it_read(app: Dsn, query: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ask("f", Fleet(dsn=app, query=query))
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)


def test_of_two_fleets_one_that_does_not_answer_leaves_the_other(app: Dsn) -> None:
    gone = Fleet(dsn=Dsn("host=/nonexistent dbname=postgres"), databases="*")
    found = ask_all({"gone": gone, "shops": registry(app, ("acme", "dbname=x"))})
    assert list(found.brokers) == ["shops/acme"]
    ((name, error),) = found.problems
    assert (name, type(error)) == ("gone", Unavailable)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[fleets.f]\ndsn = "dbname=x"', "either databases = or query ="),
        ('[fleets.f]\ndsn = "dbname=x"\ndatabases = "a"\nquery = "b"', "either databases ="),
        ('[fleets.f]\ndsn = "dbname=x"\ndatabase = "a*"', "did you mean 'databases'"),
        ('[fleets."a/b"]\ndsn = "dbname=x"\ndatabases = "a"', "must not contain '/'"),
        (
            '[fleets.f]\ndsn = "dbname=x"\ndatabases = "a"\n[brokers."f/a"]\ndsn = "dbname=a"',
            "belong to the fleet",
        ),
        ("", "nothing to forward"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "saf.toml"
    file.write_text(f'{text}\n[destinations.mom]\ndsn = "dbname=mom"\n')
    with pytest.raises(ConfigurationError, match=said):
        load(file)


def test_commands_go_round_a_fleet_or_one_of_it(
    new_broker: Callable[[str], Dsn],
    new_database: Callable[[str], Dsn],
    server: EmbeddedServer,
    mom: Dsn,
    tmp_path: Path,
) -> None:
    one, other = new_broker("round"), new_broker("round")
    new_database("round")  # no broker, and nothing is said of it
    send(one, 3)
    dsn = json.dumps(server.dsn("postgres").conninfo)
    config = write(tmp_path / "saf.toml", f'dsn = {dsn}\ndatabases = "saf_test_*_round"', mom)

    def pending(*options: str) -> dict[str, int]:
        done = saf("status", "--config", config, "--json", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return {row["broker"]: row["pending"] for row in last_json(done.stdout)["brokers"]}

    first, second = f"tenants/{one.database}", f"tenants/{other.database}"
    assert pending() == {first: 3, second: 0}
    assert pending("--broker", "tenants") == {first: 3, second: 0}
    assert pending("--broker", second) == {second: 0}
    absent = saf("status", "--config", config, "--broker", "tenants/nobody")
    assert absent.returncode == 2
    assert "tenants/nobody" in absent.stderr


def test_status_says_which_row_is_bad_and_shows_the_others(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    fleet = registry(app, ("acme", app.conninfo), ("bad", f"password={SECRET}"))
    text = f"dsn = {json.dumps(app.conninfo)}\nquery = {json.dumps(fleet.query)}"
    done = saf("status", "--config", write(tmp_path / "saf.toml", text, mom), "--json")
    assert done.returncode == 2
    answer = last_json(done.stdout)
    assert [row["broker"] for row in answer["brokers"]] == ["tenants/acme"]
    assert [error["broker"] for error in answer["errors"]] == ["tenants"]
    assert "row 2" in answer["errors"][0]["error"]
    assert SECRET not in done.stdout + done.stderr


def test_the_doctor_examines_a_fleet_and_names_what_is_wrong_with_it(
    app: Dsn, mom: Dsn, new_broker: Callable[[str], Dsn]
) -> None:
    acme = new_broker("acme")
    fleets = {
        "shops": registry(app, ("acme", acme.conninfo), ("bad", None)),
        "gone": Fleet(dsn=Dsn("host=/nonexistent dbname=x"), databases="*"),
    }
    settings = Settings.model_construct(
        brokers={}, fleets=fleets, destinations={"mom": Postgresql(dsn=mom)}
    )
    found = examine(settings)
    wrong = {(one.where, one.check) for one in found if one.severity == "error"}
    assert {("fleet 'shops'", "fleet"), ("fleet 'gone'", "reachable")} <= wrong
    assert ("broker 'shops/acme'", "schema") in {(one.where, one.check) for one in found}


def test_a_pattern_finds_no_templates(server: EmbeddedServer) -> None:
    found = ask("all", Fleet(dsn=server.dsn("postgres"), databases="template*"))
    assert (found.brokers, found.problems) == ({}, [])
