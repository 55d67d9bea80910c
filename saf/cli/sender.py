"""``saf sender``: which roles may send as which service, and to which services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer

from saf.broker import senders
from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import echo
from saf.cli.tables import Table
from saf.config import load
from saf.database import Dsn, check_schema, unavailable_if_lost

app = typer.Typer(no_args_is_help=True, help="Senders: which roles may send as which service.")

Role = Annotated[str, typer.Argument(metavar="ROLE", help="An existing role of the server.")]
Database = Annotated[
    str,
    typer.Option(
        "--dsn",
        envvar="SAF_DSN",
        help="The broker's database, as the owner of its schema saf. A password is better in the "
        "environment (PGPASSWORD, SAF_DSN) than on the command line.",
    ),
]

RULES = Table[senders.Sender](
    *("role", "from", "to"),
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


@app.command()
def add(
    role: Role,
    dsn: Database,
    from_service: Annotated[
        str, typer.Option("--from", help="The service that the role may send as.")
    ],
    to_service: Annotated[
        list[str] | None,
        typer.Option("--to", help="A service that it may send to. Default: any."),
    ] = None,
    refuse_others: Annotated[
        bool,
        typer.Option(
            "--refuse-others",
            help="Create a broker's first rule even if other roles write, which then may not send.",
        ),
    ] = False,
) -> None:
    """Let a role, and its members, send as a service.

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
    receivers = ", ".join(receiver or "any service" for receiver in to_services)
    echo(f"{name}: {role} may send as {from_service} to {receivers}{'' if new else ' already'}")
    if first:
        echo(f"{name}: from now on, nobody but the owner sends without a rule")


@app.command("list")
def list_(config: Config = None, broker: Name = None, as_json: AsJson = False) -> None:
    """Show the rules of the brokers.

    Without rules, any writer may send as any service.
    """
    round_ = Round(chosen(load(config), broker))
    found = round_.visit("sender", lambda connection, _: senders.senders(connection))
    round_.show_rows("senders", found, RULES, as_json=as_json)


@app.command()
def remove(
    role: Role,
    dsn: Database,
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
    echo(f"{name}: {removed} {'rule' if removed == 1 else 'rules'} of {role} removed")
    if not left:
        echo(f"{name}: it has no rule left, so any writer may send as any service")


@contextmanager
def _connected(dsn: str) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    database = Dsn(dsn)
    with (
        unavailable_if_lost(f"database {database}"),
        database.connect(role="grant", autocommit=True) as connection,
    ):
        check_schema(connection)
        yield database.database, connection
