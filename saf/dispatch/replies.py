"""Replies: the body of an endpoint's answer, sent back to the service that the message came from.

A reply is a message like any other. It is sent in the transaction that marks the message which it
answers, so there is one reply for each message that is marked, whatever dies. It has the key of
that message, and its id in the header `IN_REPLY_TO`. What belongs to a dialog is said on the
dialog: see `saf.dispatch.talking`.

A reply that the database refuses, say because this login may not send, makes a dead letter of the
message that it answers: the endpoint has accepted that message, so a person has to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.errors import InvalidMessage, SafError
from saf.message import CONTENT_TYPE, Message, encode
from saf.outbox import Outbox
from saf.received import Received
from saf.setaside.isolation import of_messages, said
from saf.tracing.carried import carrier_of

IN_REPLY_TO = "in-reply-to"
"""The header of a reply that has the id of the message which it answers."""

MOST = 1 << 20
"""How many bytes a reply may have."""

TO_NOBODY = "it names no from_service, which its reply would go to"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an endpoint has answered."""

    body: bytes
    content_type: str | None = None
    message_type: str | None = None

    def headers(self, message: Received) -> dict[str, Any]:
        """The headers of the message that it becomes; it goes on with the trace of the other."""
        content_type = self.content_type or "application/octet-stream"
        return {CONTENT_TYPE: content_type, **carrier_of(message.headers_text)}


def to(message: Received, reply: Reply) -> Message:
    """The reply as a message to the sender of another one.

    Raises:
        InvalidMessage: no outbox would take it.
    """
    if message.from_service is None:
        raise InvalidMessage("service", TO_NOBODY)
    made = Message(
        service=message.from_service,
        from_service=message.service,
        body=reply.body,
        key=message.key,
        message_type=reply.message_type,
        headers={**reply.headers(message), IN_REPLY_TO: str(message.message_id)},
    )
    encode(made, MOST)
    return made


def send(
    connection: psycopg.Connection[Any],
    outbox: Outbox,
    replies: Sequence[tuple[Received, Message]],
) -> list[tuple[Received, str]]:
    """Send replies in the transaction that is open; return what was refused, with the error."""
    if not replies:
        return []
    try:
        with connection.transaction():
            outbox.send_many(connection, [reply for _, reply in replies])
    except (psycopg.Error, SafError) as error:
        if connection.broken or not is_refusal(error):
            raise
        if len(replies) == 1:
            return [(replies[0][0], f"its reply is refused: {said(error)}")]
        return [refused for one in replies for refused in send(connection, outbox, [one])]
    return []


def is_refusal(error: Exception) -> bool:
    """Whether an error is about what is sent or who sends it, and not about the moment."""
    return isinstance(error, (SafError, psycopg.errors.InsufficientPrivilege)) or of_messages(error)
