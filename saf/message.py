"""A message to send: checked and encoded here, without a database.

Every broker can store what `encode` accepts. Anything else raises `InvalidMessage` before a row is
written.

A body that is neither bytes nor text becomes JSON. Values that JSON does not know have these forms:

    dataclass               an object of its fields; see also `saf.typed.event`
    pydantic model          the result of its ``model_dump(mode="json")``
    Enum                    its value
    Decimal                 text with all its digits: "19.90"
    UUID                    text
    datetime, date, time    text in ISO 8601, with the offset that a datetime has

An application adds forms, or changes these, by ``Outbox(encoder=…)``: a function that is called
first, for each value that JSON does not know. Like the ``default`` of `json.dumps`, the function
returns a value to encode instead, or raises TypeError for an unknown value. An error names a value
without a form by its path: ``body.items[3].price``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NamedTuple, NoReturn, get_args
from uuid import UUID, uuid4

from saf.errors import InvalidMessage
from saf.telemetry.carried import with_context
from saf.typed.event import VERSION, Event, event_of

Form = Callable[[Any], object]

NAMES = (str, int, float, bool, type(None))
"""Types that JSON accepts as the name of a member; it has a form for their values, too."""

WAY_OUT = "convert it, or let Outbox(encoder=…) do so"


def form(value: Any) -> object:
    """Return the JSON form of a value that JSON does not know.

    >>> form(Decimal("19.90")), form(date(2026, 1, 2)), form(UUID(int=7))
    ('19.90', '2026-01-02', '00000000-0000-0000-0000-000000000007')

    Raises:
        TypeError: the value has no form.
    """
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID) or (isinstance(value, Decimal) and value.is_finite()):
        return str(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(type(value), "__pydantic_serializer__"):
        return value.model_dump(mode="json")
    raise TypeError(f"{_described(value)} has no form in JSON")


class Encoder:
    """Encodes bodies.

    Args:
        encoder: the application's own forms; see the module's docstring.
    """

    def __init__(self, encoder: Form | None = None) -> None:
        self._form = form if encoder is None else _first(encoder)
        # created once: `json.dumps` would create one for each body
        self._json = json.JSONEncoder(
            ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=self._form
        )

    def __call__(self, body: object) -> tuple[bytes, str]:
        r"""Return a body as bytes, and its content type.

        >>> Encoder()(b"\x00\x01")
        (b'\x00\x01', 'application/octet-stream')
        >>> Encoder()("grüezi")
        (b'gr\xc3\xbcezi', 'text/plain; charset=utf-8')
        >>> Encoder()({"order": 7, "price": Decimal("1.50")})
        (b'{"order":7,"price":"1.50"}', 'application/json')

        Raises:
            InvalidMessage: the body has no form, or a form that is not Unicode text.
        """
        if isinstance(body, (bytes, bytearray, memoryview)):
            return bytes(body), "application/octet-stream"
        try:
            if isinstance(body, str):
                return body.encode(), "text/plain; charset=utf-8"
            return self._json.encode(body).encode(), "application/json"
        except UnicodeEncodeError as error:
            raise self._refused(body, "not encodable as UTF-8", error.reason) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise self._refused(body, "neither bytes, str nor JSON", str(error)) from None

    def _refused(self, body: object, claim: str, reason: str) -> InvalidMessage:
        path, problem = self.fault(body)
        place = "" if path == "body" else f" at {path}"
        return InvalidMessage("body", f"{claim}{place}: {problem or reason}", path=path)

    def fault(self, body: object) -> tuple[str, str]:
        """Return the path of the first value that cannot be encoded, and the problem.

        >>> Encoder().fault({"items": [{"price": 1}, {"price": {2}}]})[0]
        'body.items[1].price'
        """
        try:
            return next(self._faults(body, "body", ()), ("body", ""))
        except RecursionError:
            return "body", "it is nested too deeply"

    def _faults(self, value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        ancestors = (*above, id(value))
        if id(value) in above:
            yield path, "it contains itself"
        elif isinstance(value, str):
            yield from _of_text(value, path)
        elif isinstance(value, float) and not math.isfinite(value):
            yield path, f"{value} is not a number in JSON"
        elif isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, NAMES):
                    yield path, f"{_described(key)} is the name of a member: {WAY_OUT}"
                yield from _of_text(str(key), path)
                yield from self._faults(item, f"{path}{_step(key)}", ancestors)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield from self._faults(item, f"{path}[{number}]", ancestors)
        elif not isinstance(value, NAMES):
            try:
                instead = self._form(value)
            except TypeError as error:
                yield path, f"{error}: {WAY_OUT}"
            else:
                yield from self._faults(instead, path, ancestors)


def _first(encoder: Form) -> Form:
    """Return a form that tries the application's encoder before the built-in forms."""

    def either(value: Any) -> object:
        try:
            return encoder(value)
        except TypeError:
            return form(value)

    return either


