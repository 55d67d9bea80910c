"""Replies: bodies of endpoints' answers, sent back to the services that the messages came from.

A reply is a message like any other. It is sent in the transaction that marks the message that it
answers, so each marked message has one reply, whatever crashes. The reply has the message's key,
and its id in the header `IN_REPLY_TO`. Replies within a dialog are sent on the dialog: see
`saf.dispatch.talking`.

If the database refuses a reply, e.g. because this login may not send, the answered message becomes
a dead letter: the endpoint has accepted the message, so an operator must check.
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
"""Header of a reply with the id of the message that it answers."""

MOST = 1 << 20
"""Maximum size of a reply in bytes."""

TO_NOBODY = "it names no from_service, which its reply would go to"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An endpoint's reply."""

    body: bytes
    content_type: str | None = None
    message_type: str | None = None

    def headers(self, message: Received) -> dict[str, Any]:
        """Return the headers of the reply's message, which continues the message's trace."""
        content_type = self.content_type or "application/octet-stream"
        return {CONTENT_TYPE: content_type, **carrier_of(message.headers_text)}


def to(message: Received, reply: Reply) -> Message:
    """Return the reply as a message to the sender of ``message``.

    Raises:
        InvalidMessage: an outbox would reject the reply.
    """
    if message.from_service is None:
        raise InvalidMessage("service", TO_NOBODY)
    answer = Message(
        service=message.from_service,
        from_service=message.service,
        body=reply.body,
        key=message.key,
        message_type=reply.message_type,
        headers={**reply.headers(message), IN_REPLY_TO: str(message.message_id)},
    )
    encode(answer, MOST)
    return answer


def send(
    connection: psycopg.Connection[Any],
    outbox: Outbox,
    replies: Sequence[tuple[Received, Message]],
) -> list[tuple[Received, str]]:
    """Send replies in the open transaction; return the refused ones, each with its error."""
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
        return [refused for entry in replies for refused in send(connection, outbox, [entry])]
    return []


def is_refusal(error: Exception) -> bool:
    """Return whether an error is caused by the reply or its sender, and not temporary."""
    return isinstance(error, (SafError, psycopg.errors.InsufficientPrivilege)) or of_messages(error)
