"""Properties of messages in AMQP 0.9.1, written by Arrow, without Python code per header.

headers          saf's and the sender's, all texts
message-id       the message's id, by which a consumer recognises repeats
delivery-mode    2: a durable queue keeps the message over a restart
content-type     if the sender has set a header with this name
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.events import CONTENT_TYPE
from saf.destinations.mapping import Mapped
from saf.destinations.packed import BYTES, NONE, joined, sizes
from saf.errors import Rejected

EVENTS = "cloudEvents_"
"""Prefix of CloudEvents attributes: AMQP 0.9.1 has no binding of its own, so this is AMQP 1.0's."""
LONGEST = 255
"""Longest name of a header, routing key or content type, in bytes."""
HAS_CONTENT_TYPE, HAS_HEADERS, HAS_MODE, HAS_ID = 1 << 15, 1 << 13, 1 << 12, 1 << 7
PERSISTENT = b"\2"


def check(where: str, what: Mapped) -> None:
    """Raise if AMQP cannot carry one of these messages.

    Raises:
        Rejected: a routing key or the name of a header is too long.
    """
    for topic in what.topics:
        if len(topic.encode()) > LONGEST:
            raise Rejected(where, f"its routing key has more than {LONGEST} bytes")
    for headers in what.own:
        for name in headers:
            if len(name.encode()) > LONGEST:
                raise Rejected(where, f"the name of a header has more than {LONGEST} bytes")


def properties(what: Mapped) -> list[bytes]:
    """Return the properties of each message."""
    constant = b"".join(
        _pair(name, values) for name, values in what.headers.items() if isinstance(values, str)
    )
    parts: list[Any] = [pa.scalar(constant, BYTES)]
    for name, values in what.headers.items():
        if not isinstance(values, str):
            head = pa.scalar(_short(name) + b"S", BYTES)
            encoded = values.cast(BYTES)
            parts.append(pc.binary_join_element_wise(head, sizes(encoded), encoded, NONE))
    own = [b"".join(_pair(name, value) for name, value in headers.items()) for headers in what.own]
    parts.append(pa.array(own, BYTES).take(pa.array(what.which)))
    table = joined(*parts)
    first = [_first(headers.get(CONTENT_TYPE)) for headers in what.own]
    ids = what.each("message_id")
    assert ids is not None  # noqa: S101 - each message has one
    result: list[bytes] = joined(
        pa.array(first, BYTES).take(pa.array(what.which)),
        sizes(table),
        table,
        pa.scalar(PERSISTENT + bytes([36]), BYTES),
        ids.cast(BYTES),
    ).to_pylist()
    return result


def _first(content_type: str | None) -> bytes:
    """Return the bytes before the headers: the property flags, and the content type."""
    flags = HAS_HEADERS | HAS_MODE | HAS_ID
    if content_type is None or len(content_type.encode()) > LONGEST:
        return struct.pack(">H", flags)
    return struct.pack(">H", flags | HAS_CONTENT_TYPE) + _short(content_type)


def _short(text: str) -> bytes:
    encoded = text.encode()
    return bytes([len(encoded)]) + encoded


def _pair(name: str, value: str) -> bytes:
    encoded = value.encode()
    return _short(name) + b"S" + struct.pack(">I", len(encoded)) + encoded
