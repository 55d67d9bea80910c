"""``saf grant``: give a database role the rights of its duty, and no others."""

from __future__ import annotations

from typing import Annotated

import typer

from saf.broker.grants import Kind, check, grant, statements
from saf.cli.console import echo
from saf.database import Dsn, unavailable_if_lost
from saf.errors import ConfigurationError


def command(
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
        list[Kind] | None,
        typer.Option(help="Duty of the login. Several: --role receiver --role writer."),
    ] = None,
    revoke: Annotated[
        bool, typer.Option("--revoke", help="Take away everything it may do in schema saf.")
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
            "--revoke removes the rights of every kind: to keep some, use --role without it"
        )
    if not kinds and not revoke:
        raise ConfigurationError(
            f"{name!r} needs a duty: add --role and one of {', '.join(Kind)}, or --revoke"
        )
    database = Dsn(dsn)
    with (
        unavailable_if_lost(f"database {database}"),
        database.connect(role="grant", autocommit=True) as connection,
    ):
        if dry_run:
            check(connection, name)
            for statement in statements(name, kinds):
                echo(f"{statement.as_string(connection)};", lines=True)
            return
        grant(connection, name, kinds)
    duty = " and ".join(kinds) or "nothing in schema saf any more"
    echo(f"{database.database}: {name} is {duty}")
