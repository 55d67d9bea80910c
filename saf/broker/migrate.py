"""Bring a database's ``saf`` schema to this library's revision.

The migrations are Alembic's, in ``migrations/`` of a checkout or inside the installed package. They
keep their version in ``saf.alembic_version``, so they do not conflict with an application's own
Alembic. A migration is one transaction: it is applied completely or not at all, and two at the same
time wait for each other.

On a connection, a migration is part of the caller's transaction: nothing here commits it. It may
run inside a migration of the caller's own Alembic, whose ``op`` and ``context`` stay as they are.

The number of shards is chosen by a database's first migration and never changes, because keys would
otherwise change shards between two batches and lose their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TextIO

import psycopg

from saf.database import HAS_SCHEMA, REVISION, SCHEMA_REVISION, Dsn, pinned, reason_of
from saf.errors import (
    ConfigurationError,
    RowsGone,
    SafError,
    SchemaMismatch,
    Unavailable,
    UsageError,
)
from saf.log.shards import DEFAULT_SHARDS, MAX_SHARDS
from saf.transaction import of_caller

if TYPE_CHECKING:  # slow to import, and only needed where something migrates
    import sqlalchemy as sa
    from alembic.config import Config

    from saf.transaction import Conn

OLDEST_SERVER = 150000

BASELINE = "0038"
"""The revision that creates the whole schema."""
BEFORE_BASELINE = ("0036", "0037")
"""The revisions that a database is taken over from. Both have the same schema."""
FROM_BEFORE = ("from_0037", "keys")
"""The files of ``migrations/baseline`` that give such a database the schema of `BASELINE`."""
TAKE_FOR_BASELINE = f"UPDATE saf.alembic_version SET version_num = '{BASELINE}'"
TOO_OLD = (
    "database {database!r} has saf schema {revision}, which no release had, and which cannot be "
    f"upgraded: let a checkout that has revision {BEFORE_BASELINE[0]} migrate it first. Or forward "
    "its messages with the version that made it, run DROP SCHEMA saf CASCADE, and migrate again"
)

SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'),
       current_setting('server_encoding'), current_database()
"""


TAKEN = (psycopg.errors.DuplicateTable.sqlstate, psycopg.errors.DuplicateObject.sqlstate)

HEAD = "head"
"""Alembic's name for the newest revision."""

_RUNNING = Lock()
"""Held while Alembic runs, because its ``op`` and ``context`` are global to the process."""


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """The change that a migration has made.

    >>> def done(before: str | None, revision: str) -> Migrated:
    ...     return Migrated(database="shop", before=before, revision=revision, shards=64)
    >>> print(done(None, "0038"), done("0037", "0038"), done("0038", "0038"), sep="\\n")
    shop: saf schema 0038, created with 64 shards
    shop: saf schema 0038, was 0037
    shop: saf schema 0038, unchanged
    """

    database: str
    before: str | None
    """The revision that the database had; None if it had no schema saf."""
    revision: str
    """The revision that the database has now."""
    shards: int

    @property
    def changed(self) -> bool:
        """True unless the database had the revision already."""
        return self.before != self.revision

    def __str__(self) -> str:
        if self.before is None:
            change = f"created with {self.shards} shards"
        else:
            change = f"was {self.before}" if self.changed else "unchanged"
        return f"{self.database}: saf schema {self.revision}, {change}"


def migrate(where: str | Dsn | Conn, shards: int | None = None) -> Migrated:
    """Upgrade a database to the newest revision, creating a missing schema; return the change.

    It is safe to repeat.

    Args:
        where: the database's connection string, or a connection: a SQLAlchemy Session or
            Connection, a psycopg connection or cursor, or Django's ``connection``. On a
            connection, the migration is part of the caller's transaction, and exists when the
            caller commits. Its locks are held until then: two migrations wait for each other, and
            sends wait if the outbox changes. The user needs CREATE on the database for the first
            migration, and must own the schema for later ones.
        shards: 1 to 1024, for the first migration (default 64); later the same number or None.

    Raises:
        ConfigurationError: the number of shards, the user's rights, or the server is unsuitable,
            or the database is older than the first revision.
        SchemaMismatch: the database is newer than this library.
        RowsGone: its tables exist without their rows, as in a copy of the schema alone.
        Unavailable: the server does not answer, or ended the migration; nothing has changed.
        UsageError: the connection is in autocommit without a transaction, or ``where`` is neither a
            string nor a connection.
    """
    if shards is not None:
        shards = checked_shards(shards)
    if not isinstance(where, (str, Dsn)):
        with in_transaction(where) as connection:
            return upgrade(connection, HEAD, shards)

    import sqlalchemy as sa

    dsn = where if isinstance(where, Dsn) else Dsn(where)
    engine = dsn.engine(role="migrate", poolclass=sa.pool.NullPool)
    with _explained(f"database {dsn}", dsn.redact), engine.begin() as connection:
        return upgrade(connection, HEAD, shards)


