"""Every error that saf raises on purpose.

    SafError
    ├── UsageError                what was asked cannot be: mend the call, the file or the database
    │   ├── ConfigurationError    saf.toml, an option or an environment variable
    │   ├── InvalidMessage        a message that no broker would store
    │   ├── AutocommitError       a send that would not be part of the caller's transaction
    │   ├── MissingExtra          an optional dependency is not installed
    │   └── SchemaError           the database is not a broker that this version can use
    │       ├── SchemaMissing     no ``saf`` schema: run ``saf migrate``
    │       ├── SchemaMismatch    older or newer than this library
    │       └── Restored          of another cluster, or of an older state: run ``saf rebase``
    ├── Unavailable               a service does not answer: nothing is lost, try again later
    ├── UnknownService            a destination does not know services that are addressed
    ├── Unroutable                no route and no default destination for a service
    ├── Rejected                  a destination will not have a message
    ├── UnreadableBody            a received body is not what its content type says
    ├── Ahead                     a destination knows more of a source than the source itself
    └── Fenced                    another owner has taken over: stop writing

A message names the value at fault and the way out, and never holds a password. Programs tell
errors apart by class, and find the value at fault in its attributes.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID


class SafError(Exception):
    """Anything that saf raises on purpose."""

    exit_code = 1


class UsageError(SafError):
    """What was asked cannot be done as it stands; trying again will not help."""

    exit_code = 2


class ConfigurationError(UsageError):
    """A setting is missing, unknown or wrong."""


class InvalidMessage(UsageError, ValueError):
    """A message that no broker would store. ``field`` names the argument at fault."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class AutocommitError(UsageError):
    """The connection commits each statement by itself, so the message would not be atomic."""

    def __init__(self) -> None:
        super().__init__(
            "this connection is in autocommit and no transaction is open: the message would be "
            "sent even if your business transaction rolls back. Open a transaction first "
            "(with conn.transaction(): …), or say Outbox(allow_autocommit=True) if you mean it"
        )


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs more packages: pip install 'saf-outbox[{extra}]'")
        self.extra = extra


class SchemaError(UsageError):
    """The database is not a broker that this version of saf can use."""


class SchemaMissing(SchemaError):
    """The database has no ``saf`` schema."""

    def __init__(self, database: str) -> None:
        super().__init__(
            f"database {database!r} has no saf schema: run `saf migrate --dsn …` on it"
        )
        self.database = database


class SchemaMismatch(SchemaError):
    """The ``saf`` schema is at another revision than this library was written for."""

    def __init__(self, database: str, found: str, expected: str) -> None:
        older = found < expected
        super().__init__(
            f"database {database!r} has saf schema {found}, this library needs {expected}: "
            + ("run `saf migrate --dsn …` on it" if older else "upgrade the saf-outbox package")
        )
        self.database = database
        self.found = found
        self.expected = expected


class Restored(SchemaError):
    """The database was restored: its transaction ids mean nothing here."""

    def __init__(self, database: str) -> None:
        super().__init__(
            f"database {database!r} was restored into another cluster, or its transaction ids went "
            "back: its cursors do not say any more what was read, so nothing is read or purged. "
            "Run `saf rebase` on it first"
        )
        self.database = database


class Unavailable(SafError):
    """A database does not answer. Nothing is lost: the next run goes on where this one stopped."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: cron and Airflow try again

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} is unavailable: {reason}")
        self.what = what
        self.reason = reason


class UnknownService(SafError):
    """A destination does not know services that are addressed there; nothing was stored.

    ``rows`` are the messages that it does not have, those for other services among them.
    """

    exit_code = 75

    def __init__(self, destination: str, services: list[str], rows: Any) -> None:
        names = ", ".join(map(repr, services))
        super().__init__(
            f"{destination} knows no service {names}: add it to saf.service there; its messages "
            "are parked until then"
        )
        self.services = services
        self.rows = rows


class Unroutable(SafError):
    """No route leads from a message's service to a destination."""

    exit_code = 75

    def __init__(self, service: str) -> None:
        super().__init__(
            f"no route for service {service!r}: say `saf route add`, or set "
            "forwarder.default_destination in saf.toml; its messages are parked until then"
        )
        self.service = service


class Rejected(SafError):
    """A destination answers, and will not have these messages."""

    def __init__(self, destination: str, reason: str) -> None:
        super().__init__(f"{destination} rejects messages: {reason}")
        self.destination = destination
        self.reason = reason


class UnreadableBody(SafError, ValueError):
    """A received body is not what its content type says."""

    def __init__(self, message_id: UUID, content_type: str | None, problem: str) -> None:
        super().__init__(
            f"the body of message {message_id} cannot be read, its content type is "
            f"{content_type or 'not given'}: {problem}"
        )
        self.message_id = message_id


class Ahead(SafError):
    """A destination has stored batches of a source that the source has not opened yet."""

    exit_code = 2

    def __init__(self, where: str, shards: list[int]) -> None:
        super().__init__(
            f"{where} has stored later batches of shards {shards} than the source knows: the "
            "source seems to be restored from a backup. Nothing was written; run `saf rebase`"
        )
        self.where = where
        self.shards = shards


class Fenced(SafError):
    """Another owner has taken the shards over, so nothing more may be written for them."""

    def __init__(self, where: str, shards: list[int]) -> None:
        super().__init__(
            f"fenced at {where}: shards {shards} have a newer owner or batch; nothing was written"
        )
        self.where = where
        self.shards = shards
