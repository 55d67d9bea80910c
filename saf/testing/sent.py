"""The messages in the outbox of a test's database, with assertions on them.

    saf_outbox.one(to_service="billing", body={"order": 7})      exactly one; returns it
    saf_outbox.none(to_service="shipping")
    saf_outbox.all(key="A-1")                                    a list, in the order of sending

Only committed messages count, and of these only pending ones, unless ``include_forwarded`` is true.
Messages that are held count as well. They come last, in the order in which they are due.
Bodies are compared by their content type: JSON by its value. A failed assertion shows the existing
messages instead, the most similar first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import InvalidMessage, UnreadableHeaders, UsageError
from saf.message import encode_body, key_text
from saf.received import READ, WITH_READABLE, Received, expressions
from saf.testing.databases import Database

SHOWN_MESSAGES, SHOWN_CHARACTERS = 5, 200
"""Most messages that a failed assertion shows, and most characters of each value."""

SENT = f"""
SELECT {expressions(source="NULL::uuid")},
       (SELECT h.name FROM saf.held h WHERE h.message_id = o.message_id), NULL::timestamptz
FROM (SELECT {WITH_READABLE} FROM saf.outbox) AS o
WHERE %(include_forwarded)s OR NOT EXISTS (
    SELECT FROM saf.cursor c JOIN saf.subscription s USING (subscription_id)
    WHERE s.log = 'outbox' AND s.name = 'forwarder' AND c.shard = o.shard
      AND (pg_visible_in_snapshot(o.txid, c.done)
           OR c.open IS NOT NULL AND pg_visible_in_snapshot(o.txid, c.open) AND o.id <= c.position))
ORDER BY id
"""
HELD = f"""
SELECT {expressions(id="held_id", shard="NULL::smallint", deliver_at="due", source="NULL::uuid")},
       name, due
FROM (SELECT {WITH_READABLE} FROM saf.held WHERE due IS NOT NULL) AS h
ORDER BY due, held_id
"""

# Finds transactions that have inserted: each holds this lock until it ends
UNCOMMITTED = """
SELECT count(DISTINCT pid) FROM pg_locks
WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND relation = 'saf.outbox'::regclass AND mode = 'RowExclusiveLock' AND pid <> pg_backend_pid()
"""


class Match(TypedDict, total=False):
    """Criteria for a message; omitted fields match any value."""

    to_service: str
    body: object
    """Body: equal after decoding, or the same bytes."""
    key: str | int | UUID | None
    message_type: str | None
    headers: Mapping[str, Any]
    """Headers that the message must have, among others."""
    from_service: str | None
    to_broker: UUID | None
    deliver_at: object
    expires_at: object
    name: str | None
    due: object


class SentMessage(Received):
    """A message that was sent or is held, with its name."""

    __slots__ = ()

    @property
    def name(self) -> str | None:
        """Name of the effect; None: it has none, or the name is forgotten."""
        name: str | None = self._row[len(READ)]
        return name

    @property
    def due(self) -> datetime | None:
        """Time until which the message is held; None: it is in the outbox."""
        due: datetime | None = self._row[len(READ) + 1]
        return due

    def stored(self) -> dict[str, Any]:
        """Return the message's columns by name, with its own name and ``due``."""
        return {**super().stored(), "name": self.name, "due": self.due}


