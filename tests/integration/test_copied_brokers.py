"""A database that was copied has its original's broker_id: that is said, and mended."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.config import load
from saf.database import Dsn, fetch
from saf.errors import UsageError
from saf.forwarding.roster import Roster
from saf.operating.repair.new_id import give_new_id
from tests.pipeline import bodies, connect, new_member, send
from tests.programs import configuration, last_json, saf


@pytest.fixture
def copy(config: Path, app: Dsn) -> Iterator[Dsn]:
    """A copy of the source, made by PostgreSQL after it has forwarded some and not all."""
    assert config.is_file()
    name = f"{app.database}_copy"
    maintenance = make_conninfo(app.conninfo, dbname="postgres")
    with psycopg.connect(maintenance, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
                sql.Identifier(name), sql.Identifier(app.database)
            )
        )
        yield Dsn(make_conninfo(app.conninfo, dbname=name))
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def config(tmp_path: Path, app: Dsn, mom: Dsn) -> Path:
    """A source that has forwarded some of its messages; others wait, one without a route, and one
    is held."""
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom}, use_spark="auto")
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service VALUES ('billing')")
        for number in range(3):
            send(connection, f"old {number}", key="k")
        connection.execute(
            "INSERT INTO saf.outbox (to_service, key, body) VALUES ('unknown', 'u', 'parked')"
        )
    assert forwarded(file)["exit_code"] == 0
    with connect(app) as connection:
        send(connection, "pending", key="k")
        connection.execute("SELECT saf.send('billing', 'held', deliver_at => '2199-01-01')")
    return file


def forwarded(config: Path) -> dict[str, Any]:
    return last_json(saf("forward", "--json", "--config", config).stdout)


def found(config: Path) -> list[dict[str, str]]:
    findings = json.loads(saf("doctor", "--json", "--config", config).stdout)["findings"]
    return [one for one in findings if one["check"] == "broker_id"]


@pytest.mark.slow
def test_a_copy_is_refused_by_name_and_is_a_broker_of_its_own_after_new_id(
    config: Path, app: Dsn, copy: Dsn, mom: Dsn
) -> None:
    configuration(config, {"copy": copy, "app": app}, {"mom": mom}, use_spark="auto")
    for there, body in ((app, "of app"), (copy, "of copy")):
        with connect(there) as connection:
            send(connection, body, key="k")
    with connect(copy) as connection:
        connection.execute("SELECT saf.send('billing', 'held here', deliver_at => '2199-01-01')")
    run = forwarded(config)
    assert run["exit_code"] == 2
    (problem,) = run["problems"]
    assert (problem["broker"], problem["kind"]) == ("copy", "SameBroker")
    mine = [*(f"old {number}" for number in range(3)), "pending", "of app"]
    assert bodies(mom) == mine

    (one,) = found(config)
    assert one["where"] == "broker 'copy'"
    assert one["cure"] == "saf broker new-id --broker copy"
    cured = saf(*shlex.split(one["cure"])[1:], "--config", config)
    assert cured.returncode == 0, cured.stderr
    assert "3 messages left for app to send" in cured.stdout
    assert "2 messages of its own still to send" in cured.stdout
    with connect(copy) as connection:
        assert fetch(connection, "SELECT body FROM saf.held") == [(b"held here",)]

    assert found(config) == []
    run = forwarded(config)
    assert (run["exit_code"], run["forwarded"]) == (0, 1)
    assert bodies(mom) == [*mine, "of copy"]
    with connect(mom) as store:
        store.execute("INSERT INTO saf.service VALUES ('unknown')")
    for there in (app, copy):
        with connect(there) as connection:
            connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
            send(connection, "last", key="k")
    assert forwarded(config)["exit_code"] == 0
    assert sorted(bodies(mom)) == sorted([*mine, "of copy", "parked", "last", "last"])


def test_work_that_was_found_at_a_copy_is_not_run(
    config: Path, app: Dsn, copy: Dsn, mom: Dsn
) -> None:
    configuration(config, {"copy": copy, "app": app}, {"mom": mom}, use_spark="auto")
    for there in (app, copy):
        with connect(there) as connection:
            send(connection, "of both", key="k")
    problems: list[tuple[str, str]] = []
    roster = Roster(
        load(config), lambda name, error: problems.append((name, type(error).__name__)), print
    )
    try:
        work = roster.visit("mom")
    finally:
        roster.leave()
    assert problems == [("copy", "SameBroker")]
    assert [item.broker for item in work] == ["app"]


def test_a_copy_that_is_at_work_keeps_its_id(config: Path, app: Dsn, copy: Dsn) -> None:
    assert config.is_file()
    with connect(copy) as at_work, connect(copy) as connection, connect(app) as original:
        new_member(at_work, name="here:1")
        with pytest.raises(UsageError, match="stop all forwarders and receivers first: here:1"):
            give_new_id(connection, original)


def test_only_a_copy_gets_a_new_id(config: Path) -> None:
    refused = saf("broker", "new-id", "--broker", "app", "--config", config)
    assert refused.returncode == 2
    assert "no other broker of saf.toml has the broker_id of 'app'" in refused.stderr
    assert "add --alone" in refused.stderr
    unknown = saf("broker", "new-id", "--broker", "shop", "--config", config)
    assert "saf.toml names no broker 'shop'" in unknown.stderr
