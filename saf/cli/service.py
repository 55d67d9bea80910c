"""``saf service``: the services that live at a broker, each with a subscription of its own."""

from __future__ import annotations

from typing import Annotated, Any

import psycopg
import typer

from saf.broker import services
from saf.cli.brokers import AsJson, AtStore, Config, Round, Store, store, stores
from saf.cli.console import echo
from saf.cli.options import grouped
from saf.cli.tables import Table
from saf.config import load

app = typer.Typer(no_args_is_help=True, help="Services: what messages are addressed to.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.")]
Discard = Annotated[
    bool, typer.Option("--discard", help="Remove it even if messages are left, and discard these.")
]

SERVICES = Table[services.Service](
    *("service", "subscriptions"),
    cells=lambda row: (row.name, ", ".join(row.subscriptions)),
    plain=lambda row: {"service": row.name, "subscriptions": row.subscriptions},
)


@app.command()
@grouped
def create(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of the services.")],
    *,
    refuse_others: Annotated[
        bool,
        typer.Option(
            "--refuse-others",
            help="Create a broker's first services even if its inbox has messages for others.",
        ),
    ] = False,
    round_: AtStore,
) -> None:
    """Create services at a broker.

    Each has a subscription of the same name. A broker without services stores messages for any
    service; a broker with services, for these only. Messages for others wait at their sources, and
    `saf parked list` shows them there.
    """

    def make(connection: psycopg.Connection[Any], _: object) -> tuple[bool, list[str]]:
        first = not services.services(connection)
        return first, services.create_services(connection, names, refuse_others=refuse_others)

    for where, (first, created) in round_.visit("service", make).items():
        for name in names:
            echo(f"{where}: service {name} {'created' if name in created else 'already exists'}")
        if first:
            echo(f"{where}: from now on, it stores messages for its services only; others wait")
    round_.finish(say=True)


@app.command("list")
def list_(config: Config = None, broker: Store = None, as_json: AsJson = False) -> None:
    """Show the services of the destinations, and who reads their messages."""
    round_ = Round(stores(load(config), broker))
    found = round_.visit("service", lambda connection, _: services.services(connection))
    round_.show_rows("services", found, SERVICES, as_json=as_json)


@app.command()
def remove(
    name: Service, config: Config = None, broker: Store = None, discard: Discard = False
) -> None:
    """Remove a service and its subscriptions.

    New messages for it wait at their sources. Without its last service, a broker stores messages
    for any service again.
    """
    round_ = Round(store(load(config), broker))

    def forget(connection: psycopg.Connection[Any], _: object) -> bool:
        services.remove_service(connection, name, discard=discard)
        return bool(services.services(connection))

    for where, left in round_.visit("service", forget).items():
        echo(f"{where}: service {name} removed")
        if not left:
            echo(f"{where}: it has no service left, and stores messages for any again")
    round_.finish(say=True)