def upgrade(connection: sa.Connection, revision: str, shards: int | None = None) -> Migrated:
    """Upgrade to at least this revision, in the connection's transaction; see `migrate`."""
    return _run(connection, config(connection=connection, shards=shards), revision)


def downgrade(connection: sa.Connection, revision: str) -> Migrated:
    """Downgrade to this revision, in the connection's transaction.

    Raises:
        ConfigurationError: the revision is older than the baseline.
    """
    return _run(connection, config(connection=connection), revision, down=True)


def written(output: TextIO, revision: str, since: str | None, shards: int | None) -> None:
    """Write the SQL that upgrades from ``since`` to a revision, without BEGIN and COMMIT."""
    from alembic import command

    settings = config(shards=shards)
    settings.output_buffer = output
    settings.attributes["surrounded"] = True
    with _RUNNING, pinned.another_alembic():
        command.upgrade(settings, f"{since}:{revision}" if since else revision, sql=True)


def config(
    dsn: Dsn | None = None, shards: int | None = None, connection: sa.Connection | None = None
) -> Config:
    """Return the configuration for Alembic's commands at this database, or on this connection.

    See ``migrations/env.py``.
    """
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    settings.attributes.update(dsn=dsn, shards=shards, connection=connection)
    return settings


def revisions() -> list[str]:
    """Return the names of all revisions that this library knows, from the first on."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(config()).walk_revisions()
    return sorted(script.revision for script in scripts)


def _run(
    connection: sa.Connection, settings: Config, revision: str, *, down: bool = False
) -> Migrated:
    from alembic import command
    from alembic.util import CommandError

    database = str(connection.exec_driver_sql("SELECT current_database()").scalar())
    with _explained(f"database {database!r}"):
        try:
            with _RUNNING, pinned.another_alembic():
                (command.downgrade if down else command.upgrade)(settings, revision)
        except CommandError as error:
            cause = error.__cause__
            own = cause if isinstance(cause, SafError) else ConfigurationError(str(error))
            raise own from None
        return Migrated(
            database=database,
            before=settings.attributes["before"],
            revision=str(connection.exec_driver_sql(SCHEMA_REVISION).scalar()),
            shards=settings.attributes["shards"],
        )


@contextmanager
def in_transaction(conn: object) -> Iterator[sa.Connection]:
    """Return the caller's connection as SQLAlchemy's, for work inside the caller's transaction.

    Raises:
        UsageError: ``conn`` is not a connection, or no transaction would surround the work.
    """
    transaction = of_caller(conn)
    if transaction.commits_by_itself():
        raise UsageError(
            "this connection is in autocommit and no transaction is open, so a migration that "
            "fails would be half done. Open a transaction first (with conn.transaction(): …, in "
            "Django with transaction.atomic(): …), or pass a connection string"
        )
    if isinstance(transaction.connection, psycopg.Connection):
        from saf.database.borrowed import borrowed

        with borrowed(transaction.connection) as connection:
            yield connection
    else:
        yield transaction.connection


def apply(sql: str, connection: sa.Connection | None = None) -> None:
    """Run many statements in one call: in a revision, or before all revisions on a connection."""
    import sqlalchemy as sa

    if connection is None:
        from alembic import op

        if op.get_context().as_sql:
            op.execute(sql)
            return
        connection = op.get_bind()
    if connection.dialect.driver == "asyncpg":
        # SQLAlchemy lets asyncpg prepare each statement, and PostgreSQL prepares only one
        below: Any = connection.connection.dbapi_connection
        below.run_async(lambda raw: raw.execute(sql))
    else:
        connection.execute(sa.text(sql))


def checked_shards(asked: object) -> int:
    """Return ``asked``, from a call or a command line, as a number of shards.

    >>> checked_shards("128")
    128
    >>> checked_shards(0)
    Traceback (most recent call last):
    saf.errors.ConfigurationError: shards: expected a number from 1 to 1024, got 0
    """
    try:
        number = int(str(asked))
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_SHARDS:
        raise ConfigurationError(f"shards: expected a number from 1 to {MAX_SHARDS}, got {asked!r}")
    return number


def baseline(name: str) -> str:
    """Return a file of ``migrations/baseline``, by its name without suffix."""
    return (_scripts() / "baseline" / f"{name}.sql").read_text(encoding="utf-8")


def settle(connection: sa.Connection, asked: int | None) -> tuple[str | None, int]:
    """Check that a database can be migrated; return its revision and its number of shards.

    The revision is None without a schema, and the number is then ``asked``, or the default. A
    database at one of `BEFORE_BASELINE` is brought to `BASELINE`.

    Raises:
        ConfigurationError: the server is unsuitable, ``asked`` differs from the existing number, or
            the schema is older than `BEFORE_BASELINE`.
        SchemaMismatch: the schema is newer than this library.
        RowsGone: the schema exists without saf's own rows.
    """
    number, version, encoding, database = connection.exec_driver_sql(SERVER).one()
    if number < OLDEST_SERVER:
        raise ConfigurationError(f"database {database!r} is on PostgreSQL {version}: saf needs 15+")
    if encoding != "UTF8":
        # a key's bytes are hashed to its shard, and must be the same everywhere
        raise ConfigurationError(
            f"database {database!r} is encoded in {encoding}: saf needs one with ENCODING 'UTF8'"
        )
    exists = connection.exec_driver_sql(HAS_SCHEMA).scalar()
    revision = None
    if exists:
        revision = connection.exec_driver_sql(SCHEMA_REVISION).scalar()
        if revision is None:
            raise RowsGone(database, ["saf.alembic_version is empty"])
        if revision in BEFORE_BASELINE:
            for name in FROM_BEFORE:
                apply(baseline(name), connection)
            connection.exec_driver_sql(TAKE_FOR_BASELINE)
        elif revision < BASELINE:
            raise ConfigurationError(TOO_OLD.format(database=database, revision=revision))
        elif revision > REVISION:
            raise SchemaMismatch(database, revision, REVISION)
    found = None
    if connection.exec_driver_sql("SELECT to_regclass('saf.broker')").scalar():
        found = connection.exec_driver_sql("SELECT shards FROM saf.broker").scalar()
        if exists and found is None:
            raise RowsGone(database, ["saf.broker has no row"])
    if found and asked and found != asked:
        raise ConfigurationError(
            f"database {database!r} has {found} shards, fixed by its first migration: "
            f"omit shards={asked}, or migrate a new database"
        )
    return revision, int(found or asked or DEFAULT_SHARDS)


def _scripts() -> Path:
    package = Path(__file__).parents[1]
    in_wheel = package / "migrations"
    return in_wheel if in_wheel.is_dir() else package.parent / "migrations"


@contextmanager
def _explained(what: str, redact: Callable[[str], str] = str) -> Iterator[None]:
    """Give the database's errors their way out; ``what`` names the database."""
    try:
        yield
    except SafError:
        raise
    except Exception as error:
        cause = getattr(error, "orig", None) or error
        state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        text = redact(reason_of(cause))
        if state == psycopg.errors.InsufficientPrivilege.sqlstate:
            raise ConfigurationError(
                f"this user may not migrate {what}: {text}. Let the owner of the "
                "database migrate, or GRANT CREATE ON DATABASE to the user that does"
            ) from error
        if state == psycopg.errors.ReadOnlySqlTransaction.sqlstate:
            raise ConfigurationError(
                f"{what} is read-only: migrate on the primary ({text})"
            ) from error
        if state in TAKEN:
            raise ConfigurationError(
                f"{what} has a schema saf that these migrations did not make: {text}"
            ) from error
        if isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError)):
            raise Unavailable(what, text) from error
        raise
