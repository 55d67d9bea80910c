"""Held messages, as operators list, count and decide about them.

A held message is due later, or refused: no rule of its sender allowed it when it was due
(`saf.sending.held`). It is in no log yet. Operators `cancel` it, which loses it; `reschedule` it;
or `move` a refused one, so that the next forwarder tries again to move it to the outbox.
`saf.operating.decide` makes these decisions in chunks, and records them in the audit.

`HeldMessages` chooses held messages in the way of `saf.setaside.selection`. They are decided about
in the order of their numbers, as they were first sent. Lists have them in the order in which they
are due. A decision skips messages that another transaction has locked, such as that of a sender who
replaces one, or of a forwarder that moves it. A signed message without a name cannot be
rescheduled, because its signature covers its time; nor can a message that expires before then.

A name is known for longer than its message is held. `named` returns the messages with a name, held
or sent. All only read, except for `LockedHeld`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self, get_args
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.database.queries import Page, foreign, page_of, records
from saf.limits import HEADERS_READABLE
from saf.operating.wording import age, at
from saf.setaside.dead import SHOWN
from saf.setaside.selection import Selection, SetAside

State = Literal["held", "overdue", "refused"]
STATES: tuple[State, ...] = get_args(State)

STATE = """
CASE WHEN h.refused IS NOT NULL THEN 'refused'
     WHEN h.due <= clock_timestamp() THEN 'overdue' ELSE 'held' END"""

# The table also has the names of sent messages, which may be many more
TABLE = """(
    SELECT * FROM saf.held WHERE due IS NOT NULL AND refused IS NULL
    UNION ALL SELECT * FROM saf.held WHERE refused IS NOT NULL) AS h"""
FILTER = f"""
      (%(numbers)s::bigint[] IS NULL OR held_id = ANY (%(numbers)s))
  AND (%(message_id)s::uuid IS NULL OR message_id = %(message_id)s)
  AND (%(service)s::text IS NULL OR to_service = %(service)s)
  AND (%(name)s::text IS NULL OR name = %(name)s)
  AND (%(name_contains)s::text IS NULL OR strpos(lower(name), lower(%(name_contains)s)) > 0)
  AND (%(key)s::text IS NULL OR key = %(key)s)
  AND (%(key_contains)s::text IS NULL OR strpos(lower(key), lower(%(key_contains)s)) > 0)
  AND (%(before)s::timestamptz IS NULL OR due < %(before)s)
  AND (%(state)s::text IS NULL OR {STATE} = %(state)s)
  AND (%(after_due)s::timestamptz IS NULL
       OR CASE WHEN %(newest_first)s THEN (due, held_id) < (%(after_due)s, %(after)s)
               ELSE (due, held_id) > (%(after_due)s, %(after)s) END)
  AND (%(beyond)s::bigint IS NULL OR held_id > %(beyond)s)
  AND (%(through)s::bigint IS NULL OR held_id <= %(through)s)
"""
CHOSEN = f"FROM {{table}} WHERE {FILTER}"
COLUMNS = f"""
held_id, message_id, left(from_service, {SHOWN}) AS from_service,
       left(to_service, {SHOWN}) AS service, name, due,
       extract(epoch FROM due - clock_timestamp())::float AS due_in_seconds, {STATE} AS state,
       sender, refused, left(key, {SHOWN}) AS key, left(message_type, {SHOWN}) AS message_type,
       octet_length(body) AS bytes, created_at, expires_at"""
# Each part has a limit of its own, so that the first is read in the order of its index
LIST = f"""
SELECT {COLUMNS}, {{stays}} AS stays
FROM ((SELECT * FROM saf.held h WHERE due IS NOT NULL AND refused IS NULL AND {FILTER}
       ORDER BY due $order, held_id $order LIMIT %(limit)s)
      UNION ALL
      (SELECT * FROM saf.held h WHERE refused IS NOT NULL AND {FILTER}
       ORDER BY due $order, held_id $order LIMIT %(limit)s)) AS h
ORDER BY due $order, held_id $order LIMIT %(limit)s
"""
# A sender who replaces a message gives it another id, so the lock finds what was chosen, or nothing
LOCK = """
WITH chosen AS MATERIALIZED (
    SELECT message_id {chosen} AND ({stays}) IS NULL ORDER BY held_id LIMIT %(limit)s)
