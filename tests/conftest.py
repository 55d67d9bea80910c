"""Real PostgreSQL servers, and a fresh broker database for whoever asks.

Each server is started when the first test needs it, and each holds one migrated template
database, so that a broker costs one CREATE DATABASE. Ordinary servers run without fsync, for
speed alone; tests that are about durability ask for `own_server`.

    def test_something(app: Dsn, mom: Dsn) -> None             two brokers on PostgreSQL 18
    @pytest.mark.every_postgresql                              the same test on 15, 16 and 18
    def test_a_crash(own_server: EmbeddedServer) -> None       durable, and the test's to stop
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from saf.database import Dsn
from saf.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.errors import UsageError
from saf.migrate import migrate

VERSIONS = (15, 16, 18)
TEMPLATE = "saf_template"
SETTINGS = {"max_prepared_transactions": 20, "max_connections": 200}
QUICK = {**SETTINGS, "fsync": False, "full_page_writes": False, "shared_buffers": "64MB"}

_number = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_postgresql: runs on each supported PostgreSQL")


def pytest_report_header() -> list[str]:
    return [
        f"PostgreSQL: {', '.join(_server_version(version) for version in VERSIONS)}; "
        f"psycopg {psycopg.__version__}, libpq {psycopg.pq.version_pretty(psycopg.pq.version())}"
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_postgresql"):
        if "pg_version" not in metafunc.fixturenames:
            metafunc.fixturenames.append("pg_version")
        ids = [f"postgresql-{version}" for version in VERSIONS]
        metafunc.parametrize("pg_version", VERSIONS, indirect=True, ids=ids)


def _server_version(version: int) -> str:
    try:
        program = programs(version) / "postgres"
    except UsageError:
        return f"{version} is not here"
    out = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return out.split()[2]


class Servers:
    """One ordinary server per version, started at its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: dict[int, EmbeddedServer] = {}

    def __getitem__(self, version: int) -> EmbeddedServer:
        if version not in self._servers:
            server = EmbeddedServer(self.folder / str(version), version, QUICK)
            server.start()
            migrate(server.create_database(TEMPLATE))
            self._servers[version] = server
        return self._servers[version]

    def stop(self) -> None:
        for server in self._servers.values():
            # nobody needs what is in it
            server.stop_immediately()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    # not pytest's tmp_path: its name is too long for a unix socket, and it keeps three sessions
    folder = Path(tempfile.mkdtemp(prefix="saf-test-"))
    servers = Servers(folder)
    yield servers
    servers.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pg_version(request: pytest.FixtureRequest) -> int:
    version = int(getattr(request, "param", DEFAULT_VERSION))
    try:
        programs(version)
    except UsageError as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    return version


@pytest.fixture
def server(servers: Servers, pg_version: int) -> EmbeddedServer:
    """The running server that the test's brokers are on; shared, so not to be stopped."""
    return servers[pg_version]


@pytest.fixture
def new_database(server: EmbeddedServer) -> Iterator[Callable[[str], Dsn]]:
    """Creates empty databases, which go with the test."""
    with _databases(server, "template0") as create:
        yield create


@pytest.fixture
def new_broker(server: EmbeddedServer) -> Iterator[Callable[[str], Dsn]]:
    """Creates migrated databases with 64 shards, which go with the test."""
    with _databases(server, TEMPLATE) as create:

        def broker(name: str) -> Dsn:
            dsn = create(name)
            # a copy of the template has its identity too
            with dsn.connect(role="test") as connection:
                connection.execute(
                    "UPDATE saf.broker SET broker_id = gen_random_uuid(), name = %s", [name]
                )
            return dsn

        yield broker


@pytest.fixture
def app(new_broker: Callable[[str], Dsn]) -> Dsn:
    """A fresh application database."""
    return new_broker("app")


@pytest.fixture
def mom(new_broker: Callable[[str], Dsn]) -> Dsn:
    """A fresh MOM store, on the same server as the application database."""
    return new_broker("mom")


@pytest.fixture
def own_server(pg_version: int) -> Iterator[EmbeddedServer]:
    """A durable server for this test alone, to stop, crash and start again; holds no broker."""
    folder = Path(tempfile.mkdtemp(prefix="saf-test-"))
    server = EmbeddedServer(folder / "data", pg_version, SETTINGS)
    server.start()
    yield server
    server.stop_immediately()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _databases(server: EmbeddedServer, template: str) -> Iterator[Callable[[str], Dsn]]:
    created = []

    def execute(statement: str, *names: str) -> None:
        with server.dsn("postgres").connect(role="test", autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def create(name: str) -> Dsn:
        database = f"{name}_{next(_number)}"
        # by file is the quicker way without fsync
        execute("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", database, template)
        created.append(database)
        return server.dsn(database)

    yield create
    for database in created:
        with server.dsn(database).connect(role="test", autocommit=True) as connection:
            # a prepared transaction would keep its database
            for (gid,) in connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall():
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        execute("DROP DATABASE {} WITH (FORCE)", database)
