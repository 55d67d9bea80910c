"""Templates: bodies in the endpoint's own form, made from messages.

    template = '{"text": {{data.note}}, "order": {{key}}, "lines": {{data.lines}}}'

``{{…}}`` stands for a value of the message:

    id, key, type, time, service    the message's own; service is the sender's
    header.NAME                     one of its headers
    data                            its body: the value if it is JSON, otherwise its text
    data.lines.0.price              a part of that value

A value is written as the content type demands, so that it cannot be misread: as JSON in JSON,
percent-encoded in a form, and unchanged in any other text. A number from the body keeps its digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote_plus

from saf.errors import UnreadableBody
from saf.message import CONTENT_TYPE, STRICT, as_json
from saf.received import Received

PLACE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
NAMES = ("id", "key", "type", "time", "service", "data")
ROOTS = ("data.", "header.")

JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def check(template: str) -> str:
    """Return a template if it names known values only.

    >>> check('{"order": {{key}}}')
    '{"order": {{key}}}'

    Raises:
        ValueError: the template names an unknown value.
    """
    for name in PLACE.findall(template):
        if name not in NAMES and not name.startswith(ROOTS):
            known = ", ".join((*NAMES, "data.NAME", "header.NAME"))
            raise ValueError(f"{{{{{name}}}}} is not one of {known}")
    return template


def filled(template: str, content_type: str, message: Received) -> bytes:
    """Return the body that a template makes from a message.

    Raises:
        UnreadableBody: the message lacks a value that the template names.
    """
    values = _values(message)
    write = _writer(content_type)

    def value(found: re.Match[str]) -> str:
        try:
            return write(values(found[1]))
        except (LookupError, TypeError, ValueError, RecursionError):
            reason = f"it has no {{{{{found[1]}}}}}, which the endpoint's template names"
            declared = message.headers.get(CONTENT_TYPE)
            raise UnreadableBody(message.message_id, declared, reason) from None

    return PLACE.sub(value, template).encode("utf-8", errors="replace")


def part(value: Any, path: str) -> Any:
    """Return the part of a JSON value at a path of names and indexes.

    >>> part({"lines": [{"price": 7}]}, "lines.0.price")
    7
    """
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _values(message: Received) -> Callable[[str], Any]:
    def data() -> Any:
        body = message.body
        try:
            return STRICT.decode(body.decode(json.detect_encoding(body)))
        except (ValueError, RecursionError):
            return body.decode()

    own: Mapping[str, Callable[[], Any]] = {
        "id": lambda: str(message.message_id),
        "key": lambda: message.key,
        "type": lambda: message.message_type,
        "time": message.created_at.isoformat,
        "service": lambda: message.from_service,
        "data": data,
    }

    def of(name: str) -> Any:
        if name in own:
            return own[name]()
        root, _, path = name.partition(".")
        return message.headers[path] if root == "header" else part(data(), path)

    return of


def _writer(content_type: str) -> Callable[[Any], str]:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON or kind.endswith("+json"):
        return as_json
    return (lambda value: quote_plus(_text(value))) if kind == FORM else _text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else as_json(value)