SELECT h.held_id, h.message_id, h.name FROM saf.held h JOIN chosen USING (message_id)
WHERE h.due IS NOT NULL ORDER BY h.held_id FOR UPDATE OF h SKIP LOCKED
"""
# A transaction that has locked a row is the row's xmax, and has locked its own number. The number
# of a savepoint that was released is not found. Only roles with pg_read_all_stats see the begin.
HOLDER = """
LEFT JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = h.xmax AND l.granted
     AND l.mode = 'ExclusiveLock'
LEFT JOIN pg_stat_activity a ON a.pid = l.pid"""
HOLDS = """
l.pid, nullif(a.application_name, '') AS application,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float AS open_seconds"""
LOCKED = f"""
WITH chosen AS MATERIALIZED (SELECT message_id {{chosen}} AND ({{stays}}) IS NULL)
SELECT left(h.to_service, {SHOWN}) AS service, h.name, h.message_id, {HOLDS}
FROM saf.held h JOIN chosen USING (message_id) {HOLDER}
WHERE h.message_id NOT IN (SELECT unnest(%(decided)s::uuid[]))
ORDER BY h.due, h.held_id LIMIT %(limit)s
"""
CHANGE = """
UPDATE saf.held SET due = coalesce(%(to)s::timestamptz, due), refused = NULL
WHERE message_id = ANY (%(message_ids)s)
"""
DELETE = "DELETE FROM saf.held WHERE message_id = ANY (%(message_ids)s)"

ONE = f"""
SELECT {COLUMNS}, NULL AS stays, to_broker::text,
       CASE WHEN {HEADERS_READABLE} THEN headers::text END AS headers
FROM saf.held h WHERE message_id = %(message_id)s AND due IS NOT NULL
"""
BODY = "SELECT body FROM saf.held WHERE message_id = %(message_id)s AND due IS NOT NULL"
NAMED = """
SELECT to_service AS service, name, message_id, due, refused, forget_at - once_for AS sent_at,
       forget_at
FROM saf.held
WHERE name = %(name)s AND (%(service)s::text IS NULL OR to_service = %(service)s)
ORDER BY to_service LIMIT 100
"""
CANCELLED = """
SELECT m.name, m.message_id, a.audit_at, a.who, a.person, a.why
FROM saf.audit a CROSS JOIN LATERAL unnest(a.names, a.message_ids) AS m (name, message_id)
WHERE a.action = 'cancel' AND a.names @> ARRAY[%(name)s::text] AND m.name = %(name)s
ORDER BY a.audit_id DESC LIMIT 20
"""
COUNTS = """
SELECT (SELECT count(*) FROM saf.held WHERE due IS NOT NULL AND refused IS NULL) AS messages,
       (SELECT min(due) FROM saf.held WHERE due IS NOT NULL AND refused IS NULL) AS next_due,
       (SELECT count(*) FROM saf.held
        WHERE due <= clock_timestamp() AND due IS NOT NULL AND refused IS NULL) AS overdue,
       (SELECT count(*) FROM saf.held WHERE refused IS NOT NULL) AS refused,
       clock_timestamp() AS now
