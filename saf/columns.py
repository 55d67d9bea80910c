"""The columns of a message, defined once for SQL, Arrow and Spark, with who may set them.

Every table that holds messages has these columns, in this order; migrations/baseline/message.sql
creates them. All code that reads, moves, sends or describes messages takes its list from here. This
module imports nothing, because an application that only sends has neither Arrow nor Spark.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a message."""

    name: str
    type: str
    """Type in PostgreSQL."""
    sent: bool = False
    """True if an `Outbox` sets the column; a dialog or the server sets the others."""
    seldom: bool = False
    """True if plain messages leave it NULL: outside of dialogs, for any time and any broker."""


MESSAGE = (
    Column(name="message_id", type="uuid", sent=True),
    Column(name="from_service", type="text", sent=True, seldom=True),
    Column(name="to_service", type="text", sent=True),
    Column(name="to_broker", type="uuid", sent=True, seldom=True),
    Column(name="key", type="text", sent=True),
    Column(name="conversation_id", type="uuid", seldom=True),
    Column(name="from_initiator", type="boolean", seldom=True),
    Column(name="sequence", type="bigint", seldom=True),
    Column(name="message_type", type="text", sent=True),
    Column(name="headers", type="jsonb", sent=True),
    Column(name="body", type="bytea", sent=True),
    Column(name="created_at", type="timestamptz"),
    Column(name="deliver_at", type="timestamptz", sent=True, seldom=True),
    Column(name="expires_at", type="timestamptz", sent=True, seldom=True),
)

COLUMNS = tuple(column.name for column in MESSAGE)
"""Names of all columns, in order."""
SENT = {column.name: column.type for column in MESSAGE if column.sent}
"""Columns that an `Outbox` sets, with their PostgreSQL types."""
SELDOM = tuple(column.name for column in MESSAGE if column.seldom)
UUIDS = tuple(column.name for column in MESSAGE if column.type == "uuid")
JSON = tuple(column.name for column in MESSAGE if column.type == "jsonb")

IN_TABLES = {
    "id": "bigint",
    "shard": "smallint",
    **{column.name: column.type for column in MESSAGE},
    "source": "uuid",
    "received_at": "timestamptz",
}
"""Columns of messages in Spark and lakehouse tables, with their PostgreSQL types.
These are the columns of an inbox; an outbox lacks the last two."""

SPARK = {
    "smallint": "int",
    "uuid": "string",
    "text": "string",
    "boolean": "boolean",
    "bigint": "long",
    "jsonb": "string",
    "bytea": "binary",
    "timestamptz": "timestamp",
}
"""Spark types by PostgreSQL type. Types that are missing here become strings."""
EXPRESSED = {column.name: SPARK[column.type] for column in MESSAGE}
"""Columns that a classifier's SQL expression can use, with their Spark types."""
