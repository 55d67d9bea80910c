"""The columns of a message, said once: in PostgreSQL, in Arrow, in Spark, and who may set them.

Every table that holds messages has them, in this order; whoever reads, moves, sends or describes a
message takes its list from here. Imports nothing, because an application that sends has neither
Arrow nor Spark.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a message."""

    name: str
    type: str
    """In PostgreSQL."""
    sent: bool = False
    """An `Outbox` sets it; the others are a dialog's, or the server's."""
    needed: bool = False
    """It is never NULL."""
    default: str | None = None
    """What the server sets where nobody does, in SQL."""
    seldom: bool = False
    """A message outside of dialogs, for any time and any broker, does not have it."""


MESSAGE = (
    Column(name="message_id", type="uuid", sent=True, needed=True, default="gen_random_uuid()"),
    Column(name="from_service", type="text", sent=True, seldom=True),
    Column(name="to_service", type="text", sent=True, needed=True),
    Column(name="to_broker", type="uuid", sent=True, seldom=True),
    Column(name="key", type="text", sent=True),
    Column(name="conversation_id", type="uuid", seldom=True),
    Column(name="from_initiator", type="boolean", seldom=True),
    Column(name="sequence", type="bigint", seldom=True),
    Column(name="message_type", type="text", sent=True),
    Column(name="headers", type="jsonb", sent=True),
    Column(name="body", type="bytea", sent=True, needed=True),
    Column(name="created_at", type="timestamptz", needed=True, default="now()"),
    Column(name="deliver_at", type="timestamptz", sent=True, seldom=True),
    Column(name="expires_at", type="timestamptz", sent=True, seldom=True),
)

COLUMNS = tuple(column.name for column in MESSAGE)
"""Their names."""
SENT = {column.name: column.type for column in MESSAGE if column.sent}
"""What an `Outbox` sets, with its type in PostgreSQL."""
SELDOM = tuple(column.name for column in MESSAGE if column.seldom)
UUIDS = tuple(column.name for column in MESSAGE if column.type == "uuid")
JSON = tuple(column.name for column in MESSAGE if column.type == "jsonb")

SPARK = {
    "uuid": "string",
    "text": "string",
    "boolean": "boolean",
    "bigint": "long",
    "jsonb": "string",
    "bytea": "binary",
    "timestamptz": "timestamp",
}
"""What Spark calls a type of PostgreSQL; text for what it has no type of."""
EXPRESSED = {column.name: SPARK[column.type] for column in MESSAGE}
"""The columns as expressions in SQL see them, with their types in Spark."""
