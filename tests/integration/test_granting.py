"""`saf grant`: what it says, refuses, takes back, and does at the same time as another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from saf.broker.grants import Kind, grant
from saf.database import Dsn, fetch
from saf.errors import ConfigurationError
from tests.pipeline import connect
from tests.programs import saf as run_saf
from tests.rights import expected, rights
from tests.roles import as_user

every_postgresql = pytest.mark.every_postgresql
pytestmark = pytest.mark.usefixtures("new_role")


def test_granting_again_changes_nothing_and_another_duty_leaves_nothing_of_the_old_one(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role = new_role()
    for _ in range(2):
        done = run_saf("grant", "--role", "operator", role, "--dsn", app.conninfo)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{app.database}: {role} is operator\n"
        assert rights(app, role) == expected("operator")
    with connect(app) as connection:
        connection.execute(f"GRANT DELETE ON saf.outbox TO {role}")
    done = run_saf("grant", "--role", "writer", role, env={"SAF_DSN": app.conninfo})
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == expected("writer")


def test_revoke_takes_everything_back(app: Dsn, new_role: Callable[..., str]) -> None:
    role = new_role()
    arguments = ["--dsn", app.conninfo, role]
    before = rights(app, role)
    assert run_saf("grant", "--role", "receiver", "--role", "writer", *arguments).returncode == 0
    assert rights(app, role) != before
    done = run_saf("grant", "--revoke", *arguments)
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == before
    with connect(app) as connection:
        assert fetch(
            connection, "SELECT has_schema_privilege(%(r)s, 'saf', 'USAGE')", {"r": role}
        ) == [(False,)]


def test_a_dry_run_prints_the_sql_and_changes_nothing(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role = new_role('dry "run"; --')
    before = rights(app, role)
    done = run_saf("grant", "--role", "forwarder", role, "--dsn", app.conninfo, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert rights(app, role) == before
    with connect(app) as connection:
        connection.execute(done.stdout)
    assert rights(app, role) == expected("forwarder")


def test_a_role_that_does_not_exist_is_named_with_the_command_that_creates_it(app: Dsn) -> None:
    long = "r" * 70
    for name in ("nobody here", "public", long):
        done = run_saf("grant", "--role", "writer", name, "--dsn", app.conninfo)
        assert done.returncode == 2
        (said,) = done.stderr.splitlines()
        assert f"no role {name!r}" in said
        assert f'CREATE ROLE "{name}" LOGIN' in said


def test_a_longer_name_is_not_taken_for_the_role_that_it_would_be_cut_to(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    longest = new_role("ü" * 31 + "r")
    with connect(app) as connection:
        with pytest.raises(ConfigurationError, match="has no role"):
            grant(connection, longest + "r", [Kind.WRITER])
        grant(connection, longest, [Kind.WRITER])
    assert rights(app, longest) == expected("writer")


def test_who_owns_the_schema_or_does_not_own_it_is_told_so(
    app: Dsn, granted: Callable[..., Dsn], new_role: Callable[..., str]
) -> None:
    done = run_saf("grant", "--role", "writer", "postgres", "--dsn", app.conninfo)
    assert done.returncode == 2
    assert "may do everything" in done.stderr
    operator = granted(app, "operator")
    done = run_saf("grant", "--role", "writer", new_role(), "--dsn", operator.conninfo)
    assert done.returncode == 2
    assert "let 'postgres', who owns schema saf, do it" in done.stderr


def test_rights_that_were_passed_on_are_named_and_nothing_changes(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    role, other = new_role(), new_role()
    with connect(app) as connection:
        connection.execute(f"GRANT USAGE ON SCHEMA saf TO {role} WITH GRANT OPTION")
        with connect(as_user(app, role)) as theirs:
            theirs.execute(f"GRANT USAGE ON SCHEMA saf TO {other}")
        with pytest.raises(ConfigurationError, match="has passed rights"):
            grant(connection, role, [Kind.WRITER])
    assert set(rights(app, role).values()) == {""}


def test_what_is_not_said_or_contradicts_itself_is_refused(app: Dsn) -> None:
    for arguments, named in (
        ([], "forwarder"),
        (["--role", "writer", "--revoke"], "--revoke"),
        (["--role", "king"], "'king' is not one of"),
    ):
        done = run_saf("grant", *arguments, "someone", "--dsn", app.conninfo)
        assert done.returncode == 2
        assert named in " ".join(done.stderr.split())


def test_grants_at_the_same_time_wait_for_each_other(
    app: Dsn, new_role: Callable[..., str]
) -> None:
    roles = [new_role() for _ in range(4)]

    def repeatedly(role: str) -> None:
        with connect(app) as connection:
            for kind in Kind:
                grant(connection, role, [kind])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(repeatedly, roles))
    assert all(rights(app, role) == expected("operator") for role in roles)
