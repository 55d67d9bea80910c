"""Bring a database's ``saf`` schema to this library's revision.

The migrations are Alembic's, in ``migrations/`` of a checkout or inside the installed package. They
keep their version in ``saf.alembic_version``, so they do not conflict with an application's own
Alembic. A migration is one transaction: it is applied completely or not at all, and two at the same
time wait for each other.

The number of shards is chosen by a database's first migration and never changes, because keys would
otherwise change shards between two batches and lose their order.
"""

from __future__ import annotations

from pathlib import Path

import psycopg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from saf.database import HAS_SCHEMA, REVISION, SCHEMA_REVISION, Dsn
from saf.errors import ConfigurationError, RowsGone, SafError, SchemaMismatch, Unavailable
from saf.log.shards import DEFAULT_SHARDS, MAX_SHARDS

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


def migrate(dsn: Dsn, shards: int | None = None) -> None:
    """Upgrade a database to the newest revision, creating the schema if it is missing.

    Args:
        dsn: the database; its user needs CREATE on it for the first migration, and must own the
            schema for later ones.
        shards: 1 to 1024, for the first migration (default 64); later the same number or None.

    Raises:
        ConfigurationError: the number of shards, the user's rights, or the server is unsuitable,
            or the database is older than the first revision.
        SchemaMismatch: the database is newer than this library.
        RowsGone: its tables exist without their rows, as in a copy of the schema alone.
        Unavailable: the server does not answer, or ended the migration; nothing has changed.
    """
    if shards is not None:
        shards = checked_shards(shards)
    try:
        command.upgrade(config(dsn, shards), "head")
    except CommandError as error:
        cause = error.__cause__
        raise (cause if isinstance(cause, SafError) else ConfigurationError(str(error))) from None
    except sa.exc.DBAPIError as error:
        raise _explained(error, dsn) from error


def config(dsn: Dsn, shards: int | None = None) -> Config:
    """Return the configuration for Alembic's commands at this database; see
    ``migrations/env.py``."""
    settings = Config()
    settings.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    settings.attributes.update(dsn=dsn, shards=shards)
    return settings


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


def settle(connection: sa.Connection, asked: int | None) -> int:
    """Check that a database can be migrated; return its own number of shards, or else ``asked``.

    A database at one of `BEFORE_BASELINE` is brought to `BASELINE`.

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
    if exists:
        revision = connection.exec_driver_sql(SCHEMA_REVISION).scalar()
        if revision is None:
            raise RowsGone(database, ["saf.alembic_version is empty"])
        if revision in BEFORE_BASELINE:
            for name in FROM_BEFORE:
                connection.execute(sa.text(baseline(name)))
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
    return int(found or asked or DEFAULT_SHARDS)


def _scripts() -> Path:
    package = Path(__file__).parents[1]
    in_wheel = package / "migrations"
    return in_wheel if in_wheel.is_dir() else package.parent / "migrations"


def _explained(error: sa.exc.DBAPIError, dsn: Dsn) -> Exception:
    cause = error.orig
    text = dsn.redact(str(cause))
    if isinstance(cause, psycopg.errors.InsufficientPrivilege):
        return ConfigurationError(
            f"this user may not migrate database {dsn.database!r}: {text}. Let the owner of the "
            "database migrate, or GRANT CREATE ON DATABASE to the user that does"
        )
    if isinstance(cause, psycopg.errors.ReadOnlySqlTransaction):
        return ConfigurationError(f"database {dsn} is read-only: migrate on the primary ({text})")
    if isinstance(cause, (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject)):
        return ConfigurationError(
            f"database {dsn.database!r} has a schema saf that these migrations did not make: {text}"
        )
    if isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError)):
        return Unavailable(f"database {dsn}", text)
    return error
