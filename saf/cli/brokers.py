"""What commands that go round the brokers of saf.toml share: their options, and the round."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psycopg
import typer

from saf.cli.console import echo
from saf.config import Broker, Settings
from saf.database import check_schema, unavailable_if_lost
from saf.database.pages import Page
from saf.errors import SafError, SchemaMissing, UsageError
from saf.fleets import Candidate, Listing
from saf.operating.places import chosen, everywhere, store, stores
from saf.routing.matching import Routes
from saf.routing.routes import current_routes

__all__ = [
    "AT_ONCE",
    "GREATEST",
    "MOST_ROWS",
    "After",
    "AsJson",
    "Config",
    "DryRun",
    "Limit",
    "Name",
    "Round",
    "Since",
    "Store",
    "Until",
    "Where",
    "Why",
    "chosen",
    "ends",
    "everywhere",
    "moment",
    "routes_of",
    "rows_of",
    "say_next",
    "store",
    "stores",
]

T = TypeVar("T")

AT_ONCE = 16
"""How many brokers are visited at a time: many that do not answer take no longer than one."""

MOST_ROWS = 1_000_000
"""How long a page may be."""
GREATEST = (1 << 63) - 1
"""The greatest number of a row."""

Config = Annotated[
    Path | None,
    typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
]
Name = Annotated[
    str | None,
    typer.Option("--broker", metavar="NAME", help="Only this one, or fleet. Default: all brokers."),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Only this one. Default: all brokers and destinations."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Where, by its name in saf.toml. Default: the destination."
    ),
]


def moment(text: str) -> datetime:
    """Return a point in time; a text without an offset is in this machine's time zone.

    >>> moment("2026-01-31T13:00:00+01:00").timestamp()
    1769860800.0
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
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
Limit = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="How many to show at most.")]
Before = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Only those set aside before."),
]
After = Annotated[
    str | None,
    typer.Option(metavar="END", help="Go on where the page before has ended, in one broker."),
]
Why = Annotated[str, typer.Option(help="For the audit; who and when are noted anyway.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which they are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def say_next(pages: Mapping[str, Page[Any]]) -> None:
    """Say how each broker's next page is shown, where there is one."""
    for name, page in pages.items():
        if page.next is not None:
            echo(f"{name}: go on with --broker {name} --after {shlex.quote(page.next)}")


def rows_of(pages: Mapping[str, Page[Any]]) -> list[dict[str, Any]]:
    """Return what pages show, each row with its broker, for JSON."""
    return [{"broker": name, **one.as_dict()} for name, page in pages.items() for one in page.shown]


def ends(pages: Mapping[str, Page[Any]]) -> dict[str, str | None]:
    """Return where each broker's next page goes on, for JSON."""
    return {name: page.next for name, page in pages.items()}


def routes_of(settings: Settings) -> Callable[[psycopg.Connection[Any]], Routes]:
    """Return a function that asks a broker where its messages go now, by rows and saf.toml."""
    default, declared = settings.forwarder.default_destination, settings.declared
    return lambda connection: current_routes(connection, default, declared)


class Round:
    """One visit to each broker: what each gave, and which failed."""

    def __init__(self, places: Mapping[str, Broker] | Listing) -> None:
        self.brokers: Mapping[str, Broker]
        self.failed: list[tuple[str, SafError]] = []
        if isinstance(places, Listing):
            self.brokers, self.failed = places.brokers, list(places.problems)
        else:
            self.brokers = places

    def go_on(self, after: str | None) -> None:
        """Make sure that a page which goes on does so in one broker.

        Raises:
            UsageError: there are several.
        """
        if after is not None and len(self.brokers) != 1:
            raise UsageError("--after goes on in one broker: which one? Say --broker NAME")

    def visit(self, role: str, action: Callable[[psycopg.Connection[Any], Any], T]) -> dict[str, T]:
        """Connect to each broker, several at a time; return what ``action`` returns, by broker.

        Brokers for which it fails are in ``failed`` instead.
        """

        def connected(name: str, broker: Broker) -> T:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                broker.dsn.connect(role=role, autocommit=True) as connection,
            ):
                check_schema(connection)
                return action(connection, broker)

        return self._each(connected, at_once=AT_ONCE)

    def each(self, action: Callable[[str, Any], T]) -> dict[str, T]:
        """Call ``action`` for each broker, one after the other; return what it returns, by broker.

        The action connects by itself. Brokers for which it fails are in ``failed`` instead.
        """
        return self._each(action, at_once=1)

    def _each(self, action: Callable[[str, Any], T], *, at_once: int) -> dict[str, T]:
        results: dict[str, T] = {}
        with ThreadPoolExecutor(at_once) as pool:
            jobs = {name: pool.submit(action, name, one) for name, one in self.brokers.items()}
            for name, job in jobs.items():
                try:
                    results[name] = job.result()
                except SafError as error:
                    if isinstance(error, SchemaMissing) and isinstance(
                        self.brokers[name], Candidate
                    ):
                        continue  # the pattern matches this database, which is no broker
                    self.failed.append((name, error))
        return results

    def errors(self) -> list[dict[str, str]]:
        """Return the failures for JSON."""
        return [{"broker": name, "error": str(error)} for name, error in self.failed]

    def finish(self, *, say: bool, found: int = 0) -> None:
        """Say what failed, if ``say``, and exit with ``found`` or the failures' code.

        It returns if nothing was found and nothing has failed.
        """
        for name, error in self.failed:
            if say:
                echo(f"saf: broker {name!r}: {error}", err=True)
        if found or self.failed:
            raise typer.Exit(found or max(error.exit_code for _, error in self.failed))
