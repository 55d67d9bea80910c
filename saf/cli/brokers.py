"""Shared code of commands that visit the brokers in saf.toml: their options, and the visit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Any, TypeVar

import psycopg
import typer

from saf.broker import health
from saf.cli.console import INTERRUPTED, echo
from saf.cli.options import Options
from saf.cli.tables import Table, ends, say_next
from saf.config import Broker, Settings, load
from saf.database import check_schema, unavailable_if_lost
from saf.database.background import Background
from saf.database.pages import Page
from saf.errors import SafError, SchemaMissing, UsageError
from saf.operating.fleets import Candidate, Listing
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
    "everywhere",
    "moment",
    "routes_of",
    "store",
    "stores",
]

T = TypeVar("T")

AT_ONCE = 16
"""Number of brokers visited in parallel: many that do not answer take no longer than one."""

MOST_ROWS = 1_000_000
"""Maximum length of a page."""
GREATEST = (1 << 63) - 1
"""The greatest row number."""

Config = Annotated[
    Path | None,
    typer.Option(help="Configuration file. Default: $SAF_CONFIG, or saf.toml in this folder."),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Only this broker or fleet. Default: all brokers."
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Only this broker. Default: all brokers and destinations."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="NAME", help="Name of the broker in saf.toml. Default: the destination."
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
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-01-31T12:00:00Z") from None


Since = Annotated[
    datetime | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Messages created from this time on. Default: all that were not purged.",
    ),
]
Until = Annotated[
    datetime | None,
    typer.Option(
        parser=moment, metavar="TIME", help="Messages created before this time. Default: all."
    ),
]
Limit = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Show at most this many.")]
Before = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Only messages set aside before this time."),
]
After = Annotated[
    str | None,
    typer.Option(
        metavar="END", help="Continue after END, which the previous page has shown, at one broker."
    ),
]
Why = Annotated[str, typer.Option(help="Reason, for the audit, which also records who and when.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List matches without changing them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def routes_of(settings: Settings) -> Callable[[psycopg.Connection[Any]], Routes]:
    """Return a function that returns a broker's current routes, from its rows and saf.toml."""
    default, declared = settings.forwarder.default_destination, settings.declared
    return lambda connection: current_routes(connection, default, declared)


