"""``saf migrate`` and ``saf grant``: the schema of a broker, and the rights of a role on it."""

from __future__ import annotations

from typing import Annotated

import typer

from saf.broker import grants, whole
from saf.cli.console import echo
from saf.database import REVISION, Dsn, unavailable_if_lost
from saf.errors import ConfigurationError


def migrate(
    dsn: Annotated[
        str,
        typer.Option(
            envvar="SAF_DSN",
            help="The database: postgresql://user@host/database, SQLAlchemy's form of it, or "
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
    from saf.broker import migrate as schema  # alembic is slow to import, and only needed here

    database = Dsn(dsn)
    schema.migrate(database, shards=shards)
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


def grant(
    name: Annotated[str, typer.Argument(help="An existing role of the server.")],
    dsn: Annotated[
        str,
        typer.Option(
            envvar="SAF_DSN",
            help="The broker's database, as the owner of its schema saf. A password is better in "
            "the environment (PGPASSWORD, SAF_DSN) than on the command line.",
        ),
    ],
    role: Annotated[
        list[grants.Kind] | None,
        typer.Option(help="Duty of the login, e.g. --role receiver --role writer."),
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Revoke all of its rights in schema saf.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the SQL and change nothing.")
    ] = False,
) -> None:
    """Give a role the rights that its duty needs.

    The rights are on a broker's schema saf; it gets no others. Earlier rights of the role, granted
    by saf or by hand, are removed in the same transaction. It is safe to repeat; repeat it after an
    upgrade.
    """
    kinds = list(dict.fromkeys(role or []))
    if kinds and revoke:
        raise ConfigurationError(
            "--revoke removes all rights: to keep some, use --role without --revoke"
        )
    if not kinds and not revoke:
        raise ConfigurationError(
            f"{name!r} needs a duty: add --role and one of {', '.join(grants.Kind)}, or --revoke"
        )
    database = Dsn(dsn)
    with (
        unavailable_if_lost(f"database {database}"),
        database.connect(role="grant", autocommit=True) as connection,
    ):
        if dry_run:
            grants.check(connection, name)
            for statement in grants.statements(name, kinds):
                echo(f"{statement.as_string(connection)};", lines=True)
            return
        grants.grant(connection, name, kinds)
    duty = " and ".join(kinds) or "nothing in schema saf any more"
    echo(f"{database.database}: {name} is {duty}")
