"""Adoptions of a plan: outbox tables whose rows are messages, by their names with the schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg

from saf.capture import adoption, stored
from saf.capture.adoption import Declared
from saf.errors import ConfigurationError, UsageError
from saf.operating.plans.captures import WRITTEN, quoted, triggers


def listed(
    connection: psycopg.Connection[Any],
) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return the adoptions of a broker, by table; one that has drifted differs from any plan."""
    return {
        (item.called,): {
            "fields": dict(item.fields),
            "service": item.to_service,
            "message_type": item.message_type,
            "from_service": item.from_service,
            "where": item.condition,
            "rows": item.rows,
            "mark": dict(item.mark),
            "order": item.order,
            "old": item.old,
            "triggers": triggers(connection, item),
        }
        for item in adoption.listed(connection)
    }


def checked(table: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's entry with the values that `listed` would return for it.

    Raises:
        ConfigurationError: names the value at fault.
    """
    quoted(table, "adoptions")
    where = values["where"]
    try:
        where = where if where is None else stored.is_expression(where, "where")
        adoption.check_fields(_declared(table, values))
    except UsageError as error:
        raise ConfigurationError(f"adoptions.{table}: {error}") from None
    return {**values, "where": where, "triggers": WRITTEN}


def create(
    connection: psycopg.Connection[Any], key: tuple[Any, ...], values: Mapping[str, Any]
) -> None:
    """Add or change an adoption, and send the old rows.

    Raises:
        ConfigurationError: the table cannot be adopted so.
    """
    adoption.put(connection, adoption.review(connection, _declared(key[0], values)))


def remove(connection: psycopg.Connection[Any], key: tuple[Any, ...]) -> None:
    """Remove an adoption."""
    name = quoted(key[0], "adoptions")
    stored.remove(connection, stored.one_of(connection, adoption.listed(connection), name))


def _declared(table: str, values: Mapping[str, Any]) -> Declared:
    return Declared(
        table=quoted(table, "adoptions"),
        fields=values["fields"],
        service=values["service"],
        message_type=values["message_type"],
        from_service=values["from_service"],
        condition=values["where"],
        rows=values["rows"],
        mark=values["mark"],
        order=values["order"],
        old=values["old"],
    )
