"""A fleet's member that was met before and is not listed any more is missed, and named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from tests.pipeline import bodies, connect, send
from tests.programs import last_json, saf


@contextmanager
def changed(member: Dsn, change: str, back: str) -> Iterator[None]:
    """Change a member by a statement about its database, and undo that at the end."""
    name = sql.Identifier(member.database)
    other = sql.Identifier(f"{member.database}_old")
    maintenance = make_conninfo(member.conninfo, dbname="postgres")
    with psycopg.connect(maintenance, autocommit=True) as connection:
        connection.execute(sql.SQL(change).format(name=name, other=other))
        try:
            yield
        finally:
            connection.execute(sql.SQL(back).format(name=name, other=other))


def closed(member: Dsn) -> Any:
    allow = "ALTER DATABASE {name} ALLOW_CONNECTIONS"
    return changed(member, f"{allow} false", f"{allow} true")


def renamed(member: Dsn) -> Any:
    return changed(
        member,
        "ALTER DATABASE {name} RENAME TO {other}",
        "ALTER DATABASE {other} RENAME TO {name}",
    )


def asked(config: Path, *command: str) -> str:
    return saf(*command, "--config", config).stdout


def missing(config: Path) -> dict[str, str]:
    """The members that a run reports as missing, each with the reason."""
    run = last_json(asked(config, "forward", "--json"))
    found = [one["error"] for one in run["problems"]]
    assert {one["kind"] for one in run["problems"]} <= {"MemberMissing"}, run["problems"]
    assert run["exit_code"] == (2 if found else 0)
    return {error.split("'")[1]: error for error in found}


@pytest.mark.slow
def test_a_member_that_is_not_listed_any_more_is_a_problem_a_metric_and_a_row_in_the_doctor(
    tmp_path: Path, new_broker: Callable[[str], Dsn], mom: Dsn
) -> None:
    members = [new_broker("tenant_a"), new_broker("tenant_b")]
    config = tmp_path / "saf.toml"
    maintenance = make_conninfo(mom.conninfo, dbname="postgres")
    pattern = re.sub(r"[^_]+_tenant_a$", "*_tenant_?", members[0].database)
    config.write_text(
        f"[fleets.tenants]\ndsn = {json.dumps(maintenance)}\ndatabases = {json.dumps(pattern)}\n"
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        '[forwarder]\ndefault_destination = "mom"\n'
    )
    for member in members:
        with connect(member) as connection:
            send(connection, member.database)
    assert missing(config) == {}
    first, second = (f"tenants/{member.database}" for member in members)

    with closed(members[0]), renamed(members[1]):
        found = missing(config)
        assert found.keys() == {first, second}
        assert "its database allows no connections" in found[first]
        assert "it was dropped, renamed or taken out" in found[second]
        rows = json.loads(asked(config, "doctor", "--json"))["findings"]
        said = [(one["where"], one["cure"]) for one in rows if one["check"] == "fleet_member"]
        assert sorted(said) == [
            (
                "fleet 'tenants'",
                f"bring it back; or, if it is gone for good, saf fleet forget {name}",
            )
            for name in sorted((first, second))
        ]
        metric = 'saf_missing_members{broker="mom",fleet="tenants"}'
        assert f"{metric} 2.0" in asked(config, "metrics", "--broker", "mom")
        forgotten = saf("fleet", "forget", second, "--config", config)
        assert forgotten.returncode == 0, forgotten.stderr
        assert missing(config).keys() == {first}

    assert missing(config) == {}, "both are listed again"
    assert f"{metric} 0.0" in asked(config, "metrics", "--broker", "mom")
    assert sorted(bodies(mom)) == sorted(member.database for member in members)


def test_only_a_member_that_was_met_can_be_forgotten(tmp_path: Path, mom: Dsn) -> None:
    config = tmp_path / "saf.toml"
    config.write_text(
        f"[fleets.tenants]\ndsn = {json.dumps(mom.conninfo)}\ndatabases = 'no such'\n"
        f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
    )
    refused = saf("fleet", "forget", "tenants/x", "--config", config)
    assert refused.returncode == 2
    assert "no forwarder has met 'tenants/x': `saf fleet list` shows the members" in refused.stderr
