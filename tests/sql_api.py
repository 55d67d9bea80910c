"""The two ways to dialogs and messages: the Python library, and the functions of the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

import saf
from saf.database import Dsn, fetch

Connection = psycopg.Connection[Any]

REFUSALS: dict[type[Exception], str] = {
    saf.DialogNotFound: "dialog_known",
    saf.NoSuchService: "service_known",
    saf.NoSuchContract: "contract_known",
    saf.DialogEnded: "dialog_over",
    saf.DialogExpired: "dialog_over",
    saf.TypeNotInContract: "contract_allows",
    saf.WrongDirection: "contract_allows",
    saf.SchemaViolation: "contract_allows",
    saf.InvalidMessage: "argument_valid",
    saf.errors.DialogError: "argument_valid",
}
"""The constraint that the functions name for each error of the library."""


class Api(Protocol):
    """What an application does with dialogs, in its own transaction."""

    def begin(self, connection: Connection, to: str = "warehouse", **options: Any) -> UUID:
        """Begin a dialog; return its handle."""
        ...

    def say(self, connection: Connection, handle: UUID, body: object, **options: Any) -> UUID:
        """Send on a dialog; return the message's id."""
        ...

    def end(self, connection: Connection, handle: UUID, *error: Any) -> None:
        """End a dialog, with the code and the text of an error or without."""
        ...


class Python:
    """The library."""

    def begin(self, connection: Connection, to: str = "warehouse", **options: Any) -> UUID:
        dialog = saf.begin_dialog(
            connection, **{"from_service": "shop", "to_service": to, **options}
        )
        return dialog.handle

    def say(self, connection: Connection, handle: UUID, body: object, **options: Any) -> UUID:
        return saf.open_dialog(connection, handle).send(connection, body, **options)

    def end(self, connection: Connection, handle: UUID, *error: Any) -> None:
        dialog = saf.open_dialog(connection, handle)
        if error:
            dialog.end_with_error(connection, *error)
        else:
            dialog.end(connection)


class Sql:
    """The functions."""

    def begin(self, connection: Connection, to: str = "warehouse", **options: Any) -> UUID:
        given: dict[str, Any] = {"from_service": "shop", "to_service": to, **options}
        if given.get("lifetime") is not None:
            given["lifetime"] = timedelta(seconds=given["lifetime"])
        handle: UUID = _call(connection, "begin_dialog", given)
        return handle

    def say(self, connection: Connection, handle: UUID, body: object, **options: Any) -> UUID:
        if isinstance(body, dict):
            body = Jsonb(body)
        if options.get("headers") is not None:
            options["headers"] = Jsonb(options["headers"])
        given = {"handle": handle, "body": body, **options}
        message_id: UUID = _call(connection, "say", given)
        return message_id

    def end(self, connection: Connection, handle: UUID, *error: Any) -> None:
        names = ("error_code", "error_text")
        _call(connection, "end_dialog", {"handle": handle, **dict(zip(names, error, strict=False))})


def _call(connection: Connection, function: str, arguments: dict[str, Any]) -> Any:
    listed = ", ".join(f"{name} => %({name})s{_cast(value)}" for name, value in arguments.items())
    ((result,),) = fetch(connection, f"SELECT saf.{function}({listed})", arguments)
    return result


def _cast(value: object) -> str:
    if isinstance(value, str):
        return "::text"
    return "::bytea" if isinstance(value, bytes) else ""


def constraint(error: Exception) -> str | None:
    """Return the constraint by which an error of either API is recognised."""
    if isinstance(error, psycopg.Error):
        return error.diag.constraint_name
    return next((name for kind, name in REFUSALS.items() if type(error) is kind), None)


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message as both APIs hand it out."""

    message_id: UUID
    key: str | None
    text: str
    message_type: str | None
    sequence: int | None
    handle: UUID | None
    attempt: int


@dataclass(frozen=True)
class Reject:
    """Make a dead letter of the message."""

    reason: str


@dataclass(frozen=True)
class Retry:
    """Try the message again after 0 seconds; later messages of its key wait."""

    reason: str


class Fails(Exception):
    """A handler fails, and its transaction is rolled back."""


Handler = Callable[[Connection, Message], Reject | Retry | None]


class Receiver(Protocol):
    """Receives one delivery in a transaction of its own."""

    def deliver(
        self,
        dsn: Dsn,
        subscription: str,
        handler: Handler,
        max_messages: int = 1,
        max_attempts: int = 5,
        **which: UUID,
    ) -> int:
        """Receive, handle, commit; return the number of messages that were handed out.

        ``which``: the handle of an end, as ``conversation`` or ``group``.

        Raises:
            Fails: the handler has; everything is rolled back.
        """
        ...


class ByPython:
    """`saf.receive`."""

    def deliver(
        self,
        dsn: Dsn,
        subscription: str,
        handler: Handler,
        max_messages: int = 1,
        max_attempts: int = 5,
        **which: UUID,
    ) -> int:
        policy = saf.Policy(max_attempts=max_attempts, first_wait_seconds=0, longest_wait_seconds=0)
        with saf.receive(
            dsn,
            subscription,
            max_messages=max_messages,
            policy=policy,
            conversation=which.get("conversation"),
            group=which.get("group"),
        ) as delivery:
            for one in delivery:
                message = Message(
                    message_id=one.message_id,
                    key=one.key,
                    text=one.text(),
                    message_type=one.message_type,
                    sequence=one.sequence,
                    handle=None if one.dialog is None else one.dialog.handle,
                    attempt=one.attempt,
                )
                match handler(delivery.connection, message):
                    case Reject(reason):
                        delivery.reject(one, reason)
                    case Retry(reason):
                        delivery.park(one, reason)
            return len(delivery)


RECEIVE = """
SELECT message_id, key, convert_from(body, 'UTF8'), message_type, sequence, handle, attempt
FROM saf.receive(%(subscription)s, %(max_messages)s, %(max_attempts)s{which})
"""
WHICH = {
    "conversation": ", conversation => %(conversation)s",
    "group": ", conversation_group => %(group)s",
}
FIELDS = ("message_id", "key", "text", "message_type", "sequence", "handle", "attempt")


def received(
    connection: Connection,
    subscription: str,
    max_messages: int = 1,
    max_attempts: int = 5,
    **which: UUID,
) -> list[Message]:
    """Call saf.receive in the caller's transaction."""
    params = {
        "subscription": subscription,
        "max_messages": max_messages,
        "max_attempts": max_attempts,
        **which,
    }
    query = RECEIVE.format(which="".join(WHICH[name] for name in which))
    rows = fetch(connection, query, params)
    return [Message(**dict(zip(FIELDS, row, strict=True))) for row in rows]


class BySql:
    """``saf.receive`` and its companions."""

    def deliver(
        self,
        dsn: Dsn,
        subscription: str,
        handler: Handler,
        max_messages: int = 1,
        max_attempts: int = 5,
        **which: UUID,
    ) -> int:
        with dsn.connect(role="test") as connection:
            messages = received(connection, subscription, max_messages, max_attempts, **which)
            waiting = set()
            for message in messages:
                if message.key is not None and message.key in waiting:
                    continue
                match handler(connection, message):
                    case Reject(reason):
                        fetch(
                            connection,
                            "SELECT saf.reject(%(id)s, %(reason)s)",
                            {"id": message.message_id, "reason": reason},
                        )
                    case Retry(reason):
                        fetch(
                            connection,
                            "SELECT saf.retry_later(%(id)s, %(reason)s, '0')",
                            {"id": message.message_id, "reason": reason},
                        )
                        waiting.add(message.key)
        return len(messages)
