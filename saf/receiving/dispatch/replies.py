"""Replies: endpoints' answers, their meaning, and the messages that carry their bodies back.

An answer has a meaning for the message and for the endpoint. `meaning_of` is pure policy:

    2xx                     the message is done
    410                     the endpoint is gone: it is disabled, the message waits
    408, 425, 429, 5xx      the message waits, as it does without an answer
    3xx                     the message waits: a redirect is not followed
    any other 4xx           the message is rejected: a dead letter, or it waits, as configured
    a fault of a call       the message has failed, and waits; the endpoint is up
    a reply over the limit  as for a fault

If a message waits, the endpoint may be down; see `saf.receiving.dispatch.judging`.

The body of an answer may be a reply, sent back to the service that the message came from. A reply
is a message like any other. It is sent in the transaction that marks the message that it answers,
so each marked message has one reply, whatever crashes. The reply has the message's key, and its id
in the header `IN_REPLY_TO`. Replies within a dialog are sent on the dialog, and not here: see
`saf.receiving.dispatch.talking`.

If the database refuses a reply, e.g. because this login may not send, the answered message becomes
a dead letter: the endpoint has accepted the message, so an operator must check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import psycopg

from saf.errors import InvalidMessage, SafError
from saf.message import CONTENT_TYPE, Message, encode
from saf.outbox import Outbox
from saf.received import Received
from saf.setaside.isolation import of_messages, said
from saf.telemetry.carried import carrier_of

IN_REPLY_TO = "in-reply-to"
"""Header of a reply with the id of the message that it answers."""

MOST = 1 << 20
"""Maximum size of a reply in bytes."""

KEPT = 200
"""Bytes of an answer that are kept with the attempt."""

LONGEST_RETRY_AFTER = 86400.0
"""Longest wait that an endpoint may ask for, in seconds."""

LATER = frozenset({408, 425, 429})

TO_NOBODY = "it has no from_service to send its reply to"


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


class Meaning(StrEnum):
    """The meaning of an answer."""

    DONE = "done"
    WAITS = "waits"
    FAILED = "failed"
    REJECTED = "rejected"
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one request."""

    meaning: Meaning
    seconds: float
    """Time until the answer came, or the request was given up."""
    status: int | None = None
    """HTTP status; None without an answer."""
    error: str = ""
    """The error, with the first bytes of the answer."""
    retry_after: float | None = None
    """Seconds for which the endpoint asks to receive no requests."""
    reply: Reply | None = None
    """Reply to send back."""


def meaning_of(status: int, *, rejects: bool = True) -> Meaning:
    """Return the meaning of an HTTP status. ``rejects``: other 4xx reject the message.

    >>> [str(meaning_of(status)) for status in (200, 204, 302, 404, 410, 429, 503)]
    ['done', 'done', 'waits', 'rejected', 'gone', 'waits', 'waits']
    >>> str(meaning_of(404, rejects=False))
    'waits'
    """
    if status // 100 == 2:  # noqa: PLR2004 - as HTTP counts
        return Meaning.DONE
    if status == 410:  # noqa: PLR2004 - Gone
        return Meaning.GONE
    if status // 100 == 4 and status not in LATER and rejects:  # noqa: PLR2004 - as HTTP counts
        return Meaning.REJECTED
    return Meaning.WAITS


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return the seconds that the header Retry-After asks for, given as seconds or as a date.

    >>> retry_after({"Retry-After": "120"}), retry_after({"Retry-After": "soon"}), retry_after({})
    (120.0, None, None)
    >>> now = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
    >>> retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 GMT"}, now)
    30.0
    >>> print(retry_after({"Retry-After": "Sat, 31 Jan 2026 12:00:30 +99999999999999999999"}))
    None
    """
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return min(float(value[:10]), LONGEST_RETRY_AFTER)
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # OverflowError for an offset of many digits
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


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