def _of_text(text: str, path: str) -> Iterator[tuple[str, str]]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield path, error.reason


def _step(key: object) -> str:
    """Return the path step to a member of an object.

    >>> _step("price"), _step("unit price")
    ('.price', "['unit price']")
    """
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _described(value: object) -> str:
    """Describe a value by its type; a Decimal without a form, such as NaN, by its value.

    >>> _described({1}), _described(Decimal("NaN"))
    ("a value of type 'set'", 'NaN')
    """
    if isinstance(value, Decimal):
        return str(value)
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"a value of type {name!r}"


EMPTY = "is empty; if it does not exist, pass None, in SQL NULL"
MAX_NAME = 255
"""Longest service or message type, in bytes of UTF-8."""
MAX_MESSAGE_NAME = 255
"""Longest name of a message, in bytes of UTF-8."""
MAX_KEY = 1024
"""Longest key, in bytes of UTF-8. Keys are indexed, and an index entry has at most 2,704."""
MOST_BITS = 4 * MAX_KEY
"""Bits of an integer that certainly has more digits than a key may have."""
MAX_HEADERS = 1024 * 1024
"""Largest headers, in bytes of JSON text. Large content belongs in the body."""
DEFAULT_MAX_BYTES = 64 * 1024 * 1024
"""Largest body that an `Outbox` accepts by default, in bytes."""
MAX_BODY = 500 * 1024 * 1024
"""Largest ``max_bytes`` of an Outbox. A body written out as text takes twice its size, and a row in
PostgreSQL's protocol must be smaller than 1 GB."""

