"""``saf migrate``: create or upgrade the schema of a broker."""

from __future__ import annotations

from typing import Annotated

import typer

from saf.broker import whole
from saf.cli.console import echo
from saf.database import REVISION, Dsn, unavailable_if_lost


def command(
    dsn: Annotated[
        str,
        typer.Option(
            envvar="SAF_DSN",
            help="The database: postgresql://user@host/database, or as SQLAlchemy has it, or "
            "'host=… dbname=…'. A password is better in the environment (PGPASSWORD, SAF_DSN) than "
            "on the command line.",
        ),
    ],
    shards: Annotated[
        int | None,
        typer.Option(
            help="Number of shards, chosen at the first migration and fixed. Default 64.",
        ),
    ] = None,
) -> None:
    """Create the saf schema in a database, or upgrade it. It is safe to repeat."""
    from saf.broker.migrate import migrate  # alembic is slow to import, and only needed here

    database = Dsn(dsn)
    migrate(database, shards=shards)
    echo(f"{database.database}: saf schema {REVISION}")
    warn_of_search_path(database)


def warn_of_search_path(database: Dsn) -> None:
    """Warn if schema saf is first in any role's search_path, e.g. that of a role named saf."""
    with (
        unavailable_if_lost(f"database {database}"),
        database.connect(role="migrate", autocommit=True) as connection,
    ):
        if found := whole.first_for(connection):
            what, cure = found
            echo(f"warning: {database.database}: {what}. To fix this, {cure}", err=True)
