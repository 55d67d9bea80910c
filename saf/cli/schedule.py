"""``saf schedule``: messages that are sent again and again, from a source, by any forwarder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import psycopg
import typer

from saf.cli.brokers import AsJson, Brokers, Commands, Round, Why, zoned
from saf.cli.console import Listing, Table
from saf.config import did_you_mean
from saf.database import fetch
from saf.errors import ConfigurationError, UsageError
from saf.operating.wording import counted
from saf.schedules import stored
from saf.schedules.stored import Missed, Run, Schedule, declaration, put, text_headers
from saf.schedules.times import in_units, zone_named
from saf.setaside.audit import audit

app = Commands(help="Schedules: messages that are sent again and again.")

ROLE = "schedule"
NEXT = 5
"""Number of next runs that `show` shows."""
MOMENT = "SELECT clock_timestamp()"
SIZE = "SELECT length(body), headers ->> 'content-type' FROM saf.schedule WHERE name = %(name)s"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]


@app.command()
def add(
    name: Name,
    *,
    service: Annotated[str, typer.Option(metavar="NAME", help="Service that gets the messages.")],
    cron: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Times of runs: minute, hour, day of the month, month, day of the week.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time between runs, e.g. 30s, 15m, 1h30m, 1d."),
    ] = None,
    zone: Annotated[
        str, typer.Option(metavar="ZONE", help="Time zone of --cron, e.g. Europe/Berlin.")
    ] = "UTC",
    anchor: Annotated[
        datetime | None,
        typer.Option(
            parser=zoned,
            metavar="TIME",
            help="Time from which --every counts. Default: a Monday, 00:00 UTC.",
        ),
    ] = None,
    body: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Body: JSON, if it is an object or a list, else text."),
    ] = "",
    key: Annotated[str | None, typer.Option(help="Key of the messages. Default: none.")] = None,
    message_type: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Type of the messages.")
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Header of the messages; may be repeated."),
    ] = None,
    from_service: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME", help="Sender in the messages. Default: none."),
    ] = None,
    missed: Annotated[
        Missed,
        typer.Option(help="Missed runs: skip them all, send the last one, or send all."),
    ] = "one",
    why: Why = "",
    round_: Brokers,
) -> None:
    """Add a schedule, or give an existing one these values.

    A forwarder of the source sends one message for each run. An existing schedule keeps its next
    run, unless its times change.
    """
    declared = declaration(
        name,
        service,
        body,
        cron=cron,
        every=every,
        zone=zone,
        anchor=anchor,
        missed=missed,
        key=key,
        headers=headers_of(body, header or ()),
        message_type=message_type,
        from_service=from_service,
    )

    def change(connection: psycopg.Connection[Any]) -> tuple[str, Schedule]:
        with connection.transaction():
            outcome = put(connection, declared)
            if outcome != "unchanged":
                audit(connection, f"{VERBS[outcome]} schedule {name}", [], why)
            return outcome, _stored(connection, name)

    round_.tell(
        ROLE, change, lambda done: f"schedule {name!r} {done[0]}, next run {_next(done[1])}"
    )


VERBS = {"added": "add", "changed": "change"}


def headers_of(body: str, given: Iterable[str]) -> dict[str, str]:
    """Return the headers of a text body and of options.

    >>> headers_of("[1]", ["a=b=c"])
    {'content-type': 'application/json', 'a': 'b=c'}

    Raises:
        UsageError: an option is not NAME=VALUE.
    """
    headers = text_headers(body)
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"--header {text!r}: expected NAME=VALUE")
        headers[name] = value
    return headers


@app.command("list")
def list_(*, round_: Brokers, as_json: AsJson = False) -> None:
    """List schedules, with the next run in the schedule's time zone."""
    round_.show_rows(ROLE, stored.listed, "schedules", SCHEDULES, as_json=as_json)


@dataclass(frozen=True)
class Shown:
    """What `show` shows of a schedule."""

    schedule: Schedule
    runs: list[Run]
    next_runs: list[datetime]
    size: int
    content_type: str | None


@app.command()
def show(name: Name, *, round_: Brokers, as_json: AsJson = False) -> None:
    """Show a schedule, its next runs, and its last ones; not its body."""

    def look(connection: psycopg.Connection[Any]) -> Shown:
        with connection.transaction():
            schedule = _stored(connection, name)
            runs = stored.history(connection, name)
            ((now,),) = fetch(connection, MOMENT)
            ((size, content_type),) = fetch(connection, SIZE, {"name": name})
        following: list[datetime] = []
        if not schedule.paused:
            after = schedule.times.next_runs(max(schedule.next_run, now), NEXT - 1)
            following = [schedule.next_run, *after]
        return Shown(schedule, runs, following, size, content_type)

    found = round_.visit(ROLE, look)

    def say() -> None:
        for where, shown in found.items():
            _lines(where, shown).show()
            HISTORY.show_rows(shown.runs)

    rows = [{"broker": where, **_shown(shown)} for where, shown in found.items()]
    round_.report({"schedules": rows}, say, as_json=as_json)


@dataclass(frozen=True)
class Decision:
    """What an operator decides about a schedule."""

    verb: str
    action: Callable[[psycopg.Connection[Any], str], object]
    words: Callable[[Schedule], str]
    """Describes the decision, given the schedule afterwards."""


