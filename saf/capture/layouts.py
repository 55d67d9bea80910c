"""Layouts: outbox tables that other frameworks write, as adoptions.

A layout names the columns that its framework writes, and what the framework's relay does with rows
that were sent. Columns are found whatever the case and underscores of their names, because
applications choose their own: ``aggregateid``, ``aggregate_id`` and ``"AggregateId"`` are one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import psycopg
from psycopg import sql

from saf.capture.adoption import Declared
from saf.capture.rows import Rows
from saf.capture.table import find
from saf.errors import ConfigurationError

Name = Literal["debezium", "modulith", "masstransit"]
NAMES: tuple[Name, ...] = get_args(Name)

COLUMN = re.compile(r"\{(\w+)\}")
"""Finds a column in an expression of a layout."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An outbox table as a framework writes it."""

    fields: Mapping[str, str]
    """Fields of messages, with a column or an expression of columns."""
    optional: Collection[str] = ()
    """Columns that some versions of the framework do not have."""
    pending: str | None = None
    """Expression that is true for rows that were not sent; None: for all."""
    rows: Rows = "keep"
    mark: Mapping[str, str] = field(default_factory=dict)
    order: str | None = None
    """Column of the order of rows; None: the primary key."""
    untold: str = ""
    """Advice if rows do not tell whether they were sent."""


LAYOUTS: Mapping[Name, Layout] = {
    "debezium": Layout(
        fields={
            "message_id": "id",
            "to_service": "aggregatetype",
            "key": "aggregateid",
            "message_type": "type",
            "content_type": "('application/json')",
            "body": "payload",
        },
        untold="the connector's place tells which rows it has sent: add --new-only, so that it "
        "sends the existing rows, or --where for those that it has not sent",
    ),
    "modulith": Layout(
        fields={
            "message_id": "id",
            "message_type": "event_type",
            "content_type": "('application/json')",
            "body": "serialized_event",
        },
        optional=("status",),
        pending="{completion_date} IS NULL",
        rows="mark",
        mark={"completion_date": "now()", "status": "'COMPLETED'"},
        order="publication_date",
    ),
    "masstransit": Layout(
        fields={
            "message_id": "MessageId",
            "key": "ConversationId",
            # the message's own type comes first, then those that it implements
            "message_type": "(split_part({MessageType}, ';', 1))",
            "headers": "Headers",
            "content_type": "ContentType",
            "body": "Body",
            "deliver_at": "EnqueueTime",
            "expires_at": "ExpirationTime",
        },
        rows="delete",
    ),
}


def completed(
    connection: psycopg.Connection[Any], declared: Declared, name: Name | None
) -> Declared:
    """Return a declaration with its layout's values; declared values take precedence.

    Raises:
        ConfigurationError: the table has not the columns of the layout.
    """
    if name is None:
        return declared
    layout = LAYOUTS[name]
    columns = find(connection, declared.table).columns
    given = {*declared.fields}
    given |= {"to_service"} if declared.service is not None else set()
    given |= {"message_type"} if declared.message_type is not None else set()
    names = _Names(name, layout, columns)
    fields = {
        target: names.source(source)
        for target, source in layout.fields.items()
        if target not in given
    }
    condition = declared.condition
    if condition is None and layout.pending is not None:
        condition = names.expression(layout.pending)
    if condition is None and layout.untold and declared.old:
        raise ConfigurationError(f"--layout {name}: {layout.untold}")
    mark = {names.column(column): value for column, value in layout.mark.items() if names[column]}
    return replace(
        declared,
        fields={**fields, **declared.fields},
        condition=condition,
        rows=declared.rows or layout.rows,
        mark=declared.mark if declared.rows else mark,
        order=declared.order or (layout.order and names.column(layout.order)),
    )


class _Names:
    """The columns of a table, by the names that a layout has for them."""

    def __init__(self, layout: Name, known: Layout, columns: Iterable[str]) -> None:
        self._layout = layout
        self._optional = known.optional
        self._found = {_plain(column): column for column in columns}

    def __getitem__(self, name: str) -> bool:
        """Return whether the table has a column."""
        return name not in self._optional or _plain(name) in self._found

    def column(self, name: str) -> str:
        """Return the table's name of a column.

        Raises:
            ConfigurationError: it has no such column.
        """
        try:
            return self._found[_plain(name)]
        except KeyError:
            raise ConfigurationError(
                f"--layout {self._layout}: the table has no column {name!r}, only "
                f"{', '.join(self._found.values())}: use --map for columns of other names"
            ) from None

    def expression(self, text: str) -> str:
        """Return an expression with the table's names of its columns."""
        return COLUMN.sub(lambda match: sql.Identifier(self.column(match[1])).as_string(None), text)

    def source(self, text: str) -> str:
        """Return a column, or an expression in parentheses."""
        return self.expression(text) if text.startswith("(") else self.column(text)


def _plain(name: str) -> str:
    """Return a column's name without case and underscores.

    >>> {_plain(name) for name in ("aggregateid", "aggregate_id", "AggregateId")}
    {'aggregateid'}
    """
    return name.replace("_", "").lower()
