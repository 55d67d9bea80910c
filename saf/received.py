"""A message as a consumer gets it. Headers and body are decoded only on demand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from saf.columns import COLUMNS
from saf.errors import UnreadableBody, UnreadableHeaders
from saf.limits import HEADERS_READABLE, LONG_NAMES, READABLE
from saf.message import CONTENT_TYPE, STRICT, VERIFIED_FROM, Exact
from saf.typed.event import the_event

if TYPE_CHECKING:
    from saf.dialogs.dialog import Dialog

E = TypeVar("E")

FIRST_MOMENT = "timestamptz '0001-01-02 00:00:00+00'"
"""SQL: the earliest time that Python can read in every session time zone."""

# Each column in the form that is cheapest to fetch. A value that is too large is fetched as NULL,
# and so is the body of its row. ``readable`` is computed once per row. In a session whose zone is
# west of UTC, the first day of year 1 begins before Python's calendar.
_CHEAP = {
    "message_id": "uuid_send(message_id)",
    "headers": f"CASE WHEN readable OR {HEADERS_READABLE} THEN headers::text END",
    "body": "CASE WHEN readable THEN body END",
    **{
        name: f"CASE WHEN readable OR octet_length({name}) <= {LONG_NAMES} THEN {name} END"
        for name in ("from_service", "to_service", "key", "message_type")
    },
    "source": "CASE WHEN from_initiator IS NOT NULL THEN source END",
    **{
        name: f"CASE WHEN {name} < {FIRST_MOMENT} THEN {FIRST_MOMENT} ELSE {name} END AS {name}"
        for name in ("created_at", "deliver_at", "expires_at")
    },
}

READ = ("id", "shard", *COLUMNS, "source")
"""Columns of each row, in this order; readers append their own."""


WITH_READABLE = f"*, {READABLE} AS readable"
"""SQL: the columns of saf.inbox or saf.parked, and whether a row can be fetched."""


def expressions(**others: str) -> str:
    """Return the columns for a SELECT from `WITH_READABLE`; ``others`` replaces some of them."""
    return ", ".join({**_CHEAP, **others}.get(column, column) for column in READ)


EXPRESSIONS = expressions()

_AT = {column: place for place, column in enumerate(READ)}
ID, SHARD = _AT["id"], _AT["shard"]
_MESSAGE_ID, _KEY, _HEADERS, _BODY = (
    _AT[column] for column in ("message_id", "key", "headers", "body")
)


def _field(column: str, description: str) -> Any:
    place = _AT[column]
    return property(lambda self: self._row[place], doc=description)


class Headers(dict[str, Any]):
    """Headers by name, compared without case.

    >>> headers = Headers({"Trace-Id": 7})
    >>> headers["trace-id"], headers.get("TRACE-ID"), "trace" in headers
    (7, 7, False)
    """

    def __missing__(self, name: str) -> Any:
        known = self._named(name)
        if dict.__contains__(self, known):
            return dict.__getitem__(self, known)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, self._named(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a header; ``default`` if it is missing."""
        return dict.get(self, self._named(name), default)

    def _named(self, name: object) -> Any:
        """Return the name as it is written here."""
        if not isinstance(name, str) or dict.__contains__(self, name):
            return name
        return next((header for header in self if header.lower() == name.lower()), name)


