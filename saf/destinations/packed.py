"""Columns as bytes of a protocol, written by Arrow, a chunk at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BYTES = pa.large_binary()
NONE = pa.scalar(b"", BYTES)


def joined(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Concatenate the parts of each message; null counts as empty."""
    return pc.binary_join_element_wise(*parts, NONE, null_handling="replace", null_replacement=b"")


def sizes(values: pa.Array) -> pa.Array:
    r"""Return the size of each value in four bytes; null for null.

    >>> sizes(pa.array([b"abc", None], BYTES)).to_pylist()
    [b'\x00\x00\x00\x03', None]
    """
    written = numbers(np.asarray(pc.fill_null(pc.binary_length(values), 0)))
    return pc.if_else(values.is_valid(), written, None) if values.null_count else written


def numbers(values: npt.NDArray[Any]) -> pa.Array:
    """Return numbers in four bytes each."""
    return fixed(values.astype(">u4"))


def fixed(values: npt.NDArray[Any]) -> pa.Array:
    """Return the bytes of each value of an array."""
    size = pa.binary(values.dtype.itemsize)
    array = pa.FixedSizeBinaryArray.from_buffers(
        size, len(values), [None, pa.py_buffer(values.tobytes())]
    )
    return pc.cast(array, BYTES)