"""

PLACE = re.compile(r"(-?[0-9]{1,18})\.([0-9]{1,18})")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class HeldMessage(SetAside):
    """One held message, without its body."""

    held_id: int
    message_id: UUID
    from_service: str | None
    service: str
    name: str | None
    due: datetime
    due_in_seconds: float
    """Seconds until it is due; below 0 if it is overdue."""
    state: State
    sender: str
    """The role that sent it."""
    refused: str | None
    """Why it was not moved when it was due; None if it was not refused."""
    key: str | None
    message_type: str | None
    bytes: int
    created_at: datetime
    expires_at: datetime | None
    stays: str | None = None
    """Why it cannot be rescheduled, one of `saf.setaside.selection.WHY`; None: it can be."""

    @property
    def error(self) -> str | None:
        """Like ``refused``, as other messages have it."""
        return self.refused

    @property
    def called(self) -> str:
        """Its name, or else its key or its id."""
        return self.name or super().called


@dataclass(frozen=True, kw_only=True)
class HeldDetails(HeldMessage):
    """All of one held message except its body."""

    to_broker: str | None
    headers: str | None
    """As JSON text; None also if they are too large to be read."""

    conversation_id = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        plain = super().as_dict()
        if self.headers is not None:
            with suppress(ValueError, RecursionError):  # as text if Python cannot decode them
                plain["headers"] = json.loads(self.headers)
        return plain


@dataclass(frozen=True, kw_only=True)
class HeldMessages(Selection[HeldMessage]):
    """Which held messages to choose; None means any. ``before`` is compared with ``due``."""

    message_id: UUID | None = None
    name: str | None = None
    name_contains: str | None = None
    """A part of the name, case-insensitive."""
    state: str | None = None
    """One of `STATES`."""
    after_due: datetime | None = None
    """With ``after``, the last message of the previous page."""

    WORD, COMMAND, LISTED_BY = "held message", "saf held", "list"
    DECISIONS = ("cancel", "reschedule", "move")
    ROW = HeldMessage
    TABLE = TABLE
    NUMBER, SINCE = "held_id", "due"
    COLUMNS, CRITERIA = "", ""
    # see saf.pass_on; ``to`` is the time of a rescheduling, or NULL
    STAYS = """
CASE WHEN %(to)s::text IS NOT NULL AND name IS NULL AND headers ? 'saf-signature' THEN 'signed'
     WHEN expires_at <= CAST(%(to)s::text AS timestamptz) THEN 'expires' END"""
    CHOSEN, LIST = CHOSEN, LIST

    def page(
        self, connection: psycopg.Connection[Any], limit: int | None, *, to: str | None = None
    ) -> Page[HeldMessage]:
        """Return a page, in the order in which messages are due."""
        return page_of(lambda most: self.rows(connection, most, to=to), limit, place_of)

    def going_on(self, place: str | None) -> Self:
        """Return the selection for the page that begins at ``place``.

        Raises:
            UsageError: no page of held messages ends there.
        """
        if place is None:
            return self
        found = PLACE.fullmatch(place)
        try:
            due = EPOCH + int(found[1]) * MICROSECOND if found else None
        except OverflowError:
            due = None
        if found is None or due is None:
            raise foreign(place, f"{self.WORD}s")
        return replace(self, after_due=due, after=int(found[2]))


def place_of(row: HeldMessage) -> str:
    """Return where a page begins that comes after this message."""
    return f"{(row.due - EPOCH) // MICROSECOND}.{row.held_id}"


class LockedHeld:
    """Held messages that are locked for a decision."""

    readers: frozenset[str | None] = frozenset([None])

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        chosen: HeldMessages,
        limit: int | None,
        to: str | None,
    ) -> None:
        rows = fetch(connection, chosen.sql(LOCK), chosen.params(limit, to))
        self.message_ids: list[UUID] = [message_id for _, message_id, _ in rows]
        self.names: list[str | None] = [name for *_, name in rows]
        self.last = rows[-1][0] if rows else None

    def pass_on(
        self,
        connection: psycopg.Connection[Any],
        to: str | None,
        number: int,  # noqa: ARG002 - the audit's; the order of held messages is that of their times
        person: str | None,  # noqa: ARG002 - known to the audit
    ) -> None:
        """Let the next forwarder move them, or move them at the time ``to``."""
        connection.execute(CHANGE, {"to": to, "message_ids": self.message_ids})

    def give_up(self, connection: psycopg.Connection[Any]) -> None:
        """Cancel them: they are never sent, and their names are forgotten."""
        connection.execute(DELETE, {"message_ids": self.message_ids})


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A transaction that has locked a held message, as far as it can be found."""

    pid: int | None
    """The server's process; None: not found, or the transaction is prepared."""
    application: str | None
    open_seconds: float | None
    """How long the transaction has been open, in seconds; None: not found, or hidden."""

    @property
    def words(self) -> str:
        """The transaction in words; empty if it was not found.

        >>> Holder(pid=7, application="psql", open_seconds=90.0).words
        'pid 7 (psql), in a transaction that has been open for 1 min 30 s'
        """
        if self.pid is None:
            return ""
        name = f"pid {self.pid}" + (f" ({self.application})" if self.application else "")
        if self.open_seconds is None:
            return name
        return f"{name}, in a transaction that has been open for {age(self.open_seconds)}"


