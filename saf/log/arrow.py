"""Arrow types of a message's columns: as they are read, and as Spark passes them on."""

from __future__ import annotations

import pyarrow as pa

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
"""Arrow's types by PostgreSQL's, as `saf.log.columns.plain` returns them."""
TYPES = {column.name: READ[column.type] for column in MESSAGE}

OF_SPARK = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "long": pa.int64(),
    "int": pa.int32(),
    "binary": pa.binary(),
    "timestamp": MOMENT,
}
"""Arrow's types by Spark's names."""

MESSAGES = pa.schema([("id", pa.int64()), ("shard", pa.int16()), *TYPES.items()])
"""The schema of messages as the engine reads them."""
