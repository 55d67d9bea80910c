"""Options of commands that visit the brokers in saf.toml, and the visit itself, which is a `Round`.

Some options together make one argument of a command, and commands that choose the same things share
them, as `Options`. A command names them in the annotation of that argument:

    DEAD = Options({"reason": Reason, "service": Service}, make=Filter)

    app = Commands(help="Messages that need an operator's decision.")

    @app.command()
    def retry(*, round_: Brokers, criteria: Annotated[Filter, DEAD], why: Why = "") -> None: ...

    saf dead retry --reason expired --why "…"
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import psycopg
import typer
from typer.core import TyperGroup

from saf.broker import health
from saf.cli.alive import answered, waiting
from saf.cli.console import Table, complain, echo, ends, say_next
from saf.config import Broker, Settings, load, table_named
from saf.database import check_schema, unavailable_if_lost
from saf.database.background import Background
from saf.database.queries import Page
from saf.destinations.settings import DestinationSettings
from saf.errors import SafError, SchemaMissing, UsageError
from saf.operating.places import Candidate, Listing, chosen, everywhere, store, stores
from saf.operating.wording import MOST_PLACES
from saf.routing.matching import Routes
from saf.routing.routes import current_routes
from saf.signals import INTERRUPTED


@dataclass(frozen=True)
class Options:
    """Options by name, as Typer's annotations; ``make`` takes them all.

    Those that may be None default to None, and flags to False.
    """

    types: Mapping[str, Any]
    make: Callable[..., Any]


PANELS = SET_UP, RUN, LOOK, DECIDE, REPAIR = "Set up", "Run", "Look", "Decide", "Repair"
"""The panels of commands in `saf --help`, in their order."""


class Panels(TyperGroup):
    """A group whose help lists its commands by their panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer's form
        """Write a section for each panel; commands without a panel are in the section Commands."""
        panels: dict[str, list[tuple[str, Any]]] = {panel: [] for panel in PANELS}
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((name, command))
        for panel, rows in panels.items():
            if rows:
                room = formatter.width - GAPS - max(len(name) for name, _ in rows)
                with formatter.section(panel):
                    formatter.write_dl(
                        [(name, command.get_short_help_str(room)) for name, command in rows]
                    )


GAPS = 4
"""Characters before the names of commands, and between them and their texts."""


