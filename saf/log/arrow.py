"""Messages in Arrow: the types of their columns, as read and as Spark has them, and equal rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import MESSAGE

MOMENT = pa.timestamp("us", "UTC")
READ = {
    "uuid": pa.binary(),
    "text": pa.string(),
    "boolean": pa.bool_(),
    "bigint": pa.int64(),
    "jsonb": pa.string(),
    "bytea": pa.binary(),
    "timestamptz": MOMENT,
}
"""By the type in PostgreSQL, once `saf.log.columns.plain` has made it one to compute with."""
TYPES = {column.name: READ[column.type] for column in MESSAGE}

OF_SPARK = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "int": pa.int32(),
    "binary": pa.binary(),
    "timestamp": MOMENT,
}
"""By what Spark calls it."""

MESSAGES = pa.schema([("id", pa.int64()), ("shard", pa.int16()), *TYPES.items()])
"""Messages as the engine reads them."""


def distinct(columns: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of the distinct rows, in order of appearance, where each is first; and which each row is."""
    codes = np.zeros(columns.num_rows, np.int64)
    for column in columns.columns:
        if column.null_count < len(column):
            encoded = column.combine_chunks().dictionary_encode()
            numbers = pc.fill_null(encoded.indices, -1).to_numpy() + 1
            codes = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)[
                1
            ]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[which]
