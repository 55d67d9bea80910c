"""What commands that go round the brokers of saf.toml have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psycopg
import typer

from saf.config import Broker, Destination, Settings
from saf.database import check_schema, unavailable_if_lost
from saf.errors import ConfigurationError, SafError

T = TypeVar("T")

Config = Annotated[
    Path | None,
    typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
]
Name = Annotated[
    str | None,
    typer.Option("--broker", metavar="NAME", help="Only this one. Default: all brokers."),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Where, by its name in saf.toml. Default: the destination."
    ),
]


def moment(text: str) -> datetime:
    """A point in time; without an offset, by this machine's time zone.

    >>> moment("2026-01-31T13:00:00+01:00").timestamp()
    1769860800.0
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time such as 2026-01-31T12:00:00Z") from None


Since = Annotated[
    datetime | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Messages created from then on. Default: all, or those that no purge has taken.",
    ),
]
Until = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Messages created before. Default: all."),
]
Why = Annotated[str, typer.Option(help="For the audit; who and when are noted anyway.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which they are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


Place = Broker | Destination
"""A broker of saf.toml: where messages are sent, or where they are received."""


def chosen(settings: Settings, name: str | None) -> Mapping[str, Place]:
    """The brokers that a command is for; a destination only if it is named.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name is None:
        return settings.brokers
    return {name: _place(settings, name)}


def stores(settings: Settings, name: str | None) -> Mapping[str, Place]:
    """The brokers that services live at: the destinations, or the one that is named."""
    return settings.destinations if name is None else {name: _place(settings, name)}


def store(settings: Settings, name: str | None) -> Mapping[str, Place]:
    """The one broker that a service is to live at.

    Raises:
        ConfigurationError: none is named, and there are several.
    """
    found = stores(settings, name)
    if len(found) > 1:
        raise ConfigurationError(f"which broker? Say --broker, one of {', '.join(found)}")
    return found


def _place(settings: Settings, name: str) -> Place:
    places: dict[str, Place] = {**settings.destinations, **settings.brokers}
    if name not in places:
        there = ", ".join(settings.brokers)
        raise ConfigurationError(f"--broker {name}: there is no [brokers.{name}], only {there}")
    return places[name]


class Round:
    """One visit to each broker: what each gave, and which failed."""

    def __init__(self, brokers: Mapping[str, Place]) -> None:
        self.brokers = brokers
        self.failed: list[tuple[str, SafError]] = []

    def visit(self, role: str, action: Callable[[psycopg.Connection[Any], Any], T]) -> dict[str, T]:
        """What ``action`` returns for each broker that it does not fail for."""

        def connected(name: str, broker: Place) -> T:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                broker.dsn.connect(role=role, autocommit=True) as connection,
            ):
                check_schema(connection)
                return action(connection, broker)

        return self.each(connected)

    def each(self, action: Callable[[str, Any], T]) -> dict[str, T]:
        """The same for an action that connects by itself."""
        results: dict[str, T] = {}
        for name, broker in self.brokers.items():
            try:
                results[name] = action(name, broker)
            except SafError as error:
                self.failed.append((name, error))
        return results

    def errors(self) -> list[dict[str, str]]:
        """The failures, for JSON."""
        return [{"broker": name, "error": str(error)} for name, error in self.failed]

    def finish(self, *, say: bool, found: int = 0) -> None:
        """Say what failed, and exit with ``found`` or its code; nothing if nothing has."""
        for name, error in self.failed:
            if say:
                typer.echo(f"saf: broker {name!r}: {error}", err=True)
        if found or self.failed:
            raise typer.Exit(found or max(error.exit_code for _, error in self.failed))