class Commands(typer.Typer):
    """A group of commands, whose arguments may be groups of options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Panels, "no_args_is_help": True, **options})

    def command(self, *given: Any, **options: Any) -> Callable[[Callable[..., None]], Any]:
        """Add a command, as Typer does; return the function unchanged."""
        add = super().command(*given, **options)

        def added(command: Callable[..., None]) -> Callable[..., None]:
            add(grouped(command))
            return command

        return added


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer, which has the options of each group in place of its argument.

    >>> from typing import Annotated
    >>> types = {"folder": Annotated[str, "…"], "file": Annotated[str | None, "…"]}
    >>> PATH = Options(types, make="{folder}/{file}".format)
    >>> shown = []
    >>> def show(*, path: Annotated[str, PATH], twice: bool = False) -> None: shown.append(path)
    >>> options = inspect.signature(grouped(show)).parameters
    >>> {name: option.default is option.empty for name, option in options.items()}
    {'folder': True, 'file': False, 'twice': False}
    >>> grouped(show)(folder="etc", file="saf.toml")
    >>> shown
    ['etc/saf.toml']
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Options] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        options = next((extra for extra in get_args(hint)[1:] if isinstance(extra, Options)), None)
        if options is None:
            parameters.append(parameter.replace(annotation=hint))
            continue
        groups[parameter.name] = options
        parameters += [
            inspect.Parameter(name, parameter.kind, default=_default(type_), annotation=type_)
            for name, type_ in options.types.items()
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for argument, options in groups.items():
            given[argument] = options.make(**{name: given.pop(name) for name in options.types})
        command(**given)

    del run.__wrapped__  # Typer would take the annotations from there
    run.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # it may be set
    return run


def _default(type_: Any) -> Any:
    """Return None or False if the type of an option permits it; otherwise it is required."""
    of = get_args(type_)[0]
    if of is bool:
        return False
    return None if NoneType in get_args(of) else inspect.Parameter.empty


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
        "--broker", metavar="NAME", help="Only this broker or fleet. Default: all sources."
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="NAME",
        help="Only this broker or fleet. Default: all sources and stores.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="NAME",
        help="Name of the store in saf.toml. Default: the only one.",
    ),
]

OneStore = Annotated[
    str | None,
    typer.Option("--broker", metavar="NAME", help="Only this broker. Default: all stores."),
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


def zoned(text: str) -> datetime:
    """Return a point in time, like `moment`, of a text that must have an offset.

    >>> zoned("2026-01-31T13:00Z").timestamp()
    1769864400.0
    """
    found = moment(text)
    given = datetime.fromisoformat(text)
    if given.utcoffset() is None:
        raise typer.BadParameter(
            f"{text!r} has no time zone: {given.isoformat()}Z in UTC, or {found.isoformat()} in "
            "the zone of this machine"
        )
    return found


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Return a duration in seconds.

    >>> duration("7d"), duration("12h"), duration("1.5m"), duration("0")
    (604800.0, 43200.0, 90.0, 0.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 7d, 12h, 30m, 90s or 0")
    return float(match[1]) * UNITS[match[2]]


def with_unit(text: str) -> float:
    """Return a duration in seconds, like `duration`, of a text that must have a unit, or be 0."""
    seconds = duration(text)
    if seconds and text[-1] not in UNITS:
        raise typer.BadParameter(
            f"{text!r} has no unit: {text}s, {text}m, {text}h or {text}d (seconds, minutes, hours, "
            "days)"
        )
    return seconds


Since = Annotated[
    datetime | None,
    typer.Option(
        parser=moment,
        metavar="TIME",
        help="Only messages created from this time on. Default: all that were not purged.",
    ),
]
Until = Annotated[
    datetime | None,
    typer.Option(
        parser=moment, metavar="TIME", help="Only messages created before this time. Default: all."
    ),
]
Limit = Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Rows per broker, at most.")]
Before = Annotated[
    datetime | None,
    typer.Option(parser=moment, metavar="TIME", help="Only messages set aside before this time."),
]
After = Annotated[
    str | None,
    typer.Option(
        metavar="END", help="Next page, after the END that the page before shows; one broker only."
    ),
]
Why = Annotated[str, typer.Option(help="Reason, for the audit, which also records who and when.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask. Required without a terminal.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List matches without changing them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


def named(settings: Settings, destination: str) -> DestinationSettings:
    """Return the settings of a destination in saf.toml.

    Raises:
        ConfigurationError: no destination has this name.
    """
    return table_named(settings.destinations, "destinations", destination)


def routes_of(settings: Settings) -> Callable[[psycopg.Connection[Any]], Routes]:
    """Return a function that returns a broker's current routes, from its rows and saf.toml."""
    default, declared = settings.forwarder.default_destination, settings.declared
    return lambda connection: current_routes(connection, default, declared)


