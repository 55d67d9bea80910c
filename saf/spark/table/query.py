"""What a read asks a log for: columns, filters, and the query of both.

*Columns.* A DataFrame has all columns, or those of the schema that its reader gives. The columns of
`saf.columns` have the Spark types listed there, and ``shard`` is a message's bucket. Besides:

    headers map<string,string>    default; texts as they are, null as NULL, other values as JSON
    headers string                the JSON text; a map is NULL if it is not a JSON object
    text string                   the body as UTF-8, or NULL if it is not UTF-8; only if requested
    broker string                 the broker's name; if requested, or if several are read

`check_schema` rejects a schema with other columns or types before anything is read. To get another
type, cast the column in the query. A row of an older schema may be too large to read (see
`saf.limits`). Its large values are NULL, and so is its body, which distinguishes it from other
rows.

Headers become maps here, from the JSON text that the database sends. Most messages share a few
headers, so each distinct text is parsed once per batch of rows. Parsing at the server would cost
more than everything else that it does to read a row.

*Filters.* The database applies some, so that rows they drop are never read: equality, IN, ranges
and NULL checks of ``id``, ``shard``, ``to_service``, ``key``, ``message_type`` and ``created_at``.
Spark applies all others. With a given key or shard, no other shard is read. A filter drops the rows
for which it is not true, as in SQL. Spark compares texts by their bytes in UTF-8, and so does the
database here, whatever its collation is. psycopg quotes the values, because COPY takes no
parameters. Filters with values that PostgreSQL cannot hold stay with Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)
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
from saf.log.columns import MORE, MORE_THAN_COMMON, UNCOMMON, bounded
from saf.log.shards import shard_of

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
"""Spark's types by name, because Spark needs a JVM to look them up."""
UUIDS = tuple(name for name, type_ in IN_TABLES.items() if type_ == "uuid")

# Values that are not texts are cut out verbatim, so numbers need no parsing
DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0)
JSON_TEXT = r'"(?:[^"\\]|\\.)*"'
NAME = re.compile(JSON_TEXT)
TOKEN = re.compile(JSON_TEXT + r"|[][{},]")


def schema_of(log: str, *, several: bool = False) -> StructType:
    """Return the columns of a log by default; with ``several``, for a read of several brokers."""
    return StructType(
        [
            StructField(name, types[0], name not in ("id", "shard"))
            for name, types in _types(log).items()
            if name != TEXT and (several or name != BROKER)
        ]
    )


def check_schema(log: str, asked: StructType) -> None:
    """Check that a log has the columns that a reader asks for.

    Raises:
        ConfigurationError: a column is missing, or has another type.
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
        if not any(same_type(field.dataType, type_) for type_ in types):
            raise ConfigurationError(
                f"the column {field.name!r} of an {log} is a "
                f"{' or a '.join(type_.simpleString() for type_ in types)}, and not a "
                f"{field.dataType.simpleString()}: read it so, and cast it"
            )


def _types(log: str) -> dict[str, tuple[DataType, ...]]:
    """Return the possible types of each column."""
    types: dict[str, tuple[DataType, ...]] = {}
    for name, type_ in IN_TABLES.items():
        if log == "inbox" or name not in ONLY_INBOX:
            types[name] = (OF_SPARK[SPARK[type_]],)
    types["headers"] = (MapType(StringType(), StringType()), StringType())
    types[TEXT] = (StringType(),)
    types[BROKER] = (StringType(),)
    return types


def same_type(first: DataType, other: DataType) -> bool:
    """Return whether two types are the same, whatever may be NULL in a map."""
    if isinstance(first, MapType) and isinstance(other, MapType):
        return first.keyType == other.keyType and first.valueType == other.valueType
    return first == other


def columns_read(asked: StructType, others: Iterable[str]) -> list[str]:
    """Return the log's columns to read for the requested columns and for ``others``."""
    names = {"body" if name == TEXT else name for name in asked.fieldNames()}
    return [name for name in IN_TABLES if name in {"id", *names, *others}]


def at_source(names: Iterable[str], *, kept: bool) -> list[str | sql.Composable]:
    """Return the bounded SQL expressions of columns; ``kept``: see `saf.log.columns.selected`."""
    return [bounded(name, kept="true" if kept else "false") for name in names]


def shaped(rows: pa.RecordBatch, asked: StructType, broker: str) -> pa.RecordBatch:
    """Convert rows read at a broker to the rows that Spark expects for a schema."""
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
    """Return bodies as texts; a body that is not UTF-8 becomes NULL.

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


def maps(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    """Return JSON objects, in PostgreSQL's jsonb format, as maps; NULL for other JSON."""
    encoded = texts.dictionary_encode()
    known = pa.array(
        [None if text is None else members(text) for text in encoded.dictionary.to_pylist()], type_
    )
    return known.take(encoded.indices)


def members(text: str) -> list[tuple[str, str | None]] | None:
    """Return a JSON object's members: texts as they are, null as None, other values as JSON.

    The text must have PostgreSQL's jsonb format.

    >>> members('{"a": "b\\\\n", "n": 1.10, "o": {"x": [1, "}"]}, "z": null}')
    [('a', 'b\\n'), ('n', '1.10'), ('o', '{"x": [1, "}"]}'), ('z', None)]
    >>> members("{}"), members("[1]")
    ([], None)
    """
    if not text.startswith("{"):
        return None
    try:
        found = DECODER.decode(text)
    except RecursionError:  # nested more deeply than Python supports
        return [*_cut(text)]
    if all(value is None or isinstance(value, str) for value in found.values()):
        return [*found.items()]
    return [*_cut(text)]