FIRST_MOMENT, LAST_DAY = datetime.min.replace(tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""The earliest time that a log takes, and the first one that is too late."""
FIRST_DAY = datetime(1, 1, 2, tzinfo=UTC)
"""The earliest time that a session in any time zone can read."""
OUT_OF_CALENDAR = "is before 0001-01-01 or after 9999-12-30, in UTC"
"""Problem with a time outside of that range."""

CONTENT_TYPE = "content-type"
RESERVED_TYPE = "saf/"
"""Prefix of saf's own message types; contracts must not use it."""
RESERVED_HEADER = "saf-"
"""The prefix of the headers that saf writes itself; an application must not use it."""
FRAGMENT, WHOLE = f"{RESERVED_HEADER}fragment", f"{RESERVED_HEADER}whole"
"""Headers of a large body's fragments: on each fragment but the last, and on the last."""
VERIFIED_FROM, CLAIMED_FROM = f"{RESERVED_HEADER}verified-from", f"{RESERVED_HEADER}claimed-from"
"""Headers about the sender: the service that its source has verified, and a claim that a sender
made under that name; see `saf.engine.storing`."""
ORIGIN, HOPS = f"{RESERVED_HEADER}origin", f"{RESERVED_HEADER}hops"
"""Headers of messages that routing services send on: the first signature (`saf.signing.origin`),
and the number of routing services that the message has come by."""
REDIRECTED = f"{RESERVED_HEADER}redirected"
"""Header of a dialog's messages that a redirecting routing service has sent on: the router's name,
and the broker that they came from. In the target's first answer: the router's name."""
MAX_HOPS = 16
"""Most routers in a row, and most routing services that a message may come by."""
UNSIGNED, UNKNOWN_KEY, ALTERED = "unsigned", "unknown_key", "altered"
"""Reasons of dead letters that a receiver has refused; see `saf.signing.verifier`."""
HELLO = f"{RESERVED_HEADER}dialog"
"""Header of a dialog's first message, and of an Error, that informs the target."""
SIGNATURE, LINEAGE = f"{RESERVED_HEADER}signature", f"{RESERVED_HEADER}lineage"
"""The sender's signature (`saf.signing.signer`), and the incarnations of its broker that an end of
a dialog has had (`saf.dialogs.facts`)."""

HEADERS = json.JSONEncoder(allow_nan=False).encode


class Number(str):
    """A JSON number kept as its digits, because parsing could change it."""

    __slots__ = ()


def no_number(said: str) -> NoReturn:
    """Reject constants, such as NaN, that Python accepts as numbers and JSON does not define.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{said} is not JSON")


STRICT = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=no_number)
"""Decodes strict JSON, with numbers of any size, each a `Number`."""


def as_json(value: Any, text: Callable[[str], str] = json.dumps) -> str:
    """Return a value as JSON, with each `Number` as it was written; ``text`` encodes strings.

    >>> as_json({"total": Number("1.50"), "note": "1.50"})
    '{"total": 1.50, "note": "1.50"}'

    Raises:
        ValueError: a float has no JSON form.
    """
    match value:
        case Number():
            return str(value)
        case dict():
            return f"{{{', '.join(f'{text(n)}: {as_json(v, text)}' for n, v in value.items())}}}"
        case list():
            return f"[{', '.join(as_json(item, text) for item in value)}]"
        case str():
            return text(value)
        case _:
            return json.dumps(value, allow_nan=False)


class Exact(dict[str, Any]):
    """Headers that were read by `STRICT`, and are written with the same numbers."""


EXPONENT = re.compile(r"\de[+-](\d{1,3})(?!\d)")
"""Matches the exponent of a number as `json.dumps` writes it."""


IfThere = Literal["skip", "replace", "later"]
IF_THERE: tuple[IfThere, ...] = get_args(IfThere)
Outcome = Literal["sent", "held", "replaced", "kept", "already_sent"]
LONGEST_ONCE_FOR = timedelta(days=36525)


class Sent(UUID):
    """The id of a message, as `Outbox.send` returns it."""

    __slots__ = ("outcome",)

    outcome: Outcome
    """``sent`` or ``held``: no message had this name. ``replaced``: this message took the place of
    the held one. ``kept``: the held message stayed as it was. ``already_sent``: the message with
    this name was sent before, so this one is not sent."""

    def __init__(self, message_id: UUID, outcome: Outcome = "sent") -> None:
        super().__init__(int=message_id.int)
        object.__setattr__(self, "outcome", outcome)  # UUIDs are immutable

    @property
    def is_new(self) -> bool:
        """False if a message already had this name. The id is that of the message that has it."""
        return self.outcome in ("sent", "held")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Sent, (UUID(int=self.int), self.outcome))


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message for `Outbox.send_many`; the fields are the arguments of `Outbox.send`."""

    service: str
    body: object
    key: str | int | UUID | None = None
    headers: Mapping[str, Any] | None = None
    message_type: str | None = None
    deliver_at: datetime | None = None
    expires_at: datetime | None = None
    to_broker: UUID | None = None
    from_service: str | None = None
    name: str | None = None
    if_there: IfThere = "skip"
    once_for: timedelta | None = None
    later_limit: timedelta | None = None

    @property
    def passes_by(self) -> bool:
        """Whether it goes into the outbox in any case, because it has neither a name nor a time."""
        return self.name is None and self.deliver_at is None


class Row(NamedTuple):
    """Columns that `saf.outbox` stores of a message, in the order of the INSERT."""

    message_id: UUID
    from_service: str | None
    to_service: str
    to_broker: UUID | None
    key: str | None
    message_type: str | None
    headers: str
    body: bytes
    deliver_at: datetime | None
    expires_at: datetime | None


encode_body = Encoder()
"""Returns a body as bytes, and its content type."""


def encode(
    message: Message,
    max_bytes: int = DEFAULT_MAX_BYTES,
    encode_body: Encoder = encode_body,
    *,
    traced: bool = True,
) -> Row:
    """Check a message and turn it into a row with a new random id.

    An event gives its type, key and version, unless the message has a key. If ``traced``, the
    headers get the current trace context, if there is one; see `saf.telemetry.carried`.

    Raises:
        InvalidMessage: names the field at fault.
    """
    if (event := event_of(type(message.body))) is not None:
        message = _of_event(message, event)
    check_text("service", message.service, MAX_NAME)
    key = key_text(message.key)
    if message.message_type is not None:
        check_text("message_type", message.message_type, MAX_NAME)
    if message.from_service is not None:
        check_text("from_service", message.from_service, MAX_NAME)
    if message.to_broker is not None and not isinstance(message.to_broker, UUID):
        raise InvalidMessage("to_broker", f"{message.to_broker!r} is not a uuid.UUID")
    _check_moment("deliver_at", message.deliver_at)
    _check_moment("expires_at", message.expires_at)
    if message.name is not None:
        check_text("name", message.name, MAX_MESSAGE_NAME)
    _check_once(message)
    if message.expires_at is not None and message.expires_at <= datetime.now(UTC):
        raise InvalidMessage(
            "expires_at", f"{message.expires_at.isoformat()} is over: nobody would get the message"
        )
    _check_order(message)
    body, content_type = encode_body(message.body)
    headers = encode_headers(message.headers, content_type)
    if len(body) > max_bytes:
        raise InvalidMessage("body", f"{len(body):,} bytes are more than max_bytes ({max_bytes:,})")
    if len(body) > MAX_BODY:
        raise InvalidMessage("body", f"{len(body):,} bytes are more than {MAX_BODY:,}")
    check_headers(headers)
    return Row(
        uuid4(),
        message.from_service,
        message.service,
        message.to_broker,
        key,
        message.message_type,
        with_context(headers, message.headers) if traced else headers,
        body,
        message.deliver_at,
        message.expires_at,
    )


def _check_once(message: Message) -> None:
    """Check the arguments that define the meaning of a name."""
    if message.if_there not in IF_THERE:
        expected = ", ".join(map(repr, IF_THERE))
        raise InvalidMessage("if_there", f"expected {expected}, got {message.if_there!r}")
    if message.if_there != "skip" and message.name is None:
        raise InvalidMessage("if_there", f"{message.if_there!r} needs a name")
    if message.once_for is not None:
        _check_span("once_for", message.once_for)
    if message.later_limit is not None:
        if message.if_there != "later":
            raise InvalidMessage("later_limit", "needs if_there='later'")
        _check_span("later_limit", message.later_limit)


def _check_span(field: str, span: object) -> None:
    """Reject values that are not a time for which a name may be kept or a message postponed."""
    if not isinstance(span, timedelta):
        raise InvalidMessage(field, f"{span!r} is not a datetime.timedelta")
    if not timedelta(0) <= span <= LONGEST_ONCE_FOR:
        raise InvalidMessage(field, f"{span} is not between 0 and {LONGEST_ONCE_FOR.days:,} days")


def _check_order(message: Message) -> None:
    """Reject a message that would expire before it is due."""
    due, end = message.deliver_at, message.expires_at
    if due is not None and end is not None and due >= end:
        raise InvalidMessage(
            "expires_at",
            f"{end.isoformat()} is not after deliver_at {due.isoformat()}: nobody would get the "
            "message",
        )


def _of_event(message: Message, event: Event[Any]) -> Message:
    """Return a message with its event's type, key and version."""
    if message.message_type not in (None, event.name):
        raise InvalidMessage(
            "message_type",
            f"{message.message_type!r}, and the body is event {event.name!r}: leave the type out",
        )
    return replace(
        message,
        message_type=event.name,
        key=event.key_of(message.body) if message.key is None else message.key,
        headers=_with_version(message.headers, event.version),
    )


def _with_version(headers: Mapping[str, Any] | None, version: int) -> Mapping[str, Any] | None:
    """Return headers with the version of the body's type; version 1 has no header.

    >>> _with_version(None, 1), _with_version({"a": 1, "SAF-Type-Version": 1}, 2)
    (None, {'a': 1, 'saf-type-version': 2})
    """
    if not isinstance(headers, Mapping | None):
        return headers  # `encode_headers` rejects them
    kept = {
        name: value
        for name, value in (headers or {}).items()
        if not isinstance(name, str) or name.lower() != VERSION
    }
    if version > 1:
        kept[VERSION] = version
    return (Exact(kept) if isinstance(headers, Exact) else kept) or None


def key_text(key: object) -> str | None:
    """Return a key as a log stores it: text, of an int its digits, of a UUID its usual form.

    >>> key_text("A-1"), key_text(7), key_text(UUID(int=7)), key_text(None)
    ('A-1', '7', '00000000-0000-0000-0000-000000000007', None)

    Raises:
        InvalidMessage: the key has another type, or no broker can store it.
    """
    if key is None:
        return None
    if isinstance(key, UUID):
        return str(key)
    if isinstance(key, int) and not isinstance(key, bool):
        if key.bit_length() > MOST_BITS:  # Python refuses to print larger numbers
            raise InvalidMessage("key", f"its digits are more than {MAX_KEY:,} bytes")
        key = int.__repr__(key)
    elif not isinstance(key, str):
        kind = type(key).__qualname__
        raise InvalidMessage("key", f"expected str, int or UUID, got {kind} {key!r:.200}")
    check_text("key", key, MAX_KEY)
    return key


def encode_headers(headers: Mapping[str, Any] | None, content_type: str) -> str:
    """Return the headers as JSON text, with the body's content type unless the caller set one.

    >>> encode_headers({"Content-Type": "application/json", "Trace": 7}, "text/plain")
    '{"content-type": "application/json", "Trace": 7}'
    """
    if not headers:
        return f'{{"{CONTENT_TYPE}":"{content_type}"}}'
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise InvalidMessage("headers", "expected a mapping of names to JSON values")
    write = as_json if isinstance(headers, Exact) else HEADERS
    names = {name.lower(): name for name in headers}
    if len(names) < len(headers):
        one = next(name for name in headers if name not in names.values())
        raise InvalidMessage("headers", f"{one!r} and {names[one.lower()]!r} are the same name")
    if (given := names.get(CONTENT_TYPE)) is not None:
        content_type = headers[given]
        headers = {name: value for name, value in headers.items() if name != given}
    headers = {CONTENT_TYPE: content_type, **headers}
    try:
        text = write(headers)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage("headers", f"not JSON: {error}") from None
    if "\\u0000" in text and _holds_nul(headers):
        raise InvalidMessage("headers", "PostgreSQL's jsonb cannot hold NUL (\\u0000)")
    if "\\ud" in text:
        try:
            json.dumps(headers, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidMessage("headers", "a lone surrogate is not Unicode text") from None
    return text


def check_headers(headers: str) -> None:
    """Reject headers, as JSON text, that no broker would store.

    Raises:
        InvalidMessage: the headers are too large.
    """
    if (size := _stored_size(headers)) > MAX_HEADERS:
        raise InvalidMessage("headers", f"{size:,} bytes are more than {MAX_HEADERS:,}")


def check_text(field: str, text: object, longest: int) -> None:
    """Reject values that are not text, or that a column of a log cannot store.

    Raises:
        InvalidMessage: names the field.
    """
    if not isinstance(text, str):
        raise InvalidMessage(field, f"expected str, got {type(text).__name__}")
    if not text:
        raise InvalidMessage(field, "is empty" if field == "service" else EMPTY)
    if not fits(text, longest):
        size = len(text.encode(errors="surrogatepass"))
        raise InvalidMessage(field, f"{size:,} bytes are more than {longest:,}")
    if "\0" in text:
        raise InvalidMessage(field, f"{text!r} holds a NUL byte, which PostgreSQL cannot store")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidMessage(field, "a lone surrogate is not Unicode text") from None


def fits(text: str, longest: int) -> bool:
    """Return whether a text has at most ``longest`` bytes in UTF-8.

    >>> fits("a" * 255, 255), fits("好" * 85, 255), fits("好" * 86, 255)
    (True, True, False)
    """
    if text.isascii():
        return len(text) <= longest
    return len(text) <= longest and len(text.encode(errors="surrogatepass")) <= longest


def in_calendar(moment: datetime) -> bool:
    """Return whether a log takes a time, which has a time zone; as its CHECK ``in_calendar`` does.

    >>> in_calendar(datetime.min.replace(tzinfo=UTC)), in_calendar(datetime.max.replace(tzinfo=UTC))
    (True, False)
    """
    return FIRST_MOMENT <= moment < LAST_DAY


def _stored_size(headers: str) -> int:
    """Return an upper bound of the headers' size as PostgreSQL writes them, 1e+300 with all digits.

    >>> _stored_size("[1e+300, " * 5000) > MAX_HEADERS > _stored_size("[1, " * 5000)
    True
    """
    if len(headers) * 60 < MAX_HEADERS:
        return len(headers)  # within the limit: no character grows to more than 50 bytes
    return len(headers) + sum(map(int, EXPONENT.findall(headers)))


def check_due(deliver_at: object) -> None:
    """Reject values that are not a time at which a message can be due.

    Raises:
        InvalidMessage: names the field.
    """
    if deliver_at is None:
        raise InvalidMessage("deliver_at", "is None: to send the message now, give the time now")
    _check_moment("deliver_at", deliver_at)


def _check_moment(field: str, moment: object) -> None:
    if moment is None:
        return
    if not isinstance(moment, datetime):
        raise InvalidMessage(field, f"expected datetime, got {type(moment).__name__}")
    if moment.utcoffset() is None:
        raise InvalidMessage(
            field, f"{moment.isoformat()} has no time zone: use datetime.now(timezone.utc) or like"
        )
    if not in_calendar(moment):
        way_out = ": leave it out for a message that never expires" * (field == "expires_at")
        raise InvalidMessage(field, f"{moment.isoformat()} {OUT_OF_CALENDAR}{way_out}")


def _holds_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_holds_nul(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return any(_holds_nul(item) for item in value)
    return False