@dataclass(frozen=True, kw_only=True)
class LockedMessage(Holder):
    """A held message that another transaction has locked."""

    service: str
    name: str | None
    message_id: UUID

    @property
    def called(self) -> str:
        """Its service, and its name or its id."""
        return f"{self.service} {self.name or self.message_id}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self) | {"message_id": str(self.message_id)}


def locked(
    connection: psycopg.Connection[Any],
    chosen: HeldMessages,
    decided: Sequence[UUID],
    limit: int,
    *,
    to: str | None = None,
) -> list[LockedMessage]:
    """Return the first chosen messages that a decision has skipped, and who has locked them.

    ``decided``: the ids of the other messages; ``to`` is the time of a rescheduling, or None.
    """
    params = chosen.params(limit, to) | {"decided": [*decided]}
    return records(connection, LockedMessage, chosen.sql(LOCKED), params)


@dataclass(frozen=True, kw_only=True)
class Named:
    """A message with a name, held or sent."""

    service: str
    name: str
    message_id: UUID
    due: datetime | None
    """When it is due; None if it was sent."""
    refused: str | None
    sent_at: datetime | None
    """When it was sent; None if it is held."""
    forget_at: datetime | None
    """When the name may be used again; None if it is held."""

    @property
    def words(self) -> str:
        """Its state in words."""
        what = f"{self.name!r} to {self.service!r}"
        if self.sent_at is not None:
            return f"{what} was sent at {at(self.sent_at)}, as message {self.message_id}"
        if self.due is None or self.refused is not None:
            return f"{what} is refused: {self.refused}"
        return f"{what} is held until {at(self.due)}"

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        moments = ("due", "sent_at", "forget_at")
        return asdict(self) | {
            "message_id": str(self.message_id),
            **{name: (time := getattr(self, name)) and time.isoformat() for name in moments},
        }


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """A message with a name that an operator has cancelled."""

    name: str
    message_id: UUID
    audit_at: datetime
    who: str
    person: str | None
    why: str

    @property
    def words(self) -> str:
        """The decision in words."""
        return (
            f"{self.name!r}, message {self.message_id}, was cancelled at {at(self.audit_at)} by "
            f"{self.person or self.who}: {self.why}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self) | {
            "message_id": str(self.message_id),
            "audit_at": self.audit_at.isoformat(),
        }


@dataclass(frozen=True, kw_only=True)
class HeldCounts:
    """Numbers of a broker's held messages."""

    messages: int
    """Held messages that are not refused."""
    next_due: datetime | None
    """The earliest time at which one is due; None without any."""
    overdue: int
    refused: int
    now: datetime

    @property
    def overdue_seconds(self) -> float | None:
        """How long the first message has been due, in seconds; None if none is overdue."""
        if self.next_due is None or not self.overdue:
            return None
        return max(0.0, (self.now - self.next_due).total_seconds())

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "messages": self.messages,
            "next_due": self.next_due and self.next_due.isoformat(),
            "overdue": self.overdue,
            "overdue_seconds": self.overdue_seconds,
            "refused": self.refused,
        }


def counts(connection: psycopg.Connection[Any]) -> HeldCounts:
    """Count a broker's held messages."""
    (found,) = records(connection, HeldCounts, COUNTS)
    return found


def named(
    connection: psycopg.Connection[Any], name: str, service: str | None = None
) -> list[Named]:
    """Return the messages with a name, one for each service."""
    return records(connection, Named, NAMED, {"name": name, "service": service})


def cancelled(connection: psycopg.Connection[Any], name: str) -> list[Cancelled]:
    """Return operators' cancellations of messages with a name, latest first, at most 20."""
    return records(connection, Cancelled, CANCELLED, {"name": name})


def details(connection: psycopg.Connection[Any], message_id: UUID) -> HeldDetails | None:
    """Return a held message by its id; None if it is not held."""
    params: Mapping[str, Any] = {"message_id": message_id}
    with psycopg.Cursor(connection, row_factory=class_row(HeldDetails)) as cursor:
        return cursor.execute(ONE, params).fetchone()


def body(connection: psycopg.Connection[Any], message_id: UUID) -> bytes | None:
    """Return the body of a held message; None if it is not held."""
    found = fetch(connection, BODY, {"message_id": message_id})
    return bytes(found[0][0]) if found else None
