"""Filters that the database applies, so that rows they drop are never read.

For ``id``, ``shard``, ``to_service``, ``key``, ``message_type`` and ``created_at``: equality, IN,
ranges, and NULL checks. Spark applies all others. With a given key or shard, no other shard is
read.

A filter drops the rows for which it is not true, as in SQL. Spark compares texts by their bytes in
UTF-8, and so does the database here, whatever its collation is. psycopg quotes the values, because
COPY takes no parameters. Filters with values that PostgreSQL cannot hold stay with Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

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

from saf.log.shards import shard_of

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
