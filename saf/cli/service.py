"""``saf service``: the services that live at a broker, each with a subscription of its own."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from saf.broker import services
from saf.cli.brokers import AsJson, Config, Round, Store, store, stores
from saf.cli.console import echo
from saf.cli.listing import Listing
from saf.config import load

app = typer.Typer(no_args_is_help=True, help="Services: what messages are addressed to.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Of the service.")]
Discard = Annotated[
    bool, typer.Option("--discard", help="Also if messages are left; they are given up.")
]


@app.command()
def create(name: Service, config: Config = None, broker: Store = None) -> None:
    """Let a service live at a broker, with a subscription of the same name."""
    round_ = Round(store(load(config), broker))
    for where, made in round_.visit(
        "service", lambda connection, _: services.create_service(connection, name)
    ).items():
        echo(f"{where}: service {name} {'created' if made else 'is there already'}")
    round_.finish(say=True)


@app.command("list")
def list_(config: Config = None, broker: Store = None, as_json: AsJson = False) -> None:
    """Show the services of the destinations, and who reads their messages."""
    round_ = Round(stores(load(config), broker))
    found = round_.visit("service", lambda connection, _: services.services(connection))
    if as_json:
        rows = [
            {"broker": where, "service": one.name, "subscriptions": one.subscriptions}
            for where, some in found.items()
            for one in some
        ]
        echo(json.dumps({"services": rows, "errors": round_.errors()}))
    else:
        listing = Listing("broker", "service", "subscriptions")
        for where, some in found.items():
            for one in some:
                listing.add(where, one.name, ", ".join(one.subscriptions))
        listing.show()
    round_.finish(say=not as_json)


@app.command()
def remove(
    name: Service, config: Config = None, broker: Store = None, discard: Discard = False
) -> None:
    """Remove a service and its subscriptions; new messages for it wait at their sources."""
    round_ = Round(store(load(config), broker))
    for where in round_.visit(
        "service",
        lambda connection, _: services.remove_service(connection, name, discard=discard),
    ):
        echo(f"{where}: service {name} removed")
    round_.finish(say=True)
