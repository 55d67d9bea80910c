"""Events: classes that are message types.

    @saf.event("OrderPlaced", key="number", version=2)
    @dataclass(frozen=True)
    class OrderPlaced:
        number: str
        total: Decimal
        currency: str

    @saf.upcaster(OrderPlaced, 1)
    def with_currency(body):                         # from version 1 to version 2
        return {**body, "currency": "CHF"}

A sender gives an object as the body: `saf.message` takes the type, the key and the version from it.
A handler that is registered for the class gets an object (`saf.receiving.handlers`).

*Versions.* The header `VERSION` contains the version, except that of version 1, so a message of a
sender that knows no events is version 1. An older body passes the upcasters of its version and of
each later one; a version without an upcaster is taken as it is. A newer body is not decoded: a
receiver of that version may read it, so its message is tried again.

*Decoding.* pydantic decodes dataclasses, too. It ignores members that the class lacks. A body that
does not match the class raises `UndecodableEvent`, which names the field and shows no value;
`saf.receiving.retries` makes no further attempt.

pydantic is imported when a class is first decoded or described, so that `import saf` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID

from saf.errors import InvalidMessage, NewerEvent, UndecodableEvent, UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

E = TypeVar("E")
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
U = TypeVar("U", bound=Upcast)

VERSION = "saf-type-version"
"""Header with the version of the body's type; a message without it has version 1."""

_MARK = "__saf_event__"

NOTES = frozenset({"title", "description", "examples", "deprecated"})
"""Keywords of JSON Schema that do not change which values are valid."""
NAMED = ("properties", "$defs", "patternProperties", "dependentSchemas")
"""Keywords of JSON Schema whose value has a schema for each name."""
VALUES = ("default", "const", "enum")
"""Keywords of JSON Schema whose value is not a schema."""


class Encoded(Protocol):
    """A received message; see `saf.received.Received`."""

    @property
    def message_id(self) -> UUID:
        """Its id."""

    @property
    def message_type(self) -> str | None:
        """Its type."""

    @property
    def body(self) -> bytes:
        """Its body."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """Its headers."""

    def may_say(self, header: str) -> bool:
        """Return whether the headers may contain a header."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Event(Generic[E]):
    """A class that is a message type."""

    model: type[E]
    name: str
    """Message type."""
    version: int
    key: str | None
    """Field that is the message's key."""
    upcasts: dict[int, Upcast] = field(default_factory=dict)
    """Functions that turn a body of this version into a body of the next one."""

    @cached_property
    def adapter(self) -> TypeAdapter[E]:
        """pydantic's decoder.

        Raises:
            UsageError: pydantic cannot decode the class.
        """
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        try:
            adapter = TypeAdapter(self.model)
            if not adapter.pydantic_complete:
                adapter.rebuild()  # raises: the type of a field is not known
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"event {self.name!r} cannot be decoded: {reason}") from None
        return adapter

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the bodies, without titles and descriptions.

        Raises:
            UsageError: a field has no JSON Schema.
        """
        from pydantic.errors import PydanticUserError

        try:
            schema = self.adapter.json_schema()
        except PydanticUserError as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(f"event {self.name!r} has no JSON Schema: {reason}") from None
        found: dict[str, Any] = without_notes(schema)
        return found

    def key_of(self, body: E) -> str | None:
        """Return the message's key; None without one.

        Raises:
            InvalidMessage: the field is neither text, a number nor a UUID.
        """
        value = None if self.key is None else getattr(body, self.key)
        if isinstance(value, Enum):
            value = value.value
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
        raise InvalidMessage(
            "key",
            f"{self.model.__qualname__}.{self.key} is a {type(value).__name__}: "
            "a key is a str, an int or a UUID",
        )

    def decode(self, message: Encoded) -> E:
        """Return a message's body as an object of the class.

        Raises:
            UndecodableEvent: the body does not match the class.
            NewerEvent: the body has a newer version.
            UsageError: the message has another type.
        """
        if message.message_type != self.name:
            raise UsageError(
                f"message {message.message_id} has type {message.message_type!r}, "
                f"and {self.model.__qualname__} is event {self.name!r}"
            )
        version = self._version_of(message)
        if version > self.version:
            raise NewerEvent(message.message_id, self.name, version, self.version)
        body = self._upcast(message, version)
        try:
            return self.adapter.validate_json(body)
        except ValueError as error:
            raise self._undecodable(message, version, *_fault(error)) from None

    def _version_of(self, message: Encoded) -> int:
        if not message.may_say(VERSION):
            return 1
        version = message.headers.get(VERSION, 1)
        if isinstance(version, int) and not isinstance(version, bool) and version >= 1:
            return version
        raise self._undecodable(message, 1, f"header {VERSION}", f"{version!r} is not a version")

    def _upcast(self, message: Encoded, version: int) -> bytes:
        """Return a body of this class's version."""
        steps = [number for number in range(version, self.version) if number in self.upcasts]
        if not steps:
            return message.body
        from pydantic_core import from_json, to_json

        try:
            body = from_json(message.body)
        except ValueError as error:
            raise self._undecodable(message, version, "body", f"not JSON: {error}") from None
        if not isinstance(body, dict):
            raise self._undecodable(message, version, "body", "it is not a JSON object")
        for number in steps:
            try:
                body = self.upcasts[number](body)
            except Exception as error:
                name = getattr(self.upcasts[number], "__qualname__", "the upcaster")
                problem = f"{name}, from version {number}, raised {type(error).__name__}: {error}"
                raise self._undecodable(message, version, "body", problem) from error
        try:
            return to_json(body)
        except ValueError:
            problem = "an upcaster returned a value that has no form in JSON"
            raise self._undecodable(message, version, "body", problem) from None

    def _undecodable(
        self, message: Encoded, version: int, path: str, problem: str
    ) -> UndecodableEvent:
        return UndecodableEvent(message.message_id, self.name, version, path, problem)