class Round:
    """One visit to each broker, with results and failures."""

    def __init__(self, places: Mapping[str, Broker] | Listing) -> None:
        self.brokers: Mapping[str, Broker]
        self.failed: list[tuple[str, SafError]] = []
        self.interrupted = False
        """True after Ctrl-C during a decision."""
        if isinstance(places, Listing):
            self.brokers, self.failed = places.brokers, list(places.problems)
        else:
            self.brokers = places

    def go_on(self, after: str | None) -> None:
        """Check that a continued page concerns one broker only.

        Raises:
            UsageError: several brokers are chosen.
        """
        if after is not None and len(self.brokers) != 1:
            raise UsageError("--after continues the list of one broker: add --broker NAME")

    def only(self, numbers: object) -> None:
        """Check that rows given by number are searched in one broker only.

        Each broker numbers its rows, so a number is a different row in each.

        Raises:
            UsageError: several brokers are chosen.
        """
        if numbers and len(self.brokers) > 1:
            raise UsageError("numbers are different at each broker: add --broker NAME")

    def visit(self, role: str, action: Callable[[psycopg.Connection[Any], Any], T]) -> dict[str, T]:
        """Connect to the brokers, several in parallel; return the results of ``action`` by broker.

        Brokers where it fails are in ``failed`` instead.
        """
        jobs = self._begin(role, action)
        try:
            return self._results({name: job.result for name, job in jobs.items()})
        except KeyboardInterrupt:
            for job in jobs.values():
                job.cancel()
            raise

    def decide(
        self, role: str, decision: Callable[[psycopg.Connection[Any], Callable[[], bool]], T]
    ) -> dict[str, T]:
        """Run a decision at each broker; like `visit`, but Ctrl-C keeps finished steps.

        The decision gets a connection, and a function to call between two steps: it returns true to
        leave the rest. A second Ctrl-C does not wait for running steps.
        """
        stopping = Event()
        jobs = self._begin(role, lambda connection, _: decision(connection, stopping.is_set))
        try:
            return self._results({name: job.result for name, job in jobs.items()})
        except KeyboardInterrupt:
            stopping.set()
            self.interrupted = True
            echo("saf: stopping after the messages in hand", err=True)
            begun = {name: job.result for name, job in jobs.items() if not job.cancel()}
            return self._results(begun)

    def each(self, action: Callable[[str, Any], T]) -> dict[str, T]:
        """Call ``action`` for one broker after the other; return its results by broker.

        The action opens its own connection. Brokers where it fails are in ``failed`` instead. It
        runs in this thread, so Ctrl-C ends running statements.
        """
        return self._results(
            {name: partial(action, name, broker) for name, broker in self.brokers.items()}
        )

    def _begin(
        self, role: str, action: Callable[[psycopg.Connection[Any], Any], T]
    ) -> dict[str, Future[T]]:
        def connected(name: str, broker: Broker) -> T:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                broker.dsn.connect(role=role, autocommit=True) as connection,
            ):
                check_schema(connection)
                health.require_rows(connection)
                return action(connection, broker)

        threads = Background(AT_ONCE, "saf round")
        jobs = {
            name: threads.submit(partial(connected, name, source))
            for name, source in self.brokers.items()
        }
        threads.dismiss()
        return jobs

    def _results(self, answers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        results: dict[str, T] = {}
        failed: list[tuple[str, SafError]] = []
        for name, answer in answers.items():
            try:
                results[name] = answer()
            except SafError as error:
                if isinstance(error, SchemaMissing) and isinstance(self.brokers[name], Candidate):
                    continue  # the pattern matches this database, which is not a broker
                failed.append((name, error))
        self.failed += failed
        return results

    def errors(self) -> list[dict[str, str]]:
        """Return the failures for JSON."""
        return [{"broker": name, "error": str(error)} for name, error in self.failed]

    def report(
        self,
        answer: Mapping[str, Any],
        show: Callable[[], object],
        *,
        as_json: bool,
        found: int = 0,
    ) -> None:
        """Print an answer as JSON, or ``show`` it to operators; then `finish`."""
        if as_json:
            echo(json.dumps({**answer, "errors": self.errors()}))
        else:
            show()
        self.finish(say=not as_json, found=found)

    def say(
        self,
        answer: Mapping[str, Any],
        lines: Iterable[str],
        *,
        as_json: bool,
        found: int = 0,
    ) -> None:
        """Print an answer as JSON, or lines for operators; then `finish`."""

        def show() -> None:
            for line in lines:
                echo(line)

        self.report(answer, show, as_json=as_json, found=found)

    def show_rows(
        self, key: str, found: Mapping[str, Sequence[T]], table: Table[T], *, as_json: bool
    ) -> None:
        """Print rows as a table, or as JSON under a key; then `finish`."""
        self.report({key: table.plain(found)}, lambda: table.show(found), as_json=as_json)

    def show_pages(
        self, key: str, pages: Mapping[str, Page[T]], table: Table[T], *, as_json: bool
    ) -> None:
        """Print pages as a table, or as JSON under a key; then `finish`."""

        def show() -> None:
            table.show(pages)
            say_next(pages)

        self.report({key: table.plain(pages), "next": ends(pages)}, show, as_json=as_json)

    def finish(self, *, say: bool, found: int = 0) -> None:
        """Print failures, if ``say``, and exit with ``found`` or the failures' code.

        Return if nothing was found and nothing failed.
        """
        for name, error in self.failed:
            if say:
                echo(f"saf: broker {name!r}: {error}", err=True)
        if self.interrupted:
            echo("saf: interrupted: changes not shown as done were not made", err=True)
            raise typer.Exit(INTERRUPTED)
        if found or self.failed:
            raise typer.Exit(found or max(error.exit_code for _, error in self.failed))


Brokers = Annotated[
    Round,
    Options(
        {"config": Config, "broker": Name},
        make=lambda config, broker: Round(chosen(load(config), broker)),
    ),
]
"""The chosen brokers, or all."""
Everywhere = Annotated[
    Round,
    Options(
        {"config": Config, "broker": Where},
        make=lambda config, broker: Round(everywhere(load(config), broker)),
    ),
]
"""The chosen broker, or all brokers and destinations."""
AtStore = Annotated[
    Round,
    Options(
        {"config": Config, "broker": Store},
        make=lambda config, broker: Round(store(load(config), broker)),
    ),
]
"""The chosen MOM store."""
