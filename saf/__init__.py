"""Transactional store-and-forward outbox for PostgreSQL.

Sending:   `Outbox`, `Message`
Errors:    `SafError` and what stands below it in `saf.errors`

The forwarder lives in `saf.spark` and is imported by nothing here: an application that only
sends needs neither Spark nor Arrow.
"""

from saf.errors import (
    Ahead,
    AutocommitError,
    ConfigurationError,
    Fenced,
    InvalidMessage,
    MissingExtra,
    Rejected,
    Restored,
    SafError,
    SchemaError,
    SchemaMismatch,
    SchemaMissing,
    Unavailable,
    UnknownService,
    Unroutable,
    UsageError,
)
from saf.message import Message
from saf.outbox import Outbox

__all__ = [
    "Ahead",
    "AutocommitError",
    "ConfigurationError",
    "Fenced",
    "InvalidMessage",
    "Message",
    "MissingExtra",
    "Outbox",
    "Rejected",
    "Restored",
    "SafError",
    "SchemaError",
    "SchemaMismatch",
    "SchemaMissing",
    "Unavailable",
    "UnknownService",
    "Unroutable",
    "UsageError",
]
