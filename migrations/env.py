"""Alembic's environment: the saf schema has its own version table, apart from the application's."""

from __future__ import annotations

import os

import sqlalchemy as sa
from alembic import context
from alembic.util import CommandError

from saf.broker.migrate import checked_shards, settle
from saf.database import Dsn
from saf.errors import ConfigurationError, SafError
from saf.log.shards import DEFAULT_SHARDS

SCHEMA = "saf"
ASKED = context.get_x_argument(as_dictionary=True)


def dsn() -> Dsn:
    """Return the database to migrate, for the alembic command: from SAF_DSN or -x dsn=…."""
    text = context.config.attributes.get("dsn") or ASKED.get("dsn") or os.environ.get("SAF_DSN")
    if not text:
        raise ConfigurationError(
            "which database? Set SAF_DSN, or say: alembic -x dsn=… upgrade head"
        )
    return text if isinstance(text, Dsn) else Dsn(str(text))


def shards() -> int | None:
    """Return the number of shards: from `saf.migrate`; for alembic, from -x shards=…."""
    asked = context.config.attributes.get("shards") or ASKED.get("shards")
    return None if asked is None else checked_shards(asked)


def offline() -> None:
    """Print the SQL without running it."""
    context.config.attributes["shards"] = shards() or DEFAULT_SHARDS
    context.configure(
        dialect_name="postgresql",
        version_table_schema=SCHEMA,
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
        # inside another migration, whose BEGIN and COMMIT are printed already
        transactional_ddl=not context.config.attributes.get("surrounded"),
    )
    with context.begin_transaction():
        context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        context.run_migrations()


def online() -> None:
    """Migrate on the caller's connection, in its transaction; else in one of its own."""
    given = context.config.attributes.get("connection")
    if given is not None:
        migrate(given)
        return
    engine = dsn().engine(role="migrate", poolclass=sa.pool.NullPool)
    with engine.connect() as connection, connection.begin():
        migrate(connection)


def migrate(connection: sa.Connection) -> None:
    """Migrate in one transaction; concurrent migrations wait for each other."""
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(hashtextextended('saf migrate', 0))"))
    # checked first, because IF NOT EXISTS needs the right to create even if the schema exists
    if not connection.scalar(sa.text(f"SELECT to_regnamespace('{SCHEMA}')")):
        connection.execute(sa.text(f"CREATE SCHEMA {SCHEMA}"))
    before, number = settle(connection, shards())
    context.config.attributes.update(before=before, shards=number)
    context.configure(connection=connection, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


try:
    if context.is_offline_mode():
        offline()
    else:
        online()
except SafError as error:
    # the alembic command prints a CommandError as a sentence, other errors as a traceback
    raise CommandError(str(error)) from error
