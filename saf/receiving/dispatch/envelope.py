r"""Conversion of a message into a request: headers and a body.

    binary       CloudEvents 1.0, binary mode: the body unchanged, attributes as headers ce-…
    structured   CloudEvents 1.0 as one JSON object, with the body in it
    batch        CloudEvents 1.0 as a JSON array of such objects
    plain        the body unchanged, the message's headers as HTTP headers

In a header, an attribute's value may be any text: characters that HTTP does not allow are
percent-encoded, as CloudEvents demands. So no value can begin a new line. A message's header is not
sent if HTTP does not allow its name, if it belongs to HTTP or saf, or if its value is a list or an
object.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from functools import lru_cache
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid5

from saf.message import CONTENT_TYPE, RESERVED_HEADER, STRICT
from saf.received import Headers, Received
from saf.receiving.dispatch import settings
from saf.receiving.dispatch.settings import Endpoint

NOT_IN_ATTRIBUTES = re.compile(r"[^!#$&-~]")
"""Characters that CloudEvents encodes: space, quote, percent, and all but printable ASCII."""

NOT_IN_HEADERS = re.compile(r"[^ -$&-~]")
"""Characters encoded in other headers: percent, and all but printable ASCII."""

SHORT = 200
"""Length up to which decoded headers are cached, because messages often share them."""

ATTRIBUTE = re.compile(r"[a-z0-9]{1,20}")
"""Names allowed for extension attributes of CloudEvents."""

STRUCTURED = "application/cloudevents+json; charset=utf-8"
BATCH = "application/cloudevents-batch+json; charset=utf-8"

BATCHES = UUID("1d0c4c5e-6a53-5b9e-8f0e-0b8d4d1c7f55")
"""Namespace for the ids of requests with several messages."""

CORE = frozenset(
    {"id", "source", "specversion", "type", "subject", "time", "datacontenttype", "dataschema"}
    | {"data", "partitionkey"}
)
"""Attributes that saf writes, and names that CloudEvents reserves."""

TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
"""Names allowed for HTTP headers."""

OF_HTTP = frozenset(
    {"accept", "accept-encoding", "authorization", "connection", "content-encoding"}
    | {"content-length", "content-type", "cookie", "date", "expect", "forwarded", "host"}
    | {"idempotency-key", "keep-alive", "origin", "referer", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "user-agent", "via"}
)
"""Headers with a meaning in HTTP, and headers that saf writes."""

BEGINNINGS = ("proxy-", "sec-", "webhook-", "x-forwarded-", "ce-", RESERVED_HEADER)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to an endpoint."""

    message_id: str
    headers: Mapping[str, str]
    body: bytes


def request(message: Received, endpoint: Endpoint) -> Request:
    """Return the request for a message.

    Raises:
        UnreadableHeaders: Python cannot decode the message's headers.
        UnreadableBody: the message lacks a member that the template names.
    """
    carried, content_type = _carried(message)
    body = message.body
    if endpoint.template is not None:
        content_type = endpoint.template_type or settings.JSON
        body = settings.filled(endpoint.template, content_type, message)
    if endpoint.mode == "plain":
        headers = plain(carried)
    elif endpoint.mode == "structured":
        body, headers, content_type = event(message, endpoint), {}, STRUCTURED
    else:
        context = attributes(message, endpoint, carried)
        headers = {f"ce-{name}": encoded(value) for name, value in context.items()}
    if content_type is not None:
        headers["Content-Type"] = encoded(content_type, NOT_IN_HEADERS)
    number = headers.get("ce-id") or str(message.message_id)
    headers["Idempotency-Key"] = number
    return Request(message_id=number, headers=headers, body=body)


def event(message: Received, endpoint: Endpoint) -> bytes:
    """Return a message as an event in JSON.

    Raises:
        UnreadableHeaders: Python cannot decode the message's headers.
    """
    carried, content_type = _carried(message)
    return structured(attributes(message, endpoint, carried), content_type, message.body)


def together(events: Mapping[UUID, bytes]) -> Request:
    """Return the request for several events, given by their messages' ids.

    The request's id is derived from theirs: sending the same messages together again repeats it.
    """
    number = str(uuid5(BATCHES, " ".join(map(str, events))))
    return Request(
        message_id=number,
        headers={"Content-Type": BATCH, "Idempotency-Key": number},
        body=b"[" + b",".join(events.values()) + b"]",
    )


