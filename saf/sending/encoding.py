"""Bodies as JSON: forms for values that JSON does not know, and the path of a value without one.

    dataclass               an object of its fields
    pydantic model          the result of its ``model_dump(mode="json")``
    Enum                    its value
    Decimal                 text with all its digits: "19.90"
    UUID                    text
    datetime, date, time    text in ISO 8601, with the offset that a datetime has

An application adds forms, or changes these, by ``Outbox(encoder=…)``: a function that is called
first, for each value that JSON does not know. Like the ``default`` of `json.dumps`, the function
returns a value to encode instead, or raises TypeError for an unknown value.

An error names a value without a form by its path: ``body.items[3].price``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from saf.errors import InvalidMessage

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
