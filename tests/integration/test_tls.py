"""TLS: what a dsn says of it reaches psycopg, SQLAlchemy and ADBC alike, or nothing is sent."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import adbc_driver_postgresql.dbapi
import pytest
from psycopg.conninfo import make_conninfo

from saf import Outbox
from saf.broker.embedded import EmbeddedServer
from saf.broker.grants import Kind, grant
from saf.broker.migrate import migrate
from saf.database import Dsn, fetch
from saf.errors import Unavailable
from tests.needed import needed
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass
from tests.programs import saf

# the embedded servers are built without TLS
pytestmark = pytest.mark.parametrize("pg_version", [15], indirect=True, ids=["postgresql-15"])

HOST = "127.0.0.1"
USER = "tls_user"
MY_SESSION = """
SELECT ssl, client_dn, (SELECT session_user::text) FROM pg_stat_ssl WHERE pid = pg_backend_pid()
"""
ENCRYPTED = (True, f"/CN={USER}", USER)


@dataclass
class Server:
    """A server that lets in who shows a certificate of its CA, and nobody unencrypted."""

    folder: Path
    port: int
    app: Dsn
    """By socket, as owner."""
    mom: Dsn

    def dsn(self, broker: Dsn, **settings: str) -> Dsn:
        """By TLS as `USER`; ``settings`` are libpq's, on top of what lets it in."""
        known = {
            "host": HOST,
            "port": str(self.port),
            "dbname": broker.database,
            "user": USER,
            "sslmode": "verify-full",
            "sslrootcert": str(self.folder / "ca.crt"),
            "sslcert": str(self.folder / "client.crt"),
            "sslkey": str(self.folder / "client.key"),
        }
        return Dsn(make_conninfo("", **{**known, **settings}))


@pytest.fixture
def server(own_server: EmbeddedServer, tmp_path: Path) -> Server:
    needed("openssl", "openssl")
    for ca in ("ca", "other"):
        _certificate(tmp_path, ca, f"/CN={ca} of a test")
    _certificate(tmp_path, "server", "/CN=server", "-addext", f"subjectAltName=IP:{HOST}", ca="ca")
    _certificate(tmp_path, "client", f"/CN={USER}", ca="ca")
    data, owner = own_server.data_dir, own_server.data_dir.stat()
    for file in ("ca.crt", "server.crt", "server.key"):
        shutil.copy(tmp_path / file, data / file)
        os.chown(data / file, owner.st_uid, owner.st_gid)
        (data / file).chmod(0o600)
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port = int(listener.getsockname()[1])
    brokers = [own_server.create_database(name) for name in ("app", "mom")]
    with connect(brokers[0]) as connection:
        connection.execute(f"CREATE ROLE {USER} LOGIN")
        for name, value in {
            "ssl": "on",
            "ssl_ca_file": "ca.crt",
            "listen_addresses": HOST,
            "port": str(port),
        }.items():
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    (data / "pg_hba.conf").write_text("local all all trust\nhostssl all all all cert\n")
    own_server.stop()
    own_server.start()
    app, mom = (Dsn(make_conninfo(dsn.conninfo, port=port)) for dsn in brokers)
    for dsn in (app, mom):
        migrate(dsn)
        with connect(dsn) as connection:
            grant(connection, USER, [Kind.WRITER, Kind.FORWARDER])
    return Server(folder=tmp_path, port=port, app=app, mom=mom)


def _certificate(folder: Path, name: str, subject: str, *options: str, ca: str = "") -> None:
    signed = ["-CA", f"{ca}.crt", "-CAkey", f"{ca}.key"] if ca else []
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "1", "-subj", subject),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-keyout", f"{name}.key", "-out", f"{name}.crt"),
            *signed,
            *options,
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / f"{name}.key").chmod(0o600)


def by_psycopg(dsn: Dsn) -> object:
    with dsn.connect(role="test") as connection:
        return fetch(connection, MY_SESSION)[0]


