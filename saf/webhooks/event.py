"""Messages from outside by HTTP: CloudEvents 1.0 events, and claims in headers about senders.

`event` reads an event from a request: from its headers, or from a body that is one JSON object.

`vouched_by` lets a source vouch only for its own senders. A forwarder adds a header for a checked
sender, with its broker and service (`saf.engine.storing`). The broker is always the forwarder's own
source. A partner is not trusted beyond that: a header that names another broker is renamed, just as
a forwarder renames a header that a sender has made up.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import UUID

from saf.errors import Rejected
from saf.message import CLAIMED_FROM, RESERVED_HEADER, STRICT, VERIFIED_FROM

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = "ce-"
STRUCTURED = "application/cloudevents+json"
NEEDED = ("id", "source", "type")
EXACT = ("id", "source")
"""Attributes that identify an event: no character may get lost."""
NOT_CARRIED = (
    "id",
    "type",
    "specversion",
    "datacontenttype",
    "partitionkey",
    "data",
    "data_base64",
)
"""Attributes that a message has a column for, or that add no information."""

ESCAPED = r"\u00"
"""Beginning of an escape, by which a character of the header's name may be hidden."""


class NoEvent(ValueError):
    """The request contains no valid event."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """The parts of an event that become a message."""

    id: str
    source: str
    type: str
    body: bytes
    content_type: str | None
    key: str | None
    headers: Mapping[str, Any] = field(default_factory=dict)


def event(headers: Mapping[str, str], body: bytes) -> Event:
    """Return the event in a request; names of headers are in lower case.

    >>> one = event({"ce-id": "1", "ce-source": "/shop", "ce-type": "Paid",
    ...              "ce-specversion": "1.0", "ce-subject": "A-1"}, b"7")
    >>> one.id, one.key, one.headers
    ('1', 'A-1', {'source': '/shop', 'subject': 'A-1'})

    Raises:
        NoEvent: names the problem.
    """
    given = headers.get("content-type")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind == STRUCTURED:
        attributes, body, content_type = _structured(body)
    elif kind.startswith("application/cloudevents"):
        raise NoEvent(f"{kind} is not supported: send one event, in headers or as JSON")
    else:
        attributes = {
            name: unquote(value, errors="surrogateescape" if name in EXACT else "replace")
            for name, value in _attributes(headers)
        }
        content_type = given
    if attributes.get("specversion") != "1.0":
        raise NoEvent("not an event of CloudEvents 1.0: specversion 1.0 is missing")
    for name in NEEDED:
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise NoEvent(f"the event has no {name}")
    for name in EXACT:
        try:
            attributes[name].encode()
        except UnicodeEncodeError:
            raise NoEvent(f"the event's {name} is not Unicode text") from None
    key = attributes.get("partitionkey") or attributes.get("subject")
    return Event(
        id=attributes["id"],
        source=attributes["source"],
        type=attributes["type"],
        body=body,
        content_type=content_type,
        key=key if isinstance(key, str) else None,
        headers={
            name: value
            for name, value in attributes.items()
            if name not in NOT_CARRIED and not name.startswith(RESERVED_HEADER)
        },
    )


def _attributes(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the attributes in headers, as they are written there."""
    for name, value in headers.items():
        if name.startswith(PREFIX):
            yield name.removeprefix(PREFIX), value


def _structured(body: bytes) -> tuple[dict[str, Any], bytes, str | None]:
    try:
        fields = members(body.decode(json.detect_encoding(body)))
        whole = {name: json.loads(text) for name, text in fields.items() if name != "data"}
    except NoEvent:
        raise
    except (ValueError, RecursionError):
        raise NoEvent("the event is not JSON") from None
    content_type = whole.get("datacontenttype")
    content_type = content_type if isinstance(content_type, str) else None
    if "data_base64" in whole:
        try:
            return whole, base64.b64decode(whole["data_base64"], validate=True), content_type
        except (binascii.Error, TypeError, ValueError):
            raise NoEvent("data_base64 is not base64") from None
    if "data" not in fields:
        return whole, b"", content_type
    data = fields["data"]
    text = (content_type or "application/json").partition(";")[0].strip().lower()
    if data.startswith('"') and not text.endswith(("/json", "+json")):
        return whole, json.loads(data).encode(errors="replace"), content_type
    return whole, data.encode(), content_type or "application/json"


def members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each as written, because parsing may change numbers.

    >>> members('{"id": "1", "data": {"total": 1.50} }')
    {'id': '"1"', 'data': '{"total": 1.50}'}

    Raises:
        ValueError: the text is not JSON.
        NoEvent: the JSON is not an object.
    """
    if not isinstance(STRICT.decode(text), dict):
        raise NoEvent("the event is not a JSON object")
    found: dict[str, str] = {}
    position = text.index("{") + 1
    while text[position := _to_next(text, position)] != "}":
        name, position = STRICT.raw_decode(text, position)
        begins = _to_next(text, position)
        _, position = STRICT.raw_decode(text, begins)
        found[name] = text[begins:position]
    return found


def _to_next(text: str, position: int) -> int:
    """Return the position of the next name or value in a JSON object, or of the object's end."""
    while text[position] in " \t\r\n,:":
        position += 1
    return position


def vouched_by(rows: pa.Table, source: UUID) -> pa.Table:
    """Return messages whose headers name no verifying broker other than ``source``.

    Raises:
        Rejected: headers may contain such a claim, and cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    headers = rows["headers"]
    mask = pc.or_(pc.match_substring(headers, VERIFIED_FROM), pc.match_substring(headers, ESCAPED))
    suspects = headers.filter(mask).unique().to_pylist()  # most messages of a source share them
    renamed = {text: other for text in suspects if (other := _own(text, source)) != text}
    if not renamed:
        return rows
    column = pa.array([renamed.get(text, text) for text in headers.to_pylist()], headers.type)
    return rows.set_column(rows.schema.get_field_index("headers"), "headers", column)


def _own(text: str, source: UUID) -> str:
    """Return headers in which only ``source`` vouches for the sender.

    >>> one = UUID(int=1)
    >>> _own('{"n": 1.50, "saf-verified\\u002dfrom": {"broker": "another"}}', one)
    '{"n": 1.50, "saf-claimed-from": {"broker": "another"}}'
    >>> _own('{"n": 1.50, "saf-verified-from": {"broker": "%s"}}' % one, one)
    '{"n": 1.50, "saf-verified-from": {"broker": "00000000-0000-0000-0000-000000000001"}}'
    """
    try:
        document = STRICT.decode(text)
        if not isinstance(document, dict) or VERIFIED_FROM not in document:
            return text
        match document[VERIFIED_FROM]:
            case {"broker": str(broker)} if broker == str(source):
                return text
        whole = members(text)
    except (ValueError, RecursionError):
        raise Rejected("the broker", "its headers cannot be read") from None
    named = {CLAIMED_FROM if name == VERIFIED_FROM else name: whole[name] for name in whole}
    return f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in named.items())}}}"
