"""``saf topic``: services whose messages go to every destination that a route leads to."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import Listing, echo
from saf.cli.route import configured
from saf.config import load
from saf.routing import routes

app = typer.Typer(no_args_is_help=True, help="Topics: services that go to every destination.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Of the service.")]


@app.command()
def add(name: Service, config: Config = None, broker: Name = None) -> None:
    """Make a service a topic.

    Its messages go to all destinations of its routes.
    """
    round_ = Round(chosen(load(config), broker))
    for where, added in round_.visit(
        "route", lambda connection, _: routes.add_topic(connection, name)
    ).items():
        done = "is a topic from the next batch on" if added else "is a topic already"
        echo(f"{where}: {name} {done}")
    round_.finish(say=True)


@app.command("list")
def list_(config: Config = None, broker: Name = None, as_json: AsJson = False) -> None:
    """Show the topics, and where a message of each goes now."""
    settings = load(config)
    round_ = Round(chosen(settings, broker))
    rows = []
    for where, configuration in configured(round_, settings).items():
        for name in sorted(configuration.topics):
            match = configuration.in_force.match(name, None)
            rows.append((where, name, match.destinations if match else ()))
    if as_json:
        topics = [{"broker": w, "topic": n, "destinations": list(d)} for w, n, d in rows]
        echo(json.dumps({"topics": topics, "errors": round_.errors()}))
    else:
        listing = Listing("broker", "topic", below="destinations")
        for where, name, destinations in rows:
            listing.add(where, name, below=", ".join(destinations) or "none")
        listing.show()
    round_.finish(say=not as_json)


@app.command()
def remove(name: Service, config: Config = None, broker: Name = None) -> None:
    """Make a topic an ordinary service again.

    Its most specific routes share its messages.
    """
    round_ = Round(chosen(load(config), broker))
    for where in round_.visit("route", lambda connection, _: routes.remove_topic(connection, name)):
        echo(f"{where}: {name} is no longer a topic, from the next batch on")
    round_.finish(say=True)
