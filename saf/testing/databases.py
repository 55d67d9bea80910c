"""Databases for tests: fresh copies of a migrated template, on an embedded or a given server.

The template is migrated once. Each copy is a broker with its own identity. Names contain a token of
this process, so that any number of processes may share one server.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.broker.embedded import DEFAULT_VERSION, EmbeddedServer, programs
from saf.database import Dsn
from saf.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import sqlalchemy as sa

PREFIX = "saf_test"
"""Prefix of the names of all databases that are created here on a given server."""

LONGEST_NAME = 30
"""Length, in bytes, to which the name given by a test is cut within a database's name."""

QUICK = {
    "fsync": False,
    "full_page_writes": False,
    "shared_buffers": "64MB",
    "max_connections": 200,
    "max_prepared_transactions": 20,
    "jit": False,
    "shared_preload_libraries": "plpgsql",  # otherwise loaded by each session with triggers
}
"""Settings for a server with short statements, whose data is not needed after a crash."""

# Idle sessions are left over from preparing the template; a busy session makes the copy fail
LET_GO = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = %(database)s AND state = 'idle' AND pid <> pg_backend_pid()
"""
# Copying files is faster without fsync
COPY = "CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy"
DROP = "DROP DATABASE {} WITH (FORCE)"
# A copy starts with its template's identity, so it needs a new one
NAME = "UPDATE saf.broker SET broker_id = gen_random_uuid(), name = %(name)s"
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = %(database)s"


@dataclass(frozen=True)
class Database:
    """A broker's database in a test."""

    dsn: Dsn
    """Connection string, for `saf.receive`, `saf.Worker` and other functions of this library."""

    @property
    def conninfo(self) -> str:
        """Connection string as text, for `psycopg.connect`."""
        return self.dsn.conninfo

    @property
    def url(self) -> str:
        """URL for SQLAlchemy's ``create_engine`` and ``create_async_engine``."""
        import sqlalchemy as sa

        rest = {name: str(value) for name, value in self.dsn.parts.items()}
        return sa.URL.create(
            "postgresql+psycopg",
            username=rest.pop("user", None),
            password=rest.pop("password", None),
            database=rest.pop("dbname"),
            query=rest,
        ).render_as_string(hide_password=False)

    @cached_property
    def engine(self) -> sa.Engine:
        """SQLAlchemy engine, the same for the whole test."""
        import sqlalchemy as sa

        return sa.create_engine(self.url)

    def connect(self, *, autocommit: bool = False) -> psycopg.Connection[Any]:
        """Open a psycopg connection; ``with`` commits and closes it."""
        return self.dsn.connect(role="test", autocommit=autocommit)

    def looking(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Return a connection that sees the messages that the test has sent."""
        return self.connect()

    def require_commits(self, what: str) -> None:
        """Raise if ``what`` cannot see the messages of the test."""

    def let_go(self) -> None:
        """Close the engine's connections."""
        if "engine" in self.__dict__:
            self.engine.dispose()


class Databases:
    """Creates databases on one server, and drops them.

    Args:
        server: the dsn of any database on the server, with a user who may create databases.
    """

    def __init__(self, server: Dsn) -> None:
        self.server = server
        self._token = secrets.token_hex(3)
        self._number = itertools.count(1)
        self._kept: psycopg.Connection[Any] | None = None

    def close(self) -> None:
        """Close the connection to the server, which is otherwise reused for all databases."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def create(self, name: str, template: str = "template0") -> Database:
        """Copy a template; the copy's name begins with `PREFIX` and contains ``name``."""
        # PostgreSQL would silently cut a longer name, and the database would not be found again
        readable = name.encode()[:LONGEST_NAME].decode(errors="ignore")
        database = f"{PREFIX}_{self._token}_{next(self._number)}_{readable}"
        self._run(LET_GO, {"database": template})
        self._run(sql.SQL(COPY).format(sql.Identifier(database), sql.Identifier(template)))
        return Database(Dsn(make_conninfo(self.server.conninfo, dbname=database)))

    def create_broker(self, name: str, template: Database) -> Database:
        """Copy a migrated template, and give the copy its own identity."""
        template.let_go()
        broker = self.create(name, template.dsn.database)
        with broker.connect() as connection:
            connection.execute(NAME, {"name": name})
        return broker

    def drop(self, database: Database) -> None:
        """Drop a database, even if clients are connected to it."""
        database.let_go()
        name = database.dsn.database
        # a prepared transaction would prevent the drop
        if prepared := self._run(PREPARED, {"database": name}).fetchall():
            with database.connect(autocommit=True) as connection:
                for (gid,) in prepared:
                    connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        self._run(sql.SQL(DROP).format(sql.Identifier(name)))

    def _run(
        self, statement: str | sql.Composed, values: dict[str, str] | None = None
    ) -> psycopg.Cursor[Any]:
        if self._kept is not None:
            try:
                return self._kept.execute(statement, values)
            except psycopg.OperationalError:
                if not self._kept.closed:
                    raise
        # the first connection, or the server was restarted
        self._kept = self.server.connect(role="test", autocommit=True)
        return self._kept.execute(statement, values)


class Copies:
    """The brokers of one test: fresh copies of a template, dropped after the test."""

    def __init__(self, databases: Databases, template: Database) -> None:
        if not isinstance(template, Database):
            raise UsageError(
                f"the fixture saf_template gives {template!r}: end yours with `return saf_template`"
            )
        self.all: list[Database] = []
        self._databases = databases
        self._template = template

    def __call__(self, name: str) -> Database:
        """Create another broker with this name."""
        self.all.append(self._databases.create_broker(name, self._template))
        return self.all[-1]

    def drop(self) -> None:
        """Drop all of the test's databases."""
        while self.all:
            self._databases.drop(self.all.pop())


@contextmanager
def embedded_server(version: int = DEFAULT_VERSION) -> Iterator[EmbeddedServer]:
    """Run a fast server, and delete its data afterwards.

    Raises:
        MissingExtra: no embedded PostgreSQL is installed.
    """
    try:
        programs(version)
    except MissingExtra as missing:
        raise MissingExtra(missing.extra, "a test database without SAF_TEST_DSN") from None
    # not pytest's tmp_path: its name is too long for a unix socket, and it keeps three sessions
    folder = Path(tempfile.mkdtemp(prefix="saf-test-"))
    server = EmbeddedServer(folder / "data", version, QUICK)
    try:
        server.start()
        yield server
    finally:
        # the data is not needed any more
        server.stop_immediately()
        shutil.rmtree(folder, ignore_errors=True)
