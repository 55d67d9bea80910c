r"""How a message becomes a request: headers and a body.

    binary   CloudEvents 1.0, binary content mode: the body as it is, attributes as headers ce-…
    plain    the body as it is, the message's headers as headers of HTTP

An attribute's value may be any text: what HTTP does not allow in a header is percent-encoded, as
CloudEvents demands. So no value can begin a new line. A header of the message whose name HTTP does
not allow, that belongs to HTTP or to saf, or whose value is a list or an object, is not sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any
from urllib.parse import quote

from saf.dispatch.settings import Endpoint
from saf.message import CONTENT_TYPE, RESERVED_HEADER
from saf.received import Received

SAFE = "".join(chr(one) for one in range(0x21, 0x7F) if chr(one) not in '"%')
"""What CloudEvents leaves as it is in a header."""

ATTRIBUTE = re.compile(r"[a-z0-9]{1,20}")
"""A name that an extension attribute of CloudEvents may have."""

CORE = frozenset(
    {"id", "source", "specversion", "type", "subject", "time", "datacontenttype", "dataschema"}
    | {"data", "partitionkey"}
)
"""Attributes that saf writes, and names that CloudEvents reserves."""

TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
"""A name that a header of HTTP may have."""

OF_HTTP = frozenset(
    {"accept", "accept-encoding", "authorization", "connection", "content-encoding"}
    | {"content-length", "content-type", "cookie", "date", "expect", "forwarded", "host"}
    | {"idempotency-key", "keep-alive", "origin", "referer", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "user-agent", "via"}
)
"""Headers that mean something to HTTP, or that saf writes."""

BEGINNINGS = ("proxy-", "sec-", "webhook-", "x-forwarded-", "ce-", RESERVED_HEADER)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent."""

    message_id: str
    headers: Mapping[str, str]
    body: bytes


def request(message: Received, endpoint: Endpoint) -> Request:
    """The request that a message becomes.

    Raises:
        UnreadableHeaders: Python cannot decode the message's headers.
    """
    carried = message.headers
    if not isinstance(carried, Mapping):
        carried = {}
    headers = plain(carried) if endpoint.mode == "plain" else binary(message, endpoint, carried)
    content_type = carried.get(CONTENT_TYPE)
    if isinstance(content_type, str) and content_type:
        headers["Content-Type"] = encoded(content_type, safe=SAFE + ' "')
    headers["Idempotency-Key"] = str(message.message_id)
    return Request(message_id=str(message.message_id), headers=headers, body=message.body)


def binary(message: Received, endpoint: Endpoint, carried: Mapping[str, Any]) -> dict[str, str]:
    """The headers of CloudEvents: its attributes, and the message's headers that can be such."""
    created = message.created_at.astimezone(UTC)
    headers = {
        "ce-specversion": "1.0",
        "ce-id": str(message.message_id),
        "ce-source": encoded(endpoint.source or source(message)),
        "ce-type": encoded(message.message_type or "saf.message"),
        "ce-time": f"{created:%Y-%m-%dT%H:%M:%S.%fZ}",
    }
    if message.key:
        headers["ce-subject"] = headers["ce-partitionkey"] = encoded(message.key)
    for name, value in carried.items():
        if ATTRIBUTE.fullmatch(name) and name not in CORE and scalar(value):
            headers[f"ce-{name}"] = encoded(text(value))
    return headers


def plain(carried: Mapping[str, Any]) -> dict[str, str]:
    """The message's headers that can be headers of HTTP."""
    return {
        name: encoded(text(value), safe=SAFE + ' "')
        for name, value in carried.items()
        if TOKEN.fullmatch(name)
        and name.lower() not in OF_HTTP
        and not name.lower().startswith(BEGINNINGS)
        and scalar(value)
    }


def source(message: Received) -> str:
    """Where an event comes from, as a reference: the sender's service."""
    return f"/saf/{quote(message.from_service or '', safe='')}"


def encoded(value: str, safe: str = SAFE) -> str:
    r"""A text as the value of a header, percent-encoded where HTTP does not allow it.

    >>> encoded("Zürich 100%\r\nHost: evil")
    'Z%C3%BCrich%20100%25%0D%0AHost:%20evil'
    """
    return quote(value, safe=safe, errors="replace")


def scalar(value: object) -> bool:
    """Whether a header of a message can be written as one text; null says nothing."""
    return isinstance(value, (str, int, float)) and value != ""


def text(value: object) -> str:
    """A scalar as text, as JSON has it.

    >>> text(True), text(7), text("x")
    ('true', '7', 'x')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
