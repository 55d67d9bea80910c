"""``saf migrate``, ``saf grant``, ``saf sender``: a broker's schema, and the rights of roles on it.

`grant` gives a role the rights of its duty. `sender` says which roles may send as which service,
and to which services.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer

from saf.broker import grants, senders, whole
from saf.broker import migrate as schema
from saf.cli.alive import announce, waiting
from saf.cli.brokers import AsJson, Commands, Everywhere
from saf.cli.console import Table, echo
from saf.database import Dsn, check_schema, unavailable_if_lost
from saf.errors import ConfigurationError
from saf.operating.wording import counted

OwnersDsn = Annotated[
    str,
    typer.Option(
        envvar="SAF_DSN",
        help="Database of the broker, as the owner of its schema saf. A password is better in the "
        "environment (PGPASSWORD, SAF_DSN) than on the command line.",
    ),
]


def migrate(
    dsn: Annotated[
        str,
        typer.Option(
            envvar="SAF_DSN",
            help="Database: postgresql://user@host/database, SQLAlchemy's form of it, or "
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
    database = given(dsn, "--dsn")
    announce(f"migrating {database.database}")
    with waiting(f"migrating {database.database}"):
        done = schema.migrate(database, shards=shards)
    echo(str(done))
    warn_of_search_path(database)


def given(dsn: str, option: str) -> Dsn:
    """Return the database of an option.

    Raises:
        ConfigurationError: it is empty, as if from a variable that is not set, or is invalid.
    """
    if not dsn.strip():
        raise ConfigurationError(f"{option} is empty: is the variable set?")
    return Dsn(dsn)


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
    name: Annotated[str, typer.Argument(help="Name of an existing role of the server.")],
    dsn: OwnersDsn,
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
    """Grant a role the rights that its duty needs.

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
    database = given(dsn, "--dsn")
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


sending = Commands(help="Senders: which roles may send as which service.")

Role = Annotated[
    str, typer.Argument(metavar="ROLE", help="Name of an existing role of the server.")
]

RULES = Table[senders.Sender](
    *("role", "from", "to"),
    things="rules for senders",
    cells=lambda rule: (
        rule.role if rule.known else f"{rule.role} (no such role)",
        rule.from_service,
        rule.to_service or "any",
    ),
    plain=lambda rule: {
        "role": rule.role,
        "from": rule.from_service,
        "to": rule.to_service,
        "created_at": rule.created_at.isoformat(),
        "known": rule.known,
    },
)


@sending.command()
def add(
    role: Role,
    dsn: OwnersDsn,
    from_service: Annotated[str, typer.Option("--from", help="Service that the role may send as.")],
    to_service: Annotated[
        list[str] | None,
        typer.Option("--to", help="Service that it may send to. Default: any."),
    ] = None,
    refuse_others: Annotated[
        bool,
        typer.Option(
            "--refuse-others",
            help="Create a broker's first rule even if other roles write, which then may not send.",
        ),
    ] = False,
) -> None:
    """Allow a role, and its members, to send as a service.

    While a broker has rules, the server refuses each message whose sender and receiver no rule of
    the role allows. The owner of the schema is not restricted. The role needs `saf grant --role
    writer` too.
    """
    to_services: list[str | None] = [*to_service] if to_service else [None]
    with _connected(dsn) as (name, connection):
        first = not senders.senders(connection)
        new = senders.add_senders(
            connection, role, from_service, to_services, refuse_others=refuse_others
        )
        forbidden = senders.forbidden(connection)
    receivers = ", ".join(receiver or "any service" for receiver in to_services)
    echo(f"{name}: {role} may send as {from_service} to {receivers}{'' if new else ' already'}")
    if first:
        echo(f"{name}: from now on, nobody but the owner sends without a rule")
    _say_forbidden(name, forbidden)


def _say_forbidden(name: str, forbidden: tuple[int, int]) -> None:
    """Print how many held messages and schedules will be refused when they are due, if any."""
    words = [
        counted(number, what)
        for number, what in zip(forbidden, ("held message", "schedule"), strict=True)
        if number
    ]
    if words:
        echo(
            f"{name}: {' and '.join(words)} will be refused when due, because no rule allows their "
            "roles to send them: `saf held list`, `saf schedule list`"
        )


@sending.command("list")
def list_(*, round_: Everywhere, as_json: AsJson = False) -> None:
    """List the rules for senders.

    Without rules, any writer may send as any service.
    """
    round_.show_rows("sender", senders.senders, "senders", RULES, as_json=as_json)


@sending.command()
def remove(
    role: Role,
    dsn: OwnersDsn,
    from_service: Annotated[
        str | None, typer.Option("--from", help="Only rules to send as this service.")
    ] = None,
    to_service: Annotated[
        list[str] | None, typer.Option("--to", help="Only rules to send to this service.")
    ] = None,
    allow_others: Annotated[
        bool,
        typer.Option(
            "--allow-others",
            help="Remove a broker's last rule: any writer may then send as any service again.",
        ),
    ] = False,
) -> None:
    """Remove rules of a role.

    Without --from and --to, all rules of the role.
    """
    with _connected(dsn) as (name, connection):
        removed = senders.remove_senders(
            connection, role, from_service, to_service, allow_others=allow_others
        )
        left = senders.senders(connection)
        forbidden = senders.forbidden(connection)
    echo(f"{name}: {removed} {'rule' if removed == 1 else 'rules'} of {role} removed")
    if not left:
        echo(f"{name}: no rule is left, so any writer may send as any service")
    _say_forbidden(name, forbidden)


@contextmanager
def _connected(dsn: str) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    database = given(dsn, "--dsn")
    with (
        unavailable_if_lost(f"database {database}"),
        database.connect(role="grant", autocommit=True) as connection,
    ):
        check_schema(connection)
        yield database.database, connection