class Sent:
    """The outbox of one database, as a test sees it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self, *, include_forwarded: bool = False, **match: Unpack[Match]) -> list[SentMessage]:
        """Return the matching messages, in the order in which they were sent."""
        _check(match)
        return [one for one in self._read(include_forwarded) if not _differences(one, match)]

    def one(self, *, include_forwarded: bool = False, **match: Unpack[Match]) -> SentMessage:
        """Return the only message that matches; fail if several or none do.

        Raises:
            AssertionError: no message matches, or several match.
        """
        __tracebackhide__ = True
        found = self.all(include_forwarded=include_forwarded, **match)
        if len(found) == 1:
            return found[0]
        raise AssertionError(self._complaint("exactly one", found, include_forwarded, match))

    def none(self, *, include_forwarded: bool = False, **match: Unpack[Match]) -> None:
        """Assert that no message matches.

        Raises:
            AssertionError: a message matches.
        """
        __tracebackhide__ = True
        found = self.all(include_forwarded=include_forwarded, **match)
        if found:
            raise AssertionError(self._complaint("no", found, include_forwarded, match))

    def _read(self, include_forwarded: bool) -> list[SentMessage]:
        with (
            self._database.looking() as connection,
            psycopg.Cursor(connection, row_factory=tuple_row) as cursor,
        ):
            params = {"include_forwarded": include_forwarded}
            found = cursor.execute(SENT, params, binary=True).fetchall()
            found += cursor.execute(HELD, binary=True).fetchall()
            return [SentMessage(row) for row in found]

    def _complaint(
        self, wanted: str, found: list[SentMessage], include_forwarded: bool, match: Match
    ) -> str:
        existing = self._read(include_forwarded)
        kind = "message" if include_forwarded else "pending message"
        lines = [f"expected {wanted} {kind}" + (f" with {_named(match)}" if match else "")]
        if found:
            lines[0] += f", and there are {len(found)}:"
        elif existing:
            lines[0] += f"; none of the {len(existing)} existing ones matches, the nearest first:"
        else:
            lines[0] += ", and the outbox has none at all"
        nearest = found or sorted(existing, key=lambda one: len(_differences(one, match)))
        lines += [_shown(one, match) for one in nearest[:SHOWN_MESSAGES]]
        if len(nearest) > SHOWN_MESSAGES:
            lines.append(f"  … and {len(nearest) - SHOWN_MESSAGES} more")
        with self._database.looking() as connection:
            ((writing,),) = fetch(connection, UNCOMMITTED)
        if writing:
            lines.append(
                f"Transactions that have written to the outbox and are still open: {writing}. "
                "Their messages do not exist before they commit"
            )
        return "\n".join(lines)


def decoded(message: Received) -> object:
    """Decode a body by its content type; without one, as JSON or text if possible."""
    kind = (message.content_type or "").partition(";")[0].strip().lower()
    try:
        if not kind or kind == "application/json" or kind.endswith("+json"):
            return json.loads(message.body)
    except (ValueError, RecursionError):
        pass
    try:
        return message.body.decode() if not kind or kind.startswith("text/") else message.body
    except UnicodeDecodeError:
        return message.body


def _differences(message: SentMessage, match: Match) -> list[str]:
    """Return the names in ``match`` by which a message differs."""
    return [name for name, wanted in match.items() if not _has(message, name, wanted)]


def _has(message: SentMessage, name: str, wanted: Any) -> bool:
    if name == "headers":
        headers = _headers(message)
        return isinstance(headers, dict) and all(
            one in headers and headers[one] == value for one, value in wanted.items()
        )
    if name == "key":
        return message.key == _key(wanted)
    if name != "body":
        return bool(message.stored()[name] == wanted)
    if decoded(message) == wanted:
        return True
    try:
        return encode_body(wanted)[0] == message.body
    except InvalidMessage:
        return False


def _headers(message: Received) -> object:
    """Return the headers by name; as text if they cannot be decoded."""
    try:
        return message.headers
    except UnreadableHeaders:
        return message.stored()["headers"]


def _shown(message: SentMessage, match: Match) -> str:
    """Show a message in a complaint: its fields, and how it differs from the wanted one."""
    fields = {**message.stored(), "headers": _headers(message), "body": decoded(message)}
    known = ("to_service", "key", "message_type", "name", "due", "body")
    lines = ["  - " + _named({name: fields[name] for name in known if fields[name] is not None})]
    lines += [
        f"      {name} is {_cut(fields[name])}, not {_cut(match[name])}"  # type: ignore[literal-required] # names of it
        for name in _differences(message, match)
    ]
    return "\n".join(lines)


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_cut(value)}" for name, value in values.items())


def _cut(value: object) -> str:
    """Show a value, cut if it is long.

    >>> _cut({"order": 7}), len(_cut("x" * 1000)) < 250
    ("{'order': 7}", True)
    """
    text = repr(value)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}… ({len(text):,} characters)"


def _check(match: Mapping[str, Any]) -> None:
    known: Sequence[str] = list(Match.__annotations__)
    for name in match:
        if name not in known:
            raise UsageError(f"a message has no {name!r}, only {', '.join(known)}")
    _key(match.get("key"))


def _key(wanted: object) -> str | None:
    """Return a wanted key as it is stored; an INSERT may have stored one that `send` refuses."""
    return wanted if isinstance(wanted, str) else key_text(wanted)
