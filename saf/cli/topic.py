"""``saf topic``: services whose messages go to every destination that a route leads to."""

from __future__ import annotations

from typing import Annotated

import typer

from saf.cli.brokers import AsJson, Config, Name, Round, chosen
from saf.cli.console import echo
from saf.cli.route import configured
from saf.cli.tables import Table
from saf.config import load
from saf.routing import routes

app = typer.Typer(no_args_is_help=True, help="Topics: services that go to every destination.")

Service = Annotated[str, typer.Argument(metavar="NAME", help="Of the service.")]

TOPICS = Table[tuple[str, list[str]]](
    "topic",
    below="destinations",
    cells=lambda row: (row[0], ", ".join(row[1]) or "none"),
    plain=lambda row: {"topic": row[0], "destinations": row[1]},
)


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
    topics = {
        where: [
            (name, [*match.destinations] if match else [])
            for name in sorted(configuration.topics)
            for match in [configuration.in_force.match(name, None)]
        ]
        for where, configuration in configured(round_, settings).items()
    }
    round_.show_rows("topics", topics, TOPICS, as_json=as_json)


@app.command()
def remove(name: Service, config: Config = None, broker: Name = None) -> None:
    """Make a topic an ordinary service again.

    Its most specific routes share its messages.
    """
    round_ = Round(chosen(load(config), broker))
    for where in round_.visit("route", lambda connection, _: routes.remove_topic(connection, name)):
        echo(f"{where}: {name} is no longer a topic, from the next batch on")
    round_.finish(say=True)
