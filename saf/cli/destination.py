"""``saf destination``: the destinations in saf.toml, and what each of them guarantees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from saf.cli.brokers import AsJson, Config
from saf.cli.console import echo, plain_console
from saf.cli.doctor import FOUND
from saf.config import did_you_mean, load
from saf.destinations.settings import DestinationSettings
from saf.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="Destinations: where messages are delivered.")

Name = Annotated[str, typer.Argument(help="Of the destination, in saf.toml.")]


@app.command()
def check(name: Name, config: Config = None, as_json: AsJson = False) -> None:
    """Connect to a destination, and show what it guarantees.

    It reads the server's version and settings, and names settings that would give more safety. In
    an object store, it writes a probe and deletes it, because nothing else shows what the store
    keeps; elsewhere, it writes nothing.

    Exit code 0: messages can be stored there; 1: it has a problem; 2: it refuses the login or the
    forwarder; 75: it does not answer.
    """
    destination = named(name, config)
    problems = [*destination.problems(name), *destination.probe(name)]
    given = destination.guarantee(name)
    if as_json:
        echo(
            json.dumps(
                {"destination": name, **_said(given, problems), "quality": destination.quality}
            )
        )
    else:
        console = plain_console()
        console.paragraph(f"destination {name!r}: {given.server}", others="    ")
        console.paragraph(f"  promise: {given.promise}", others="    ")
        for what, cure in problems:
            console.paragraph(f"error: {what}", style="red", others="    ")
            console.paragraph(f"  cure: {cure}", others="    ")
        for what, cure in given.more:
            console.paragraph(f"not given: {what}", style="yellow", others="    ")
            console.paragraph(f"  to have it: {cure}", others="    ")
    if problems:
        raise typer.Exit(FOUND)


def named(name: str, config: Path | None) -> DestinationSettings:
    """Return the settings of a destination in saf.toml.

    Raises:
        ConfigurationError: no destination has this name.
    """
    destinations = load(config).destinations
    if name not in destinations:
        raise ConfigurationError(
            f"no [destinations.{name}] in saf.toml{did_you_mean(name, destinations)}"
        )
    return destinations[name]


def _said(given: Any, problems: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "server": given.server,
        "promise": given.promise,
        "problems": [{"what": what, "cure": cure} for what, cure in problems],
        "more": [{"what": what, "cure": cure} for what, cure in given.more],
    }
