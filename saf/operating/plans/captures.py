"""Captures of a plan: tables whose changes are messages, by their names with the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from saf.capture import stored
from saf.capture.adoption import Adoption
from saf.capture.drift import drift
from saf.capture.stored import Capture, Declaration
from saf.errors import ConfigurationError, UsageError

WRITTEN, DRIFTED = "as written", "not as written"


def listed(
    connection: psycopg.Connection[Any],
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the captures of a broker, by table; one that has drifted differs from any plan."""
    return {
        (capture.called,): {
            "service": capture.to_service,
            "key": capture.key,
            "columns": list(capture.columns),
            "when": capture.condition,
            "from_service": capture.from_service,
            "message_type": capture.message_type,
            "triggers": triggers(connection, capture),
        }
        for capture in stored.listed(connection)
    }


def triggers(connection: psycopg.Connection[Any], item: Capture | Adoption) -> str:
    """Return whether a capture's or adoption's triggers are as they were written."""
    return DRIFTED if any(found.misses for found in drift(connection, item)) else WRITTEN


def checked(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's entry with the values that `listed` would return for it.

    Raises:
        ConfigurationError: names the value at fault.
    """
    quoted(table)
    kind = values["message_type"] or table.partition(".")[2]
    when = values["when"]
    try:
        when = when if when is None else stored.is_expression(when, "when")
    except UsageError as error:
        raise ConfigurationError(f"captures.{table}: {error}") from None
    columns = list(values["columns"])
    return {
        **values,
        "columns": columns,
        "message_type": kind,
        "when": when,
        "triggers": WRITTEN,
    }


def create(
    connection: psycopg.Connection[Any], key: tuple[Any, ...], values: Mapping[str, Any]
) -> None:
    """Add or change a capture.

    Raises:
        ConfigurationError: the table cannot be captured so.
    """
    declared = Declaration(
        table=quoted(key[0]),
        service=values["service"],
        key=values["key"],
        columns=tuple(values["columns"]),
        condition=values["when"],
        from_service=values["from_service"],
        message_type=values["message_type"],
    )
    stored.put(connection, stored.review(connection, declared))


def remove(connection: psycopg.Connection[Any], key: tuple[Any, ...]) -> None:
    """Remove a capture."""
    stored.remove(connection, stored.named(connection, quoted(key[0])))


def quoted(table: str, part: str = "captures") -> str:
    """Return a table's name as in SQL, of its schema and name as they are.

    >>> quoted("sales.Orders")
    '"sales"."Orders"'

    Raises:
        ConfigurationError: it has no schema.
    """
    schema, dot, name = table.partition(".")
    if not (schema and dot and name):
        raise ConfigurationError(f"{part}.{table}: write the table with its schema: public.{table}")
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name))
