"""Schedules in a database: added, changed and listed in the caller's transaction.

``conn`` is what `saf.Outbox.send` takes. Nothing here opens or commits a transaction. The role
needs the rights of a writer. If there are rules of `saf sender`, it needs one for the message, now
and at each run.

A message is checked as `saf.Outbox.send` does, and stored as it will be sent, but for the header
`SCHEDULED_FOR`, which each run adds. It is not signed, and has no trace context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args
from uuid import UUID

from saf.errors import ConfigurationError, InvalidMessage, UsageError
from saf.message import CONTENT_TYPE, MAX_NAME, Message, check_text, encode
from saf.schedules.times import Times
from saf.transaction import Entrance, Rows

if TYPE_CHECKING:
    from saf.transaction import Conn

Missed = Literal["none", "one", "all"]
MISSED: tuple[Missed, ...] = get_args(Missed)
Outcome = Literal["added", "changed", "unchanged"]

SCHEDULED_FOR = "scheduled-for"
"""Header of a run's message: the time at which it was due, in ISO 8601, in UTC. Extra runs have
none."""

LOCK = """
SELECT greatest(moment, last_run), cron, every, anchor, zone
FROM saf.lock_schedule(CAST(%(name)s AS text))
"""
MOMENT = "SELECT clock_timestamp()"
TYPES = {
    **{"name": "text", "from_service": "text", "to_service": "text", "to_broker": "uuid"},
    **{"key": "text", "message_type": "text", "headers": "jsonb", "body": "bytea"},
    **{"cron": "text", "every": "interval", "anchor": "timestamptz", "zone": "text"},
    **{"missed": "text", "next_run": "timestamptz", "origin": "text"},
}
"""Arguments of saf.put_schedule, with their PostgreSQL types."""
PUT = "SELECT saf.put_schedule({})".format(
    ", ".join(f"CAST(%({name})s AS {type_})" for name, type_ in TYPES.items())
)
REMOVE = "SELECT saf.remove_schedule(CAST(%(name)s AS text))"
PAUSE = "SELECT saf.pause_schedule(CAST(%(name)s AS text))"
RESUME = """
SELECT saf.resume_schedule(CAST(%(name)s AS text), CAST(%(next_run)s AS timestamptz))
"""
SEND = "SELECT saf.send_schedule(CAST(%(name)s AS text))"
ORIGIN = "SELECT origin FROM saf.schedule WHERE name = CAST(%(name)s AS text)"

# without the messages, which only operators read
SHOWN = (
    *("name", "from_service", "to_service", "message_type", "cron", "every", "anchor", "zone"),
    *("missed", "next_run", "last_run", "skipped", "paused", "refused", "origin", "sender"),
    *("created_at", "changed_at"),
)
LIST = f"""
SELECT {", ".join(SHOWN)} FROM saf.schedule
WHERE CAST(%(name)s AS text) IS NULL OR name = CAST(%(name)s AS text) ORDER BY name
"""
HISTORY = """
SELECT due, at, message_id, skipped FROM saf.schedule_run
WHERE name = CAST(%(name)s AS text) ORDER BY run_id DESC
"""

_enter = Entrance("writer")


class Sent(TypedDict, total=False):
    """What a schedule's message has besides service and body, as in `saf.Outbox.send`."""

    key: str | int | UUID | None
    headers: Mapping[str, Any] | None
    message_type: str | None
    from_service: str | None
    to_broker: UUID | None


