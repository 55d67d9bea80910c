"""The columns of a log in Spark: their types, what is read for each, and how it gets its type.

A DataFrame has all columns, or those of the schema that its reader gives. The columns of
`saf.columns` have Spark's types there, and ``shard`` says which bucket a message is in. Besides:

    headers map<string,string>    as they come: text as it is, JSON's null as NULL, all else as JSON
    headers string                the JSON text; a map is NULL where it is no JSON object
    text string                   the body as UTF-8, or NULL where it is none; only if asked for
    broker string                 the broker's name; if asked for, or where several are read

A row of an older schema may be too large to be read (see `saf.limits`). Its large values are NULL,
and so is its body, which tells it from other rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from psycopg import sql
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from saf.columns import IN_TABLES, SPARK
from saf.config import did_you_mean
from saf.destinations.texts import uuids
from saf.errors import ConfigurationError
from saf.log.columns import bounded
from saf.spark.table.headers import maps

TEXT, BROKER = "text", "broker"
ONLY_INBOX = ("source", "received_at")
OF_SPARK: dict[str, DataType] = {
    "string": StringType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
}
"""Spark's types by their names, because to look them up takes a JVM."""
UUIDS = tuple(name for name, type_ in IN_TABLES.items() if type_ == "uuid")


def schema_of(log: str, *, several: bool = False) -> StructType:
    """The columns that a log has as they come; ``several``: those of several brokers."""
    return StructType(
        [
            StructField(name, types[0], name not in ("id", "shard"))
            for name, types in _types(log).items()
            if name != TEXT and (several or name != BROKER)
        ]
    )


def check_schema(log: str, asked: StructType) -> None:
    """Make sure that a log has the columns that a reader has asked for.

    Raises:
        ConfigurationError: it has not, or not of this type.
    """
    known = _types(log)
    if not asked.fields:
        raise ConfigurationError("the schema given to the format saf names no column")
    for field in asked.fields:
        if field.name not in known:
            raise ConfigurationError(
                f"an {log} has no column {field.name!r}{did_you_mean(field.name, known)}, only "
                f"{', '.join(known)}"
            )
        types = known[field.name]
        if not any(_same(field.dataType, type_) for type_ in types):
            raise ConfigurationError(
                f"the column {field.name!r} of an {log} is a "
                f"{' or a '.join(type_.simpleString() for type_ in types)}, and not a "
                f"{field.dataType.simpleString()}: read it so, and cast it"
            )


def columns_read(asked: StructType, others: Iterable[str]) -> list[str]:
    """The columns of the log that are read for those asked for and for ``others``."""
    names = {"body" if name == TEXT else name for name in asked.fieldNames()}
    return [name for name in IN_TABLES if name in {"id", *names, *others}]


def at_source(names: Iterable[str], *, kept: bool) -> list[str | sql.Composable]:
    """The expressions for columns, bounded; ``kept`` as in `saf.log.columns.selected`."""
    return [bounded(name, kept="true" if kept else "false") for name in names]


def shaped(rows: pa.RecordBatch, asked: StructType, broker: str) -> pa.RecordBatch:
    """Turn what was read at a broker into what Spark expects for a schema."""
    schema = to_arrow_schema(asked, timezone="UTC")
    columns = [
        pa.repeat(pa.scalar(broker, field.type), rows.num_rows)
        if field.name == BROKER
        else _column(rows, field)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(rows: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name == TEXT:
        return decoded(rows["body"])
    if field.name in UUIDS and not pa.types.is_string(rows[field.name].type):
        return uuids(rows[field.name]).cast(field.type)
    if field.name == "headers" and pa.types.is_map(field.type):
        return maps(rows["headers"], field.type)
    return rows[field.name].cast(field.type)


def decoded(bodies: pa.Array) -> pa.Array:
    """Return bodies as texts, and NULL for what is no UTF-8.

    >>> decoded(pa.array([b"one", b"\\xff", None])).to_pylist()
    ['one', None, None]
    """
    try:
        return bodies.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_decoded(body) for body in bodies.to_pylist()], pa.string())


def _decoded(body: bytes | None) -> str | None:
    try:
        return None if body is None else body.decode()
    except UnicodeDecodeError:
        return None


def _types(log: str) -> dict[str, tuple[DataType, ...]]:
    """The types in which each column can be had."""
    types: dict[str, tuple[DataType, ...]] = {}
    for name, type_ in IN_TABLES.items():
        if log == "inbox" or name not in ONLY_INBOX:
            types[name] = (OF_SPARK[SPARK[type_]],)
    types["headers"] = (MapType(StringType(), StringType()), StringType())
    types[TEXT] = (StringType(),)
    types[BROKER] = (StringType(),)
    return types


def _same(one: DataType, other: DataType) -> bool:
    if isinstance(one, MapType) and isinstance(other, MapType):
        return one.keyType == other.keyType and one.valueType == other.valueType
    return one == other
