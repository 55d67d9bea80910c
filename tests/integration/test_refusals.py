"""`saf doctor` tells why a server that is there refuses a connection, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import EmbeddedServer
from saf.config import Broker, Settings
from saf.database import Dsn
from saf.database.sqlstates import CURES, SAID, SILENT, sqlstate
from saf.destinations.postgresql import Postgresql
from saf.errors import Unavailable
from saf.operating.doctor import examine
from tests.pipeline import connect

PASSWORD = "not-the-canary"


@pytest.fixture(scope="module")
def strict(modules_server: EmbeddedServer) -> EmbeddedServer:
    """A server that asks one role for a password, and lets another in nowhere."""
    with connect(modules_server.dsn("postgres")) as connection:
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'right' CONNECTION LIMIT 0")
        connection.execute("CREATE ROLE keeper LOGIN PASSWORD 'right'")
        connection.execute("CREATE ROLE outsider LOGIN")
        connection.execute("CREATE DATABASE closed ALLOW_CONNECTIONS false")
        connection.execute("CREATE DATABASE private")
        connection.execute("REVOKE CONNECT ON DATABASE private FROM public")
        ((file,),) = connection.execute("SHOW hba_file").fetchall()
        rules = Path(file).read_text()
        Path(file).write_text(f"local all keeper scram-sha-256\nlocal all outsider reject\n{rules}")
        connection.execute("SELECT pg_reload_conf()")
    return modules_server


def said(dsn: Dsn) -> tuple[str, str]:
    """What the doctor says of a broker that cannot be reached."""
    settings = Settings(brokers={"app": Broker(dsn=dsn)}, destinations={"m": Postgresql(dsn=dsn)})
    (one,) = [found for found in examine(settings) if found.where == "broker 'app'"]
    assert one.severity == "error"
    passes = any(word in one.cure for word in ("too many", "start the server", "wait:"))
    assert one.check == ("reachable" if passes else "login")
    assert PASSWORD not in one.what + one.cure
    return one.what, one.cure


def _another(dsn: Dsn) -> psycopg.Connection[Any] | None:
    try:
        return dsn.connect(role="test")
    except Unavailable:
        return None


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"dbname": "nosuch"}, "the database does not exist"),
        ({"user": "nobody"}, "CREATE ROLE"),
        ({"user": "outsider"}, "pg_hba.conf"),
        ({"user": "guest"}, "CONNECTION LIMIT"),
        ({"user": "keeper", "password": PASSWORD}, "the password is wrong"),
        ({"dbname": "private", "user": "guest"}, "GRANT CONNECT"),
        ({"dbname": "closed"}, "ALLOW_CONNECTIONS"),
    ],
)
def test_each_refusal_has_a_cure_of_its_own(
    strict: EmbeddedServer, changes: dict[str, str], cure: str
) -> None:
    with connect(strict.dsn("postgres")) as connection:
        if changes.get("dbname") == "private":
            connection.execute("ALTER ROLE guest CONNECTION LIMIT -1")
        # whoever is to be refused is so by now
        dsn = Dsn(make_conninfo(strict.dsn("postgres").conninfo, **changes))
        while (let_in := _another(dsn)) is not None:
            let_in.close()  # until the rules are read anew
    assert cure in said(dsn)[1]


def test_a_server_that_is_full_or_starting_is_told_from_one_that_is_away(
    own_server: EmbeddedServer,
) -> None:
    dsn = own_server.dsn("postgres")
    assert sqlstate(dsn.for_role("test")) is None
    with connect(dsn) as connection:
        connection.execute("ALTER SYSTEM SET max_connections = 8")
        connection.execute("ALTER SYSTEM SET superuser_reserved_connections = 0")
        connection.execute("CREATE ROLE app LOGIN")
    own_server.stop()
    assert said(dsn)[1] == SILENT.format(dsn=dsn.origin)
    own_server.start()
    app = Dsn(make_conninfo(dsn.conninfo, user="app"))
    crowd: list[psycopg.Connection[Any]] = []
    try:
        while (free := _another(app)) is not None:
            crowd.append(free)
        assert "too many connections" in said(app)[1]
    finally:
        for one in crowd:
            one.close()


def test_the_server_s_language_does_not_matter() -> None:
    """The cures go by SQLSTATE: 57P03 cannot be provoked at will, so it is looked up."""
    line = b'B\t92\tErrorResponse\t S "FATAL" V "FATAL" C "57P03" M "Datenbank f\xc3\xa4hrt hoch"'
    found = SAID.search(line)
    assert found is not None
    assert CURES[found[1].decode()].startswith("wait:")