@app.command()
def pause(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Pause a schedule: it sends nothing until it is resumed."""
    _decide(round_, name, Decision("pause", stored.pause, lambda _: "paused"), why)


@app.command()
def resume(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Resume a schedule after a pause or a refusal.

    Runs during a pause are not sent. A run that was refused is due again.
    """
    _decide(round_, name, RESUME, why)


@app.command()
def run(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Send the message now, in an extra run.

    The scheduled runs stay as they are.
    """

    def send(connection: psycopg.Connection[Any]) -> UUID:
        with connection.transaction():
            message_id = stored.run_now(connection, name)
            if message_id is None:
                raise _unknown(connection, name)
            audit(connection, f"run schedule {name}", [message_id], why)
        return message_id

    round_.tell(ROLE, send, lambda message_id: f"schedule {name!r} has sent message {message_id}")


@app.command()
def remove(name: Name, *, why: Why = "", round_: Brokers) -> None:
    """Remove a schedule, with the history of its runs.

    Messages that were sent stay.
    """
    _decide(round_, name, Decision("remove", stored.remove, lambda _: "removed"), why)


RESUME = Decision("resume", stored.resume, lambda now: f"resumed, next run {_next(now)}")


def _decide(round_: Round, name: str, decision: Decision, why: str) -> None:
    def decide(connection: psycopg.Connection[Any]) -> str:
        with connection.transaction():
            before = _stored(connection, name)
            decision.action(connection, name)
            audit(connection, f"{decision.verb} schedule {name}", [], why)
            return decision.words(next(iter(stored.listed(connection, name)), before))

    round_.tell(ROLE, decide, lambda words: f"schedule {name!r} {words}")


def _stored(connection: psycopg.Connection[Any], name: str) -> Schedule:
    found = stored.listed(connection, name)
    if not found:
        raise _unknown(connection, name)
    return found[0]


def _unknown(connection: psycopg.Connection[Any], name: str) -> ConfigurationError:
    names = [schedule.name for schedule in stored.listed(connection)]
    known = ", ".join(map(repr, names)) or "none"
    return ConfigurationError(f"no schedule {name!r}{did_you_mean(name, names)}, only {known}")


def _local(schedule: Schedule, at: datetime) -> str:
    """Return a time in the schedule's zone."""
    try:
        zone = zone_named(schedule.zone)
    except UsageError:  # unknown on this machine
        return at.astimezone(UTC).isoformat(sep=" ")
    return at.astimezone(zone).isoformat(sep=" ", timespec="seconds")


def _next(schedule: Schedule) -> str:
    if schedule.paused:
        return "none: it is paused"
    return _local(schedule, schedule.next_run)


def _times(schedule: Schedule) -> str:
    if schedule.every is not None:
        return f"every {in_units(schedule.every)}"
    return f"{schedule.cron} {schedule.zone}"


def _state(schedule: Schedule) -> str:
    if schedule.paused:
        return "paused"
    return "active" if schedule.refused is None else "refused"


def _plain(row: Schedule | Run) -> dict[str, Any]:
    return {name: _json(getattr(row, name)) for name in row.__dataclass_fields__}


def _json(value: object) -> object:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, UUID) else value


SCHEDULES = Table[Schedule](
    *("name", "service", "times", "next run", "last run", "missed", "skipped", "state", "from"),
    things="schedules",
    below="refused because",
    cells=lambda row: (
        row.name, row.to_service, _times(row),
        "" if row.paused else _local(row, row.next_run),
        "" if row.last_run is None else _local(row, row.last_run),
        row.missed, f"{row.skipped:,}", _state(row), row.origin or "", row.refused or "",
    ),
    plain=_plain,
)  # fmt: skip
HISTORY = Table[Run](
    *("due", "at", "message", "skipped"),
    things="runs yet",
    cells=lambda row: (
        "extra" if row.due is None else f"{row.due.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}",
        f"{row.at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}",
        "" if row.message_id is None else str(row.message_id),
        f"{row.skipped:,}",
    ),
    plain=_plain,
)


def _shown(shown: Shown) -> Mapping[str, Any]:
    return {
        **_plain(shown.schedule),
        "body_bytes": shown.size,
        "content_type": shown.content_type,
        "next_runs": [_json(at) for at in shown.next_runs],
        "runs": [_plain(run) for run in shown.runs],
    }


def _lines(where: str, shown: Shown) -> Listing:
    listing = Listing("", where)
    for title, text in _details(shown):
        if text:
            listing.add(title, text)
    return listing


def _details(shown: Shown) -> Iterator[tuple[str, str]]:
    schedule = shown.schedule
    yield "schedule", schedule.name
    yield "state", _state(schedule)
    yield "refused because", schedule.refused or ""
    yield "times", _times(schedule)
    yield "to", schedule.to_service
    yield "sent by", schedule.from_service or ""
    yield "type", schedule.message_type or ""
    yield "body", f"{counted(shown.size, 'byte')}, {shown.content_type}"
    yield "missed runs", f"{schedule.missed}; {schedule.skipped:,} skipped"
    yield "declared by", schedule.origin or ""
    yield "role", schedule.sender
    for number, at in enumerate(shown.next_runs):
        yield "" if number else "next runs", _local(schedule, at)