class Round:
    """One visit to each broker, with results and failures."""

    def __init__(self, places: Mapping[str, Broker] | Listing, settings: Settings) -> None:
        self.settings = settings
        self.brokers: Mapping[str, Broker]
        self.failed: list[tuple[str, SafError]] = []
        self.others: Sequence[str] = ()
        """Stores that are not visited, because the command concerns sources."""
        self._said = 0
        """How many failures were printed."""
        self.interrupted = False
        """True after Ctrl-C during a decision."""
        if isinstance(places, Listing):
            self.brokers, self.failed = places.brokers, list(places.problems)
            self.others = places.others
        else:
            self.brokers = places

    def among(self, names: Iterable[str]) -> Round:
        """Return a round of some of these brokers."""
        return Round({name: self.brokers[name] for name in names}, self.settings)

    def answering(self, names: Iterable[str]) -> Round:
        """Return a round of brokers that have answered; it keeps the failures of the others."""
        round_ = self.among(names)
        round_.failed, round_._said = self.failed, self._said
        return round_

    def go_on(self, after: str | None) -> None:
        """Check that a continued page concerns one broker only.

        Raises:
            UsageError: several brokers are chosen.
        """
        if after is not None and len(self.brokers) != 1:
            raise UsageError(f"--after continues the list of one broker: add {self._narrower()}")

    def only(self, numbers: object) -> None:
        """Check that rows given by number are searched in one broker only.

        Each broker numbers its rows, so a number is a different row in each.

        Raises:
            UsageError: several brokers are chosen.
        """
        if numbers and len(self.brokers) > 1:
            raise UsageError(f"numbers are different at each broker: add {self._narrower()}")

    def _narrower(self) -> str:
        """Return the option that chooses one of the brokers, in words."""
        names = [*self.brokers]
        named = f" with one of {', '.join(names)}" if len(names) <= MOST_PLACES else " NAME"
        return f"--broker{named}"

    def visit(self, role: str, action: Callable[[psycopg.Connection[Any]], T]) -> dict[str, T]:
        """Connect to the brokers, several in parallel; return the results of ``action`` by broker.

        Brokers where it fails are in ``failed`` instead.
        """
        return self.visit_each(role, dict.fromkeys(self.brokers, action))

    def visit_each(
        self, role: str, actions: Mapping[str, Callable[[psycopg.Connection[Any]], T]]
    ) -> dict[str, T]:
        """Connect to brokers, by name, with a separate action for each; otherwise like `visit`."""
        jobs = self._begin(role, actions)
        try:
            with waiting(lambda: _left(jobs)):
                return self._results({name: job.result for name, job in jobs.items()})
        except KeyboardInterrupt:
            for job in jobs.values():
                job.cancel()
            raise

    def decide(
        self,
        role: str,
        decisions: Mapping[str, Callable[[psycopg.Connection[Any], Callable[[], bool]], T]],
    ) -> dict[str, T]:
        """Run a decision at each of some brokers; like `visit_each`, but Ctrl-C keeps done steps.

        A decision gets a connection, and a function to call between two steps: it returns true to
        leave the rest. A second Ctrl-C does not wait for running steps.
        """
        stopping = Event()

        def stoppable(
            decide: Callable[[psycopg.Connection[Any], Callable[[], bool]], T],
        ) -> Callable[[psycopg.Connection[Any]], T]:
            return lambda connection: decide(connection, stopping.is_set)

        jobs = self._begin(role, {name: stoppable(decide) for name, decide in decisions.items()})
        try:
            with waiting(lambda: _left(jobs)):
                return self._results({name: job.result for name, job in jobs.items()})
        except KeyboardInterrupt:
            stopping.set()
            self.interrupted = True
            complain("stopping after the messages in hand")
            begun = {name: job.result for name, job in jobs.items() if not job.cancel()}
            return self._results(begun)

    def each(self, action: Callable[[str, Any], T]) -> dict[str, T]:
        """Call ``action`` for one broker after the other; return its results by broker.

        The action opens its own connection. Brokers where it fails are in ``failed`` instead. It
        runs in this thread, so Ctrl-C ends running statements.
        """
        left = [*self.brokers]

        def one(name: str) -> T:
            try:
                return action(name, self.brokers[name])
            finally:
                left.remove(name)

        with waiting(lambda: answered(len(self.brokers) - len(left), left, "broker")):
            return self._results({name: partial(one, name) for name in self.brokers})

    def _begin(
        self, role: str, actions: Mapping[str, Callable[[psycopg.Connection[Any]], T]]
    ) -> dict[str, Future[T]]:
        def connected(name: str, action: Callable[[psycopg.Connection[Any]], T]) -> T:
            with (
                unavailable_if_lost(f"broker {name!r}"),
                self.brokers[name].dsn.connect(role=role, autocommit=True) as connection,
            ):
                check_schema(connection)
                health.require_rows(connection)
                return action(connection)

        threads = Background(AT_ONCE, "saf round")
        jobs = {
            name: threads.submit(partial(connected, name, action))
            for name, action in actions.items()
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
            self.say_failures()
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

    def tell(
        self,
        role: str,
        action: Callable[[psycopg.Connection[Any]], T],
        words: Callable[[T], str | Sequence[str]],
    ) -> None:
        """Change the brokers, and print what was done at each, in a line or several; `finish`."""
        results = self.visit(role, action)
        self.say_failures()
        for name, result in results.items():
            told = words(result)
            for line in [told] if isinstance(told, str) else told:
                echo(f"{name}: {line}")
        self.finish(say=True)

    def show_rows(
        self,
        role: str,
        rows: Callable[[psycopg.Connection[Any]], Sequence[T]],
        key: str,
        table: Table[T],
        *,
        as_json: bool,
    ) -> None:
        """Print the rows of each broker as a table, or as JSON under a key; then `finish`."""
        found = self.visit(role, rows)
        self.report(
            {key: table.plain(found)},
            lambda: table.show(found, others=self.others),
            as_json=as_json,
        )

    def show_pages(
        self,
        role: str,
        page: Callable[[psycopg.Connection[Any]], Page[T]],
        key: str,
        table: Table[T],
        *,
        as_json: bool,
        matching: bool = False,
    ) -> None:
        """Print a page of each broker as a table, or as JSON under a key; then `finish`.

        ``matching``: a filter chose the rows.
        """
        pages = self.visit(role, page)

        def show() -> None:
            table.show(pages, matching=matching)
            say_next(pages)

        self.report({key: table.plain(pages), "next": ends(pages)}, show, as_json=as_json)

    def say_failures(self, *, as_json: bool = False) -> None:
        """Print failures that were not printed yet, unless the answer is JSON, which has them."""
        if not as_json:
            for name, error in self.failed[self._said :]:
                complain(of_broker(name, str(error)))
            self._said = len(self.failed)

    def finish(self, *, say: bool, found: int = 0) -> None:
        """Print failures, if ``say``, and exit with ``found`` or the failures' code.

        Return if nothing was found and nothing failed.
        """
        self.say_failures(as_json=not say)
        if self.interrupted:
            complain("interrupted: changes not shown as done were not made")
            raise typer.Exit(INTERRUPTED)
        if found or self.failed:
            raise typer.Exit(found or max(error.exit_code for _, error in self.failed))


def of_broker(name: str, problem: str) -> str:
    """Return a problem that names its broker once.

    >>> of_broker("shop", "broker 'shop' is unavailable"), of_broker("shop", "it is down")
    ("broker 'shop' is unavailable", "broker 'shop': it is down")
    """
    where = f"broker {name!r}"
    return problem if problem.startswith(f"{where} ") else f"{where}: {problem}"


def _left(jobs: Mapping[str, Future[Any]]) -> str:
    """Return how many brokers have answered, and which have not."""
    left = [name for name, job in jobs.items() if not job.done()]
    return answered(len(jobs) - len(left), left, "broker")


Find: TypeAlias = Callable[[Settings, str | None], Mapping[str, Broker] | Listing]


def round_at(find: Find, config: Path | None, broker: str | None) -> Round:
    """Return a round of the brokers that ``find`` returns, of a saf.toml and an option."""
    settings = load(config)
    with waiting("asking the fleets for their brokers"):
        return Round(find(settings, broker), settings)


def _round(find: Find, option: Any) -> Options:
    return Options({"config": Config, "broker": option}, make=partial(round_at, find))


Brokers = Annotated[Round, _round(chosen, Name)]
"""The chosen brokers, or all sources: for what concerns the forwarder."""
Everywhere = Annotated[Round, _round(everywhere, Where)]
"""The chosen brokers, or all sources and stores: for all lists, and for decisions about them."""
AtStore = Annotated[Round, _round(store, Store)]
"""The chosen store; it may be left out if there is only one."""
AtStores = Annotated[Round, _round(stores, OneStore)]
"""The chosen store, or all."""
