"""Transactional store-and-forward outbox for PostgreSQL.

Sending:   `Outbox`, `Message`, `Sent`, `event`, `upcaster`
Schedules: `Schedules`; `saf.schedules` adds, pauses and removes them
Receiving: `receive`, `areceive`, `Worker`, `Processor`, `Processors`, `handles`, `Delivery`,
           `Received`, `Origin`, `VerifiedFrom`, `Policy`, `inbox_once`, `create_service`,
           `create_services`, `set_fairness`, `traced`
Routing:   `add_route`, `Resolved`; `saf.routing_service`, which needs Arrow, serves routers that
           forward
Schema:    `migrate`, `Migrated`; `saf.alembic` serves an application's own Alembic
Signing:   `Signer`, `Key`, `Keys`
Dialogs:   `begin_dialog`, `open_dialog`, `Dialog`, `begin_monolog`, `conversations`,
           `group_state`, `set_group_state`, `move_dialog`, `Saga`, `Process`, `create_contract`,
           `create_message_type`
Errors:    `SafError` and its subclasses in `saf.errors`

This module imports neither the forwarder (`saf.forwarding`) nor `saf.spark`: an application that
only sends needs neither Spark nor Arrow.
"""

from saf.broker.migrate import Migrated, migrate
from saf.broker.services import create_service, create_services, set_fairness
from saf.dialogs import waiting as _waiting  # noqa: F401 - for Dialog.wait
from saf.dialogs.arrival import Dialogs
from saf.dialogs.contracts import create_contract, create_message_type
from saf.dialogs.conversations import Conversation, conversations
from saf.dialogs.dialog import Dialog, begin_dialog, begin_monolog, open_dialog
from saf.dialogs.groups import group_state, move_dialog, set_group_state
from saf.dialogs.saga import Process, Saga
from saf.errors import (
    Ahead,
    AutocommitError,
    Behind,
    ConfigurationError,
    ContractViolation,
    DialogElsewhere,
    DialogEnded,
    DialogError,
    DialogExpired,
    DialogFailed,
    DialogNotFound,
    Fenced,
    InvalidMessage,
    MissingExtra,
    NewerEvent,
    NoSuchContract,
    NoSuchService,
    NotCorrelated,
    NotVerified,
    Refused,
    Rejected,
    Restored,
    RowsGone,
    SafError,
    SchemaError,
    SchemaMismatch,
    SchemaMissing,
    SchemaViolation,
    StopTimeout,
    TypeNotInContract,
    Unavailable,
    UndecodableEvent,
    UnexpectedMessage,
    UnknownService,
    UnreadableBody,
    UnreadableHeaders,
    UnreadableState,
    Unroutable,
    UsageError,
    WrongDirection,
)
from saf.message import Message, Sent
from saf.outbox import Outbox
from saf.received import Origin, Received, VerifiedFrom
from saf.receiving.arrival import install
from saf.receiving.asynchronous import areceive
from saf.receiving.delivery import Delivery
from saf.receiving.inbox import inbox_once
from saf.receiving.processors import Processor, Processors, handles
from saf.receiving.receive import receive
from saf.receiving.retries import Policy
from saf.receiving.worker import Worker
from saf.routing.resolved import Resolved
from saf.routing.routes import add_route
from saf.schedules.declared import Schedules
from saf.signing.signer import Key, Signer
from saf.signing.verifier import Keys
from saf.telemetry.tracing import traced
from saf.typed.event import event, upcaster

install(Dialogs())

__all__ = [
    "Ahead",
    "AutocommitError",
    "Behind",
    "ConfigurationError",
    "ContractViolation",
    "Conversation",
    "Delivery",
    "Dialog",
    "DialogElsewhere",
    "DialogEnded",
    "DialogError",
    "DialogExpired",
    "DialogFailed",
    "DialogNotFound",
    "Fenced",
    "InvalidMessage",
    "Key",
    "Keys",
    "Message",
    "Migrated",
    "MissingExtra",
    "NewerEvent",
    "NoSuchContract",
    "NoSuchService",
    "NotCorrelated",
    "NotVerified",
    "Origin",
    "Outbox",
    "Policy",
    "Process",
    "Processor",
    "Processors",
    "Received",
    "Refused",
    "Rejected",
    "Resolved",
    "Restored",
    "RowsGone",
    "SafError",
    "Saga",
    "Schedules",
    "SchemaError",
    "SchemaMismatch",
    "SchemaMissing",
    "SchemaViolation",
    "Sent",
    "Signer",
    "StopTimeout",
    "TypeNotInContract",
    "Unavailable",
    "UndecodableEvent",
    "UnexpectedMessage",
    "UnknownService",
    "UnreadableBody",
    "UnreadableHeaders",
    "UnreadableState",
    "Unroutable",
    "UsageError",
    "VerifiedFrom",
    "Worker",
    "WrongDirection",
    "add_route",
    "areceive",
    "begin_dialog",
    "begin_monolog",
    "conversations",
    "create_contract",
    "create_message_type",
    "create_service",
    "create_services",
    "event",
    "group_state",
    "handles",
    "inbox_once",
    "migrate",
    "move_dialog",
    "open_dialog",
    "receive",
    "set_fairness",
    "set_group_state",
    "traced",
    "upcaster",
]
