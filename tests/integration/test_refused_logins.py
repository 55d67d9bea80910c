"""A login that a server refuses is for a person: exit code 2 and a sentence, in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import EmbeddedServer
from saf.broker.migrate import migrate
from saf.database import Dsn
from tests.pipeline import connect
from tests.programs import configuration, saf

FOUND, MEND, TRY_AGAIN = 1, 2, 75
SECRET = "not-the-canary"

LOGINS: dict[str, tuple[dict[str, str], str]] = {
    "a wrong password": ({"user": "keeper", "password": SECRET}, "the password is wrong"),
    "no password": ({"user": "keeper"}, "wrong or missing"),
    "a role that is not there": ({"user": "nobody"}, "CREATE ROLE"),
    "a role that may not log in": ({"user": "nologin"}, "LOGIN"),
    "a role that pg_hba.conf keeps out": ({"user": "outsider"}, "pg_hba.conf"),
    "a database that is not there": ({"dbname": "nosuch"}, "The database does not exist"),
    "a database that is not for the role": ({"user": "guest"}, "GRANT CONNECT"),
    "a database that takes nobody": ({"dbname": "closed"}, "ALLOW_CONNECTIONS"),
}


WORKER = """
import os, saf
worker = saf.Worker(os.environ["INBOX"], "billing")
worker.handler("any")(lambda message, connection: None)
"""


@pytest.fixture(scope="module")
def strict(modules_server: EmbeddedServer) -> Dsn:
    """A broker on a server that refuses each login of `LOGINS`."""
    broker = modules_server.create_database("shop")
    with connect(broker) as connection:
        for role in ("keeper", "outsider", "guest"):
            connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
        connection.execute("CREATE ROLE nologin NOLOGIN")
        connection.execute("CREATE DATABASE closed ALLOW_CONNECTIONS false")
        connection.execute("REVOKE CONNECT ON DATABASE shop FROM public")
        ((file,),) = connection.execute("SHOW hba_file").fetchall()
        rules = Path(file).read_text()
        Path(file).write_text(f"local all keeper scram-sha-256\nlocal all outsider reject\n{rules}")
        connection.execute("SELECT pg_reload_conf()")
    migrate(broker)
    return broker


@pytest.mark.parametrize("command", ["migrate", "grant", "status", "forward", "service", "worker"])
def test_a_login_that_is_refused_is_2_and_a_sentence_that_says_what_to_mend(
    strict: Dsn, mom: Dsn, tmp_path: Path, command: str
) -> None:
    (tmp_path / "consumers.py").write_text(WORKER)
    wrong = []
    for login, (changes, cure) in LOGINS.items():
        dsn = Dsn(make_conninfo(strict.conninfo, **changes))
        brokers, stores = {"shop": dsn}, {"mom": mom}
        if command == "service":
            brokers, stores = {"shop": mom}, {"mom": dsn}
        configuration(tmp_path / "saf.toml", brokers, stores)
        arguments = {
            "grant": ["grant", "--role", "writer", "guest"],
            "service": ["service", "list"],
            "worker": ["worker", "consumers:worker"],
        }.get(command, [command])
        env = {"SAF_DSN": dsn.conninfo, "INBOX": dsn.conninfo}
        done = saf(*arguments, cwd=tmp_path, env=env)
        said = [line for line in done.stderr.splitlines() if line.startswith("saf: ")]
        if (done.returncode, len(said)) != (MEND, 1) or cure.lower() not in said[0].lower():
            wrong.append((login, done.returncode, done.stderr))
        assert SECRET not in done.stdout + done.stderr
    assert wrong == []


def test_a_refused_login_names_the_place_where_its_dsn_can_be_fixed(
    strict: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    (tmp_path / "consumers.py").write_text(WORKER)
    changes, _ = LOGINS["a wrong password"]
    wrong = Dsn(make_conninfo(strict.conninfo, **changes)).conninfo
    open_part = make_conninfo(wrong, password="${SHOP_PASSWORD}")
    env = {"INBOX": wrong, "SHOP_DSN": wrong, "SHOP_PASSWORD": changes["password"]}
    for dsn, origin in {
        "${SHOP_DSN}": "the environment variable SHOP_DSN",
        open_part: "the dsn in saf.toml or the environment variable SHOP_PASSWORD",
        wrong: "the dsn in saf.toml",
    }.items():
        (tmp_path / "saf.toml").write_text(
            f"[brokers.shop]\ndsn = {json.dumps(dsn)}\n"
            f"[destinations.mom]\ndsn = {json.dumps(mom.conninfo)}\n"
        )
        for command in ("status", "doctor"):
            done = saf(command, cwd=tmp_path, env=env)
            said = " ".join((done.stdout + done.stderr).split())
            assert f"ix {origin}, PGPASSWORD or the passfile" in said, said
    done = saf("worker", "consumers:worker", cwd=tmp_path, env=env)
    assert "ix the dsn given to this program, PGPASSWORD" in done.stderr


def test_the_doctor_calls_a_refused_login_an_error_and_not_a_database_that_is_away(
    strict: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    changes, _ = LOGINS["a wrong password"]
    wrong = Dsn(make_conninfo(strict.conninfo, **changes))
    configuration(tmp_path / "saf.toml", {"shop": mom}, {"mom": wrong})
    done = saf("doctor", cwd=tmp_path)
    assert done.returncode == FOUND, done.stdout
    assert "error: destination 'mom': " in done.stdout
    assert " [login]\n" in done.stdout


def test_a_server_that_is_not_there_is_to_be_tried_again(tmp_path: Path, mom: Dsn) -> None:
    away = Dsn("host=/nonexistent dbname=shop")
    configuration(tmp_path / "saf.toml", {"shop": away}, {"mom": mom})
    for arguments in (["migrate"], ["status"], ["forward"]):
        done = saf(*arguments, cwd=tmp_path, env={"SAF_DSN": away.conninfo})
        assert done.returncode == TRY_AGAIN, done.stderr