@dataclass(frozen=True, kw_only=True)
class VerifiedFrom:
    """A sender that its own broker's rules have checked when the message was written."""

    broker: UUID
    """The broker_id."""
    service: str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first sender of a message, verified by its signature, whatever has passed it on since."""

    signed_by: str
    """Key that the sender has signed with."""
    service: str | None
    """Service of the sender."""
    message_id: UUID
    """Id that the sender has given the message."""
    conversation_id: UUID | None
    """The sender's conversation; behind a routing service, not the receiver's."""
    routers: tuple[str, ...] = ()
    """Routers whose services have passed it on, the first one first."""


class Received:
    """One message of a delivery. Read-only.

    `attempt` is the number of times that it has been handed out, including this time.
    """

    __slots__ = ("_dialog", "_origin", "_row", "_signed_by", "attempt", "parked_id")

    def __init__(
        self, row: tuple[Any, ...], parked_id: int | None = None, attempt: int = 1
    ) -> None:
        self._row = row
        self.parked_id = parked_id
        """Id of its row in saf.parked, if it has been set aside before."""
        self.attempt = attempt
        """Number of times that it has been handed out, including this time."""

    id: int = _field("id", "Its place in the inbox; rises with each message of a key.")
    shard: int = _field("shard", "Shard of its key.")
    service: str = _field("to_service", "Service that it is addressed to.")
    from_service: str | None = _field("from_service", "The sender's service.")
    to_broker: UUID | None = _field("to_broker", "Broker that it is addressed to; None: any.")
    key: str | None = _field("key", "Messages with the same key stay in order.")
    message_type: str | None = _field("message_type", "Type of the body.")
    conversation_id: UUID | None = _field("conversation_id", "Conversation that it belongs to.")
    from_initiator: bool | None = _field("from_initiator", "True if a dialog's initiator sent it.")
    sequence: int | None = _field("sequence", "Its number within the conversation.")
    created_at: datetime = _field("created_at", "Time at which it was sent.")
    deliver_at: datetime | None = _field("deliver_at", "Earliest time to hand it out.")
    expires_at: datetime | None = _field("expires_at", "Latest time to hand it out.")
    source: UUID | None = _field("source", "For a dialog: broker of the sender.")

    @property
    def body(self) -> bytes:
        """The body's bytes as sent; see `text` and `json` to decode them."""
        body: bytes = self._row[_BODY]
        return body

    @property
    def size(self) -> int:
        """Size of the body, in bytes."""
        return len(self._row[_BODY])

    @property
    def first_sequence(self) -> int | None:
        """The message's number in its dialog; with fragments, the number of the first fragment."""
        return self.sequence

    def open(self) -> io.BufferedIOBase:
        """Open the body as a file, at its beginning; for bodies that are too large for memory."""
        return io.BytesIO(self.body)

    @property
    def dialog(self) -> Dialog | None:
        """This end of the message's dialog, to reply on; None if it belongs to no dialog."""
        # set only on demand, because most messages belong to no dialog
        return getattr(self, "_dialog", None)

    def belongs_to(self, dialog: Dialog) -> None:
        """Set the dialog that this message belongs to."""
        self._dialog = dialog

    @property
    def message_id(self) -> UUID:
        """The id that `Outbox.send` returned."""
        return UUID(bytes=self._row[_MESSAGE_ID])

    @property
    def headers(self) -> dict[str, Any]:
        """The headers as JSON values by name; names are compared without case.

        Raises:
            UnreadableHeaders: nested too deeply for Python, or with too long a number.
        """
        document = self._read(json.loads)
        return Headers(document) if isinstance(document, dict) else document

    @property
    def exact_headers(self) -> Exact:
        """The headers, ready to be sent on: each number is a `saf.message.Number`.

        Raises:
            UnreadableHeaders: nested too deeply for Python, or not a JSON object.
        """
        document = self._read(STRICT.decode)
        if not isinstance(document, dict):
            raise UnreadableHeaders(self.message_id, "they are not a JSON object")
        return Exact(document)

    def _read(self, decode: Callable[[str], Any]) -> Any:
        headers = self._row[_HEADERS]
        try:
            return {} if headers is None else decode(headers)
        except (ValueError, RecursionError) as error:
            raise UnreadableHeaders(self.message_id, str(error)) from None

    @property
    def verified_from(self) -> VerifiedFrom | None:
        """The sender, as verified by its source; None if it was not verified.

        Raises:
            UnreadableHeaders: as for `headers`.
        """
        if not self.may_say(VERIFIED_FROM):
            return None
        headers = self.headers
        # exactly this name: a sender may have written it in other case
        match dict.get(headers, VERIFIED_FROM) if isinstance(headers, dict) else None:
            case {"broker": str(broker), "service": str(service)}:
                return VerifiedFrom(broker=UUID(broker), service=service)
            case _:
                return None

    @property
    def headers_text(self) -> str | None:
        """The headers as PostgreSQL writes them."""
        text: str | None = self._row[_HEADERS]
        return text

    @property
    def signed_by(self) -> str | None:
        """The key whose signature its receiver has verified; None if none was verified."""
        # set only where signatures are verified
        return getattr(self, "_signed_by", None)

    def is_signed_by(self, key_id: str | None) -> None:
        """Set the key that has signed this message."""
        self._signed_by = key_id

    @property
    def origin(self) -> Origin | None:
        """The first sender, whose signature its receiver has verified; None if it was not verified.

        Behind a routing service, `signed_by` is the service's key, if that is known.
        """
        if (origin := self._passed_on) is not None:
            return origin[0]
        if self.signed_by is None:
            return None
        return Origin(
            signed_by=self.signed_by,
            service=self.from_service,
            message_id=self.message_id,
            conversation_id=self.conversation_id,
        )

    @property
    def _passed_on(self) -> tuple[Origin, str | None] | None:
        found: tuple[Origin, str | None] | None = getattr(self, "_origin", None)
        return found

    @property
    def signed_body(self) -> str | None:
        """Hash that the body of a message that was passed on in fragments must have."""
        return None if self._passed_on is None else self._passed_on[1]

    def comes_from(self, origin: Origin, signed_body: str | None) -> None:
        """Set the first sender of a message that was passed on, and the hash for `signed_body`."""
        self._origin = origin, signed_body

    def is_verified_like(self, other: Received) -> None:
        """Take over the verified senders of another form of this message."""
        self.is_signed_by(other.signed_by)
        if other._passed_on is not None:
            self.comes_from(*other._passed_on)

    def may_say(self, header: str) -> bool:
        """Return whether the headers may contain ``header``; False is certain. Decodes nothing."""
        headers = self._row[_HEADERS]
        return headers is not None and header in headers

    @property
    def content_type(self) -> str | None:
        """The content type that the headers give for the body."""
        try:
            value = self.headers[CONTENT_TYPE]
        except (UnreadableHeaders, LookupError, TypeError):
            return None
        return value if isinstance(value, str) else None

    def text(self) -> str:
        """Return the body as text.

        Raises:
            UnreadableBody: the body is not UTF-8.
        """
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise UnreadableBody(self.message_id, self.content_type, str(error)) from None

    def json(self) -> Any:
        """Return the body, decoded from JSON.

        Raises:
            UnreadableBody: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UnreadableBody(self.message_id, self.content_type, str(error)) from None

    def decode(self, event: type[E]) -> E:
        """Return the body as an object of an event's class; see `saf.event`.

        Raises:
            UndecodableEvent: the body does not match the class; the error names the field.
            NewerEvent: the body has a newer version than the class.
            UsageError: the class is not an event, or the message has another type.
        """
        return the_event(event).decode(self)

    @property
    def lane(self) -> str:
        """Subject of its lane: its key. A message without a key has its own lane."""
        key = self._row[_KEY]
        return str(self.message_id) if key is None else key

    def stored(self) -> dict[str, Any]:
        """Return the message's columns by name, to store them elsewhere."""
        return dict(zip(READ, self._row, strict=False)) | {"message_id": self.message_id}

    def in_memory(self) -> Received:
        """Return the message with its whole body, for use after the transaction has ended."""
        return self

    def with_body(self, body: bytes) -> Received:
        """Return the same message with another body."""
        row = (*self._row[:_BODY], body, *self._row[_BODY + 1 :])
        message = Received(row, self.parked_id, self.attempt)
        if self.dialog is not None:
            message.belongs_to(self.dialog)
        message.is_verified_like(self)
        return message

    def __repr__(self) -> str:
        return (
            f"Received(message_id={self.message_id}, service={self.service!r}, key={self.key!r}, "
            f"message_type={self.message_type!r}, attempt={self.attempt}, {self.size} bytes)"
        )