def _carried(message: Received) -> tuple[Mapping[str, Any], str | None]:
    """Return a message's headers and its content type."""
    text = message.headers_text
    if text is not None and len(text) <= SHORT:
        return _decoded(text)
    return _with_type(message.headers)


@lru_cache(maxsize=256)
def _decoded(text: str) -> tuple[Mapping[str, Any], str | None]:
    document = json.loads(text)
    return _with_type(Headers(document) if isinstance(document, dict) else document)


def _with_type(carried: object) -> tuple[Mapping[str, Any], str | None]:
    if not isinstance(carried, Mapping):
        return {}, None
    content_type = carried.get(CONTENT_TYPE)
    return carried, content_type if isinstance(content_type, str) and content_type else None


def attributes(message: Received, endpoint: Endpoint, carried: Mapping[str, Any]) -> dict[str, str]:
    """Return the event's attributes, including the message's headers that can be attributes."""
    created = message.created_at.astimezone(UTC).replace(tzinfo=None)
    event = {
        "specversion": "1.0",
        "id": str(message.message_id),
        "source": endpoint.source or source(message.from_service),
        "type": message.message_type or "saf.message",
        "time": f"{created.isoformat(timespec='microseconds')}Z",
    }
    if message.key:
        event["subject"] = event["partitionkey"] = message.key
    for name, value in carried.items():
        if ATTRIBUTE.fullmatch(name) and name not in CORE and scalar(value):
            event[name] = text(value)
    return event


def structured(event: Mapping[str, str], content_type: str | None, body: bytes) -> bytes:
    """Return the event as JSON: a JSON body unchanged, text as a string, any other body in base64.

    >>> structured({"id": "1"}, "application/json", b'{"a": 1.50}')
    b'{"id": "1", "datacontenttype": "application/json", "data": {"a": 1.50}}'
    >>> structured({"id": "1"}, "application/json", b"NaN")
    b'{"id": "1", "datacontenttype": "application/json", "data_base64": "TmFO"}'
    >>> structured({"id": "1"}, "text/plain", b"hello")
    b'{"id": "1", "datacontenttype": "text/plain", "data": "hello"}'
    """
    given = content_type or "application/octet-stream"
    beginning = json.dumps({**event, "datacontenttype": given})[:-1].encode()
    kind = given.partition(";")[0].strip().lower()
    data = b'"data_base64": "%b"' % base64.b64encode(body)
    # a body that does not match its type is sent unchanged
    with suppress(ValueError, RecursionError):
        if kind.endswith(("/json", "+json")):
            STRICT.decode(body.decode())
            data = b'"data": ' + body
        elif kind.startswith("text/"):
            data = b'"data": ' + json.dumps(body.decode()).encode()
    return b"%b, %b}" % (beginning, data)


def plain(carried: Mapping[str, Any]) -> dict[str, str]:
    """Return the message's headers that can be HTTP headers."""
    return {
        name: encoded(text(value), NOT_IN_HEADERS)
        for name, value in carried.items()
        if TOKEN.fullmatch(name)
        and name.lower() not in OF_HTTP
        and not name.lower().startswith(BEGINNINGS)
        and scalar(value)
    }


@lru_cache(maxsize=256)
def source(service: str | None) -> str:
    """Return the source of an event as a reference: the sender's service."""
    return f"/saf/{quote(service or '', safe='')}"


def encoded(value: str, what: re.Pattern[str] = NOT_IN_ATTRIBUTES) -> str:
    r"""Return a text as a header's value, percent-encoded where HTTP does not allow it.

    >>> encoded("Zürich 100%\r\nHost: evil")
    'Z%C3%BCrich%20100%25%0D%0AHost:%20evil'
    >>> encoded('text/plain; charset="utf-8"\n', NOT_IN_HEADERS)
    'text/plain; charset="utf-8"%0A'
    """
    return what.sub(_percent, value)


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="replace"))


def scalar(value: object) -> bool:
    """Return whether a header's value can be sent as one text; null cannot."""
    return isinstance(value, (str, int, float)) and value != ""


def text(value: object) -> str:
    """Return a scalar as text, as in JSON.

    >>> text(True), text(7), text("x")
    ('true', '7', 'x')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