def event(name: str, *, key: str | None = None, version: int = 1) -> Callable[[type[E]], type[E]]:
    """Make a dataclass or a pydantic model a message type.

    Args:
        name: the message type.
        key: field that is the key of its messages: a str, an int or a UUID.
        version: version of the body's form. Raise it when the form changes; see `upcaster`.

    Raises:
        UsageError: the class is neither a dataclass nor a pydantic model, or has no such field.
    """
    if not isinstance(name, str) or not name:
        raise UsageError('write @saf.event("OrderPlaced"), with the name of the message type')
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UsageError(f"event {name!r}: version {version!r} is not a number from 1")

    def mark(model: type[E]) -> type[E]:
        known = _fields(model)
        if known is None:
            raise UsageError(
                f"event {name!r}: {model.__qualname__} is neither a dataclass nor a pydantic "
                "model; write @saf.event above @dataclass"
            )
        if key is not None and key not in known:
            raise UsageError(
                f"event {name!r}: {model.__qualname__} has no field {key!r} to be the key, only "
                f"{', '.join(known)}"
            )
        setattr(model, _MARK, Event(model=model, name=name, version=version, key=key))
        return model

    return mark


def upcaster(model: type[Any], version: int) -> Callable[[U], U]:
    """Register a function that turns bodies of an event's older version into the next version.

    The function takes the body as a dict, decoded from JSON, and returns the dict to use instead.

    Raises:
        UsageError: the class is not an event, the version is not an older one, or has an upcaster.
    """
    of = the_event(model)
    if version not in range(1, of.version):
        raise UsageError(
            f"event {of.name!r} has version {of.version}: an upcaster from version {version!r} "
            "would never be called"
        )
    if version in of.upcasts:
        raise UsageError(f"event {of.name!r} has an upcaster from version {version} already")

    def register(function: U) -> U:
        of.upcasts[version] = function
        return function

    return register


def event_of(model: type[E]) -> Event[E] | None:
    """Return the event that a class is; None for other classes. Subclasses are not events."""
    return model.__dict__.get(_MARK)


def the_event(model: type[E]) -> Event[E]:
    """Return the event that a class is.

    Raises:
        UsageError: the class is not an event.
    """
    found = event_of(model) if isinstance(model, type) else None
    if found is None:
        name = getattr(model, "__qualname__", None) or repr(model)
        raise UsageError(f'{name} is not an event: decorate it with @saf.event("…")')
    return found


def without_notes(schema: Any) -> Any:
    """Return a JSON Schema without titles, descriptions and examples.

    >>> without_notes({"title": "T", "properties": {"title": {"title": "Title", "type": "string"}}})
    {'properties': {'title': {'type': 'string'}}}
    """
    if isinstance(schema, list):
        return [without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: without_notes(item) for key, item in value.items()}
        if name in NAMED
        else value
        if name in VALUES
        else without_notes(value)
        for name, value in schema.items()
        if name not in NOTES
    }


def _fields(model: type) -> list[str] | None:
    if "__pydantic_fields__" in model.__dict__ and not is_dataclass(model):
        return list(model.__dict__["__pydantic_fields__"])
    # its own fields: a subclass of a dataclass is not a dataclass before @dataclass
    if "__dataclass_fields__" in model.__dict__:
        return [item.name for item in fields(model)]
    return None


def _fault(error: ValueError) -> tuple[str, str]:
    """Return the path of the first value that does not match, and the problem, without the value.

    The error is pydantic's: its own text would quote the value.
    """
    read: Callable[..., Iterator[Any]] = getattr(error, "errors")  # noqa: B009 - pydantic is not imported
    first, *others = read(include_url=False, include_context=False, include_input=False)
    path = "body" + "".join(
        f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
        for part in first["loc"]
    )
    more = f" (and {len(others)} more)" if others else ""
    return path, f"{first['msg']}{more}"
