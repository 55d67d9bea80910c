"""Alembic's environment: the saf schema keeps its own version table, beside the application's."""

from __future__ import annotations

import os

import sqlalchemy as sa
from alembic import context

from saf.database import Dsn
from saf.errors import ConfigurationError
from saf.schema import SCHEMA


def dsn() -> Dsn:
    """Where to migrate: `saf migrate` passes it; the alembic command takes SAF_DSN or -x dsn=…."""
    text = (
        context.config.attributes.get("dsn")
        or context.get_x_argument(as_dictionary=True).get("dsn")
        or os.environ.get("SAF_DSN")
    )
    if not text:
        raise ConfigurationError(
            "which database? Set SAF_DSN, or say: alembic -x dsn=… upgrade head"
        )
    return text if isinstance(text, Dsn) else Dsn(str(text))


def run() -> None:
    """Migrate in one transaction; two at once wait for each other."""
    if context.is_offline_mode():
        context.configure(
            dialect_name="postgresql",
            version_table_schema=SCHEMA,
            literal_binds=True,
            dialect_opts={"paramstyle": "named"},
        )
        with context.begin_transaction():
            context.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
            context.run_migrations()
        return
    engine = dsn().engine(poolclass=sa.pool.NullPool)
    with engine.connect() as connection, connection.begin():
        connection.execute(
            sa.text("SELECT pg_advisory_xact_lock(hashtextextended('saf migrate', 0))")
        )
        connection.execute(sa.text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        context.configure(connection=connection, version_table_schema=SCHEMA)
        with context.begin_transaction():
            context.run_migrations()


run()
