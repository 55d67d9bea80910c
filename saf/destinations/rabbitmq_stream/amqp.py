"""Messages of AMQP 1.0 as streams hold them: written by Arrow, and read one by one.

properties                 only content-type, if the sender has set a header with this name
application-properties     the headers, saf's and the sender's, all texts
data                       the body, byte for byte
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import CONTENT_TYPE, Mapped, texts_of
from saf.destinations.texts import BYTES, NONE, joined, numbers, sizes

EVENTS = "cloudEvents_"
"""Prefix of CloudEvents attributes, as the binding for AMQP defines it."""

SECTION = b"\0\x53"
PROPERTIES, APPLICATION_PROPERTIES, DATA = 0x73, 0x74, 0x75
VALUE, OTHER_BODIES = 0x77, (0x76, 0x77)
BYTES_OR_TEXT = (0xA0, 0xB0, 0xA1, 0xB1)
PROPERTY_NAMES = (
    *("message-id", "user-id", "to", "subject", "reply-to", "correlation-id", CONTENT_TYPE),
    *("content-encoding", "absolute-expiry-time", "creation-time", "group-id"),
    *("group-sequence", "reply-to-group-id"),
)
NUMBERS = {0x43: False, 0x44: False, 0x50: False, 0x51: True, 0x52: False, 0x53: False, 0x54: True,
           0x55: True, 0x60: False, 0x61: True, 0x70: False, 0x71: True, 0x80: False,
           0x81: True}  # fmt: skip
"""Types of whole numbers; True: signed."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
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


def parse(message: bytes) -> tuple[dict[str, bytes], bytes]:
    """Return a message's headers as bytes, and its body.

    The headers are the application properties, and the properties by their names in AMQP. Numbers
    and times become texts.

    >>> parse(b"\\0\\x53\\x74\\xc1\\x06\\x02\\xa1\\x01a\\x54\\xff\\0\\x53\\x75\\xa0\\x01b")
    ({'a': b'-1'}, b'b')

    Raises:
        ValueError: it is not a message of AMQP 1.0, or its body is neither bytes nor a text.
    """
    try:
        return _parsed(message)
    except (LookupError, struct.error, OverflowError) as error:
        raise ValueError(f"it is not a message of AMQP 1.0 ({type(error).__name__})") from None


def _parsed(message: bytes) -> tuple[dict[str, bytes], bytes]:
    headers: dict[str, bytes] = {}
    body, offset = b"", 0
    while offset < len(message):
        if message[offset : offset + 2] != SECTION:
            raise ValueError("it is not a message of AMQP 1.0 (no section)")
        section, offset = message[offset + 2], offset + 3
        kind, first, end = _value(message, offset)
        if end > len(message):
            raise ValueError("it is not a message of AMQP 1.0 (cut off)")
        if section == PROPERTIES:
            values = _values(message, kind, first, end)
            found = zip(PROPERTY_NAMES, values, strict=False)
            headers |= {name: value for name, value in found if value is not None}
        elif section == APPLICATION_PROPERTIES:
            values = _values(message, kind, first, end)
            names = [(name or b"").decode(errors="backslashreplace") for name in values[::2]]
            headers |= {
                name: value
                for name, value in zip(names, values[1::2], strict=True)
                if value is not None
            }
        elif section == DATA or (section == VALUE and kind in BYTES_OR_TEXT):
            body += message[first:end]
        elif section in OTHER_BODIES:
            raise ValueError("its body is neither bytes nor a text")
        offset = end
    return headers, body


def read(message: bytes) -> tuple[dict[str, str], bytes]:
    """Return the headers that are texts, and the body, of a message of any writer.

    >>> read(b"\\0\\x53\\x74\\xc1\\x09\\x02\\xa1\\x01a\\xa1\\x03xyz\\0\\x53\\x75\\xa0\\x01b")
    ({'a': 'xyz'}, b'b')
    """
    try:
        headers, body = parse(message)
    except ValueError:  # another writer's
        return {}, b""
    return texts_of(headers.items()), body


def _values(message: bytes, kind: int, first: int, end: int) -> list[bytes | None]:
    """Return the values of a list, or the names and values of a map."""
    values = []
    offset = first + {0xC: 1, 0xD: 4}.get(kind >> 4, 0)
    while offset < end:
        kind, first, offset = _value(message, offset)
        values.append(_as_bytes(kind, message[first:offset]))
    return values


def _as_bytes(kind: int, data: bytes) -> bytes | None:
    r"""Return a value as bytes; None for null.

    >>> _as_bytes(0x41, b""), _as_bytes(0x83, bytes(8)), _as_bytes(0x82, b"?\xf8" + bytes(6))
    (b'true', b'1970-01-01T00:00:00+00:00', b'1.5')
    """
    if kind in NUMBERS:
        return b"%d" % int.from_bytes(data, "big", signed=NUMBERS[kind])
    return WRITERS[kind](data) if kind in WRITERS else data


def _float(form: str, data: bytes) -> bytes:
    return repr(struct.unpack(form, data)[0]).encode()


def _time(data: bytes) -> bytes:
    milliseconds = int.from_bytes(data, "big", signed=True)
    return (EPOCH + timedelta(milliseconds=milliseconds)).isoformat().encode()


WRITERS: Mapping[int, Callable[[bytes], bytes | None]] = {
    0x40: lambda _: None,
    0x41: lambda _: b"true",
    0x42: lambda _: b"false",
    0x56: lambda data: b"true" if data[0] else b"false",
    0x72: partial(_float, ">f"),
    0x82: partial(_float, ">d"),
    0x83: _time,
    0x98: lambda data: str(UUID(bytes=data)).encode(),
}
"""Functions that write a value of other types as a text."""


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