class Options(Sent, total=False):
    """When a schedule runs, and what its message has; see `add`."""

    cron: str | None
    every: str | timedelta | None
    zone: str
    anchor: datetime | None
    missed: Missed


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule, without its message."""

    name: str
    from_service: str | None
    to_service: str
    message_type: str | None
    cron: str | None
    every: timedelta | None
    anchor: datetime
    zone: str
    missed: Missed
    next_run: datetime
    """Due time of the next run."""
    last_run: datetime | None
    """Due time of the last run that was sent."""
    skipped: int
    """Number of missed runs that were skipped."""
    paused: bool
    refused: str | None
    """Reason why the due run is not sent, or None."""
    origin: str | None
    """The application that declares it in its code; None: none."""
    sender: str
    """Role that added it, or changed it last."""
    created_at: datetime
    changed_at: datetime

    @property
    def times(self) -> Times:
        """When it runs."""
        return Times(cron=self.cron, every=self.every, anchor=self.anchor, zone=self.zone)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One of a schedule's last 20 runs."""

    due: datetime | None
    """Time at which it was due; if no message was sent, that of the first skipped run; None: an
    extra run."""
    at: datetime
    """Time at which the message was sent, or runs were skipped."""
    message_id: UUID | None
    """Id of the message; None: none was sent."""
    skipped: int
    """Missed runs that were skipped then."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A schedule as it should be, checked and encoded."""

    name: str
    times: Times
    values: Mapping[str, Any]
    """Further arguments of saf.put_schedule."""


def declaration(
    name: str,
    service: str,
    body: object,
    *,
    cron: str | None = None,
    every: str | timedelta | None = None,
    zone: str = "UTC",
    anchor: datetime | None = None,
    missed: Missed = "one",
    **sent: Unpack[Sent],
) -> Declaration:
    """Check a schedule; the arguments are those of `add`.

    Raises:
        UsageError, InvalidMessage: names the value at fault.
    """
    check_name(name)
    if missed not in MISSED:
        raise UsageError(f"missed {missed!r}: expected {', '.join(MISSED)}")
    if any(str(given).lower() == SCHEDULED_FOR for given in sent.get("headers") or ()):
        raise InvalidMessage("headers", f"{SCHEDULED_FOR!r} is set by each run")
    times = Times.of(cron=cron, every=every, anchor=anchor, zone=zone)
    row = encode(Message(service=service, body=body, **sent), traced=False)._asdict()
    values = {column: row[column] for column in TYPES if column in row}
    values |= {"cron": times.cron, "every": times.every, "anchor": times.anchor}
    return Declaration(name=name, times=times, values={**values, "zone": zone, "missed": missed})


def text_headers(body: str) -> dict[str, str]:
    """Return the headers of a body that a user has written: those of JSON, if it is JSON.

    >>> text_headers('{"a": 1}'), text_headers("{a}"), text_headers("1")
    ({'content-type': 'application/json'}, {}, {})
    """
    if body[:1] in ("{", "["):
        try:
            json.loads(body)
        except ValueError:
            return {}
        return {CONTENT_TYPE: "application/json"}
    return {}


def check_name(name: object) -> None:
    """Raise a `UsageError` for a name that no schedule can have."""
    try:
        check_text("name", name, MAX_NAME)
    except InvalidMessage as error:
        raise UsageError(f"schedule {name!r}: {error}") from None
    if not str(name).isprintable():
        raise UsageError(f"schedule {name!r}: expected a name of printable characters")


def add(conn: Conn, name: str, service: str, body: object, **options: Unpack[Options]) -> Outcome:
    """Add a schedule, or give an existing one these values, in the caller's transaction.

    Args:
        conn: the caller's connection.
        name: the schedule's name, unique in the database; up to 255 bytes of UTF-8.
        service, body, key, headers, message_type, from_service, to_broker: the message, as in
            `saf.Outbox.send`. Each run adds the header ``scheduled-for``.
        cron: five fields, minute, hour, day of the month, month, day of the week.
        every: time between runs, instead of ``cron``: ``15m``, ``1h30m``, or a timedelta, of at
            least a second.
        zone: time zone of ``cron``.
        anchor: time from which ``every`` is counted. Default: a Monday, midnight in UTC.
        missed: what happens if several runs are due, because no forwarder was running: ``none``
            skips those of more than 5 minutes ago, and all but the last; ``one`` sends the last,
            and skips the others; ``all`` sends each.

    Returns:
        ``added``, ``changed`` or ``unchanged``. The next run stays, unless its times change.

    Raises:
        UsageError, InvalidMessage: a value cannot be used; names it.
        ConfigurationError: an application declares the schedule; or the role may not do this.
        Errors of `saf.Outbox.send` about the connection and the database.
    """
    return put(conn, declaration(name, service, body, **options))