def by_sqlalchemy(dsn: Dsn) -> object:
    engine = dsn.engine()
    try:
        with engine.connect() as connection:
            return tuple(connection.exec_driver_sql(MY_SESSION).one())
    finally:
        engine.dispose()


def by_adbc(dsn: Dsn) -> object:
    with (
        adbc_driver_postgresql.dbapi.connect(dsn.for_role("test")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(MY_SESSION)
        return cursor.fetchone()


def test_messages_go_encrypted_all_the_way_and_each_driver_shows_its_certificate(
    server: Server,
) -> None:
    app, mom = server.dsn(server.app), server.dsn(server.mom)
    matches: list[Callable[[Dsn], object]] = [by_psycopg, by_sqlalchemy, by_adbc]
    assert [match(app) for match in matches] == [ENCRYPTED] * 3
    parts = {name: value for name, value in app.parts.items() if name not in ("host", "port")}
    url = Dsn(f"postgresql://{HOST}:{server.port}/?{urlencode(parts)}")
    assert [match(url) for match in matches] == [ENCRYPTED] * 3
    with app.connect(role="test") as connection:
        Outbox().send(connection, "billing", "secret")
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.run()
    assert bodies(server.mom) == ["secret"]


REFUSALS: list[tuple[dict[str, str], str]] = [
    ({"sslrootcert": "other.crt"}, "certificate verify failed"),
    ({"sslrootcert": "missing.crt"}, 'root certificate file "missing.crt" does not exist'),
    ({"host": "localhost"}, 'does not match host name "localhost"'),
    ({"sslcert": "other.crt", "sslkey": "other.key"}, "unknown ca"),
    ({"sslcert": "none.crt", "sslkey": "none.key"}, "requires a valid client certificate"),
    ({"sslmode": "disable"}, "no encryption"),
]
BY_THE_SERVER = ("requires a valid client certificate", "no encryption")
"""It says so of the login; the others fail while the two still agree how to talk."""


def test_who_is_not_who_it_should_be_is_refused_by_its_cause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server.folder)
    with connect(server.app) as connection:
        Outbox(allow_autocommit=True).send(connection, "billing", "kept")
    for settings, cause in REFUSALS:
        refused = server.dsn(server.mom, **settings)
        for match in (by_psycopg, by_sqlalchemy):
            with pytest.raises(Unavailable, match=cause) as caught:
                match(refused)
            assert "\n" not in str(caught.value)
        let_time_pass(server.app)
        with Cycle(server.app, forwarding_rules(mom=refused)) as cycle:
            (error,) = (receipt.error for receipt in cycle.run() if receipt.error)
        what = "refuses the login" if cause in BY_THE_SERVER else "is unavailable"
        assert error.startswith(f"destination 'mom' {what}")
        assert cause in error
    done = saf("migrate", env={"SAF_DSN": refused.conninfo}, cwd=server.folder)
    assert done.returncode == 2
    assert "no encryption" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with Cycle(server.app, forwarding_rules(mom=server.dsn(server.mom))) as cycle:
        let_time_pass(server.app)
        cycle.run()
    assert bodies(server.mom) == ["kept"]


def test_required_tls_is_used_without_a_ca_and_missed_where_the_server_has_none(
    server: Server, own_server: EmbeddedServer
) -> None:
    required = server.dsn(server.app, sslmode="require", sslrootcert="")
    matches: list[Callable[[Dsn], object]] = [by_psycopg, by_sqlalchemy, by_adbc]
    assert [match(required) for match in matches] == [ENCRYPTED] * 3
    with connect(server.app) as connection:
        connection.execute("ALTER SYSTEM SET ssl = off")
        connection.execute("SELECT pg_reload_conf()")
    (own_server.data_dir / "pg_hba.conf").write_text("local all all trust\nhost all all all trust")
    own_server.stop()
    own_server.start()
    with pytest.raises(Unavailable, match="server does not support SSL, but SSL was required"):
        by_psycopg(required)
