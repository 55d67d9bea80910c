"""Transactional store-and-forward outbox for PostgreSQL.

Sending:   `Outbox`, `Message`
Receiving: `receive`, `Worker`, `Processor`, `Processors`, `handles`, `Delivery`, `Received`,
           `Policy`, `inbox_once`
Routing:   `Resolved`
Errors:    `SafError` and what stands below it in `saf.errors`

The forwarder lives in `saf.spark` and is imported by nothing here: an application that only
sends needs neither Spark nor Arrow.
"""

from saf.delivery import Delivery
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
    UnreadableBody,
    Unroutable,
    UsageError,
)
from saf.inbox import inbox_once
from saf.lanes import Policy
from saf.message import Message
from saf.outbox import Outbox
from saf.processor import Processor, handles
from saf.processors import Processors
from saf.receive import receive
from saf.received import Received
from saf.resolutions import Resolved
from saf.worker import Worker

__all__ = [
    "Ahead",
    "AutocommitError",
    "ConfigurationError",
    "Delivery",
    "Fenced",
    "InvalidMessage",
    "Message",
    "MissingExtra",
    "Outbox",
    "Policy",
    "Processor",
    "Processors",
    "Received",
    "Rejected",
    "Resolved",
    "Restored",
    "SafError",
    "SchemaError",
    "SchemaMismatch",
    "SchemaMissing",
    "Unavailable",
    "UnknownService",
    "UnreadableBody",
    "Unroutable",
    "UsageError",
    "Worker",
    "handles",
    "inbox_once",
    "receive",
]