def put(conn: Conn, declared: Declaration, origin: str | None = None) -> Outcome:
    """Add or change a declared schedule; see `add`."""
    found = _fetch(conn, LOCK, {"name": declared.name})
    moment = found[0][0] if found else _fetch(conn, MOMENT)[0][0]
    params = {
        **declared.values,
        "name": declared.name,
        "next_run": declared.times.after(moment),
        "origin": origin,
    }
    ((outcome,),) = _fetch(conn, PUT, params)
    if outcome == "elsewhere":
        ((other,),) = _fetch(conn, ORIGIN, {"name": declared.name})
        raise ConfigurationError(
            f"schedule {declared.name!r} "
            + (
                f"is declared by {other!r}: change it there"
                if other
                else "was not declared in code"
            )
            + ", use another name, or remove it first"
        )
    return outcome  # type: ignore[no-any-return] # the function's own words


def remove(conn: Conn, name: str) -> bool:
    """Remove a schedule, in the caller's transaction; return False if it does not exist.

    Raises the errors of `add`.
    """
    return _asked(conn, REMOVE, name)


def pause(conn: Conn, name: str) -> bool:
    """Pause a schedule: it sends nothing until it is resumed; False: it does not exist.

    Raises the errors of `add`.
    """
    return _asked(conn, PAUSE, name)


def resume(conn: Conn, name: str) -> bool:
    """Resume a schedule; return False if it does not exist.

    Runs during a pause are not sent, whatever ``missed`` is. A run that was refused is due again.
    Raises the errors of `add`.
    """
    check_name(name)
    found = _fetch(conn, LOCK, {"name": name})
    if not found:
        return False
    ((moment, cron, every, anchor, zone),) = found
    times = Times(cron=cron, every=every, anchor=anchor, zone=zone)
    params = {"name": name, "next_run": times.after(moment)}
    ((done,),) = _fetch(conn, RESUME, params)
    return bool(done)


def run_now(conn: Conn, name: str) -> UUID | None:
    """Send the message of a schedule in an extra run; return its id, None without the schedule.

    The scheduled runs stay as they are. The message has no header ``scheduled-for``.
    Raises the errors of `add`.
    """
    check_name(name)
    ((message_id,),) = _fetch(conn, SEND, {"name": name})
    return None if message_id is None else UUID(str(message_id))


def listed(conn: Conn, name: str | None = None) -> list[Schedule]:
    """Return the schedules of a database, sorted by name; with ``name``, only this schedule."""
    return [
        Schedule(**dict(zip(SHOWN, row, strict=True)))
        for row in _fetch(conn, LIST, {"name": name}, only_reads=True)
    ]


def history(conn: Conn, name: str) -> list[Run]:
    """Return the last 20 runs of a schedule, latest first."""
    return [
        Run(due=due, at=at, message_id=message_id, skipped=skipped)
        for due, at, message_id, skipped in _fetch(conn, HISTORY, {"name": name}, only_reads=True)
    ]


def _asked(conn: Conn, statement: str, name: str) -> bool:
    check_name(name)
    ((done,),) = _fetch(conn, statement, {"name": name})
    return bool(done)


def _fetch(
    conn: Conn,
    statement: str,
    params: Mapping[str, Any] | None = None,
    *,
    only_reads: bool = False,
) -> Rows:
    transaction = _enter(conn, allow_autocommit=only_reads)
    with _enter.with_right(transaction):
        return transaction.fetch(statement, params)
