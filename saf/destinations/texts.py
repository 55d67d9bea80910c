"""Columns of messages as texts, for kinds that write them: by Arrow, without Python per message."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

TEXT = pa.large_string()
HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint8).reshape(256, 2)
DASHES = (8, 13, 18, 23)


def uuids(values: pa.Array) -> pa.Array:
    """Return UUIDs as texts, by a table of the two digits of each byte.

    >>> from uuid import UUID
    >>> uuids(pa.array([None, UUID(int=7).bytes])).to_pylist()
    [None, '00000000-0000-0000-0000-000000000007']
    """
    given = values.drop_null().cast(pa.binary(16))
    raw = np.frombuffer(given.buffers()[1], np.uint8)[given.offset * 16 :][: len(given) * 16]
    digits = HEX[raw].reshape(len(given), 32)
    text = np.full((len(given), 36), ord("-"), np.uint8)
    text[:, [place for place in range(36) if place not in DASHES]] = digits
    fixed = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(36), len(given), [None, pa.py_buffer(text.tobytes())]
    )
    written = pc.cast(pc.cast(fixed, pa.large_binary()), TEXT)
    if len(given) < len(values):
        place = pc.cumulative_sum(pc.cast(values.is_valid(), pa.int64()))
        written = written.take(pc.if_else(values.is_valid(), pc.subtract(place, 1), None))
    return written


def moments(values: pa.Array) -> pa.Array:
    """Return times as RFC 3339 writes them, in UTC, with microseconds.

    >>> moments(pa.array([7], pa.timestamp("us", "UTC"))).to_pylist()
    ['1970-01-01T00:00:00.000007Z']
    """
    return pc.strftime(values.cast(pa.timestamp("us")), "%Y-%m-%dT%H:%M:%SZ").cast(TEXT)


def whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
