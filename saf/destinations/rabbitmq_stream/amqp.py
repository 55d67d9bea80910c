"""Messages of AMQP 1.0 as streams hold them: written by Arrow, and read one by one.

properties                 only content-type, if the sender has set a header with this name
application-properties     the headers, saf's and the sender's, all texts
data                       the body, byte for byte
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import CONTENT_TYPE, Mapped
from saf.destinations.texts import BYTES, NONE, joined, numbers, sizes

EVENTS = "cloudEvents_"
"""Prefix of CloudEvents attributes, as the binding for AMQP defines it."""

SECTION = b"\0\x53"
PROPERTIES, APPLICATION_PROPERTIES, DATA = 0x73, 0x74, 0x75
SMALL_MAP = 0xC1
WIDTHS = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}
"""Bytes of a value of fixed size, by the high half of its type."""
SIZES = {0xA: ">B", 0xB: ">I", 0xC: ">B", 0xD: ">I", 0xE: ">B", 0xF: ">I"}
"""Format of the size before a value of variable size, by the high half of its type."""


def messages(what: Mapped) -> pa.Array:
    """Return messages as bytes."""
    constant = b"".join(
        text(name) + text(values)
        for name, values in what.headers.items()
        if isinstance(values, str)
    )
    pairs = np.full(what.count, sum(isinstance(one, str) for one in what.headers.values()))
    parts = [pa.scalar(constant, BYTES)]
    for name, values in what.headers.items():
        if not isinstance(values, str):
            head = pa.scalar(text(name) + b"\xb1", BYTES)
            encoded = values.cast(BYTES)
            parts.append(pc.binary_join_element_wise(head, sizes(encoded), encoded, NONE))
            pairs = pairs + np.asarray(values.is_valid(), np.int64)
    own = [b"".join(text(k) + text(v) for k, v in one.items()) for one in what.own]
    parts.append(pa.array(own, BYTES).take(pa.array(what.which)))
    pairs = pairs + np.array([len(one) for one in what.own], np.int64)[what.which]
    inner = joined(*parts)
    types = [_properties(one.get(CONTENT_TYPE)) for one in what.own]
    return joined(
        pa.array(types, BYTES).take(pa.array(what.which)),
        pa.scalar(SECTION + bytes([APPLICATION_PROPERTIES, 0xD1]), BYTES),
        numbers(np.asarray(pc.binary_length(inner)) + 4),
        numbers(pairs * 2),
        inner,
        pa.scalar(SECTION + bytes([DATA, 0xB0]), BYTES),
        sizes(what.body),
        what.body.cast(BYTES),
    )


def text(value: str) -> bytes:
    r"""Return a text as bytes.

    >>> text("ü")
    b'\xa1\x02\xc3\xbc'
    """
    encoded = value.encode()
    if len(encoded) < 1 << 8:
        return struct.pack(">BB", 0xA1, len(encoded)) + encoded
    return struct.pack(">BI", 0xB1, len(encoded)) + encoded


def read(message: bytes) -> tuple[dict[str, str], bytes]:
    """Return a message's headers that are texts, and its body.

    >>> read(b"\\0\\x53\\x74\\xc1\\x09\\x02\\xa1\\x01a\\xa1\\x03xyz\\0\\x53\\x75\\xa0\\x01b")
    ({'a': 'xyz'}, b'b')
    """
    headers: dict[str, str] = {}
    body, offset = b"", 0
    while offset < len(message):
        section, offset = message[offset + 2], offset + 3
        kind, first, end = _value(message, offset)
        if section == APPLICATION_PROPERTIES:
            headers = _texts(message, first + (1 if kind == SMALL_MAP else 4), end)
        elif section == DATA:
            body += message[first:end]
        offset = end
    return headers, body


def _texts(message: bytes, offset: int, end: int) -> dict[str, str]:
    """Return the pairs of a map where both are texts."""
    texts: list[str | None] = []
    while offset < end:
        kind, first, offset = _value(message, offset)
        texts.append(message[first:offset].decode() if kind in (0xA1, 0xB1) else None)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return {name: value for name, value in pairs if name is not None and value is not None}


def _value(message: bytes, offset: int) -> tuple[int, int, int]:
    """Return the type, start and end of a value."""
    kind = message[offset]
    offset += 1
    if (width := WIDTHS.get(kind >> 4)) is not None:
        return kind, offset, offset + width
    form = SIZES[kind >> 4]
    (size,) = struct.unpack_from(form, message, offset)
    first = offset + struct.calcsize(form)
    return kind, first, first + int(size)


def _properties(content_type: str | None) -> bytes:
    """Return the properties section; its seventh property is the content type."""
    if content_type is None:
        return b""
    encoded = content_type.encode()
    fields = b"\x40" * 6 + struct.pack(">BI", 0xB3, len(encoded)) + encoded
    return SECTION + struct.pack(">BBII", PROPERTIES, 0xD0, len(fields) + 4, 7) + fields