def _cut(text: str) -> Iterator[tuple[str, str | None]]:
    at = 1
    while text[at] == '"':
        name = NAME.match(text, at)
        assert name is not None  # noqa: S101 - an object's member begins with its name
        at = name.end() + len(": ")
        end = _end(text, at)
        raw = text[at:end]
        value = None if raw == "null" else json.loads(raw) if raw[0] == '"' else raw
        yield json.loads(name[0]), value
        if text[end] == "}":
            return
        at = end + len(", ")


def _end(text: str, at: int) -> int:
    """Return the position where a member's value ends."""
    depth = 0
    for token in TOKEN.finditer(text, at):
        if token[0] in "[{":
            depth += 1
        elif depth == 0 and token[0] in "}],":
            return token.start()
        elif token[0] in "]}":
            depth -= 1
    raise ValueError("not an object as PostgreSQL writes it")


TEXTS = ("to_service", "key", "message_type")
NUMBERS = ("id", "shard")
# Spark may compare a shard with numbers outside smallint's bounds
TYPES = {"id": "bigint", "shard": "bigint", "created_at": "timestamptz"}
COMPARISONS = (
    *(EqualTo, EqualNullSafe),
    *(GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual),
)
RANGES: dict[type[Filter], str] = {
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}

ROWS = "SELECT {columns} FROM ({rows}) AS message WHERE {conditions}"
IS_ONE_OF = "{column} = ANY ({values}::{type}[])"
IN_RANGE = "{column} {operator} {value}::{type}"
# As bytes, because the collation defines the order of texts
TEXT_IN_RANGE = "convert_to({column}, 'UTF8') {operator} convert_to({value}::text, 'UTF8')"


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One filter in the form that the database applies."""

    column: str
    operator: str
    """``in``, one of `RANGES`, ``null`` or ``not null``."""
    values: tuple[Any, ...] = ()
    text: str
    """The condition in WHERE, quoted and complete."""

    @property
    def among(self) -> tuple[Any, ...] | None:
        """All values that the column may have, if the filter lists them."""
        return self.values if self.operator == "in" else None


def condition(given: Filter) -> Condition | None:
    """Translate a filter for the database; return None if Spark must apply it."""
    (column, *more) = getattr(given, "attribute", ("",))
    if more or column not in (*TEXTS, *NUMBERS, "created_at"):
        return None
    name = sql.Identifier(column)
    if isinstance(given, IsNull | IsNotNull):
        no = "" if isinstance(given, IsNull) else "not "
        text = _text(f"{{column}} IS {no.upper()}NULL", column=name)
        return Condition(column=column, operator=f"{no}null", text=text)
    values: tuple[Any, ...]
    if isinstance(given, In):
        # NULL in the list is equal to nothing
        values = tuple(value for value in given.value if value is not None)
    elif isinstance(given, COMPARISONS):
        values = (given.value,)
    else:
        return None
    if not all(_fits(column, value) for value in values):
        return None
    type_ = sql.SQL(TYPES.get(column, "text"))
    if operator := RANGES.get(type(given)):
        query = TEXT_IN_RANGE if column in TEXTS else IN_RANGE
        parts = {"column": name, "operator": sql.SQL(operator), "type": type_}
        text = _text(query, value=sql.Literal(values[0]), **parts)
        return Condition(column=column, operator=operator, values=values, text=text)
    # numbers as texts, so that an empty list is valid SQL
    listed = sql.Literal([str(value) for value in values])
    text = _text(IS_ONE_OF, column=name, values=listed, type=type_)
    return Condition(column=column, operator="in", values=values, text=text)


def shards_of(conditions: Iterable[Condition], shards: int) -> list[int]:
    """Return those of ``shards`` shards that may contain rows matching all conditions."""
    found = set(range(shards))
    for item in conditions:
        if item.among is not None and item.column == "key":
            found &= {shard_of(key, shards) for key in item.among}
        elif item.among is not None and item.column == "shard":
            found &= set(item.among)
    return sorted(found)


def _fits(column: str, value: Any) -> bool:
    """Return whether PostgreSQL can hold a value in the column's type."""
    if column in TEXTS:
        return isinstance(value, str) and "\0" not in value and _is_utf8(value)
    if column in NUMBERS:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, datetime) and value.tzinfo is not None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(query: str, **parts: sql.Composable) -> str:
    return sql.SQL(query).format(**parts).as_string(None)


@dataclass(frozen=True, kw_only=True)
class Query:
    """The query for each partition."""

    asked: StructType
    conditions: tuple[Condition, ...] = ()

    @property
    def names(self) -> list[str]:
        """The log's columns that the query returns, including the id."""
        return columns_read(self.asked, ())

    @property
    def has_seldom(self) -> bool:
        """True if the query returns columns that most messages lack."""
        return not UNCOMMON.keys().isdisjoint(self.names)

    def columns(self, *, kept: bool, common: bool = False) -> list[str | sql.Composable]:
        """Return the log's columns to read; ``common``: see `saf.log.columns.common`."""
        others = (condition.column for condition in self.conditions)
        names = columns_read(self.asked, others)
        if not common:
            return at_source(names, kept=kept)
        common_names = [name for name in names if name not in UNCOMMON]
        return [*at_source(common_names, kept=kept), MORE_THAN_COMMON]

    def of(self, rows: str, *, common: bool = False) -> str:
        """Return the whole query around ``rows``, a query for its `columns`."""
        names = self.names
        if common:
            names = [*(name for name in names if name not in UNCOMMON), MORE]
        conditions = " AND ".join(["true", *(condition.text for condition in self.conditions)])
        return (
            sql.SQL(ROWS)
            .format(
                columns=sql.SQL(", ").join(map(sql.Identifier, names)),
                rows=sql.SQL(rows),
                conditions=sql.SQL(conditions),
            )
            .as_string(None)
        )
