"""Talking: messages of dialogs, which an endpoint answers on the dialog.

The meaning of a dialog's message depends on what its end has received before: the message may have
to wait for an earlier one, be the last part of a large body, or be dropped. `saf.receiving` knows
all that, by deliveries. But a delivery is a transaction, and none is open while the dispatcher
waits for an endpoint. So there are two deliveries of each message:

    look      find the messages to send, and their requests; the transaction is rolled back
    settle    the same messages arrive again, in the transaction that marks them. There the answer
              is sent on the dialog, and the dialog ends if its contract is one of ``one_reply``

Between the two, no other receiver reads from the shard, and one message of each dialog is in hand.
If the end has changed nevertheless, because it was ended here, the second delivery decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.errors import SafError
from saf.received import Received
from saf.receiving.arrival import hook
from saf.receiving.delivery import Delivery
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.replies import Reply, is_refusal
from saf.receiving.hand import Hand, Reader, Shard
from saf.receiving.retries import Policy
from saf.receiving.summary import SetAside
from saf.setaside.isolation import of_messages, said

TRANSACTION = "SELECT pg_current_xact_id()::text"

NOT_SENT = "it was another message's turn when it was looked at"


@dataclass(frozen=True, kw_only=True)
class Talked:
    """The result of a message of a dialog."""

    sent: bool = False
    """True if the endpoint has accepted the message; if not, it is saf's own, or has failed."""
    reply: Reply | None = None
    reason: str = ""
    error: str | None = None
    """Error of a dead letter."""


Make = Callable[[Received], Request]

Found = dict[UUID, Request | Talked]
"""Requests to send, or results known already, by message id."""


def look(
    connection: psycopg.Connection[Any],
    reader: Reader,
    batches: Mapping[int, int],
    messages: Iterable[Received],
    make: Make,
) -> tuple[Found, list[tuple[Received, str]]]:
    """Find which messages to send, and their requests; the others are only settled.

    Return both, and the messages that cannot arrive, each with its error.
    """
    candidates = list(messages)
    found: Found = {entry.message_id: Talked() for entry in candidates}
    try:
        with connection.transaction(force_rollback=True):
            for message in _delivery(connection, reader, batches, candidates):
                if hook().by_itself(message) is None:
                    found[message.message_id] = _made(message, make)
    except Exception as error:
        if connection.broken or not of_messages(error):
            raise
        if len(candidates) == 1:
            return {}, [(candidates[0], said(error))]
    else:
        return found, []
    results = [look(connection, reader, batches, [entry], make) for entry in candidates]
    return (
        {key: value for found, _ in results for key, value in found.items()},
        [entry for _, bad in results for entry in bad],
    )


def _made(message: Received, make: Make) -> Request | Talked:
    try:
        return make(message)
    except Exception as error:
        if not isinstance(error, SafError) and not of_messages(error):
            raise
        return Talked(reason="rejected", error=said(error))


def settle(
    connection: psycopg.Connection[Any],
    reader: Reader,
    batches: Mapping[int, int],
    results: Mapping[Received, Talked],
    one_reply: Collection[str],
) -> SetAside:
    """Receive messages in the open transaction, and send the answers on their dialogs.

    Return the counts of messages set aside.
    """
    by_id = {message.message_id: message for message in results}
    delivery = _delivery(connection, reader, batches, [*by_id.values()])
    for message in delivery:
        result = results[by_id[message.message_id]]
        effect = hook().by_itself(message)
        if result.error is not None:
            delivery.reject(message, result.error, reason=result.reason)
        elif not result.sent and effect is None:
            delivery.park(message, NOT_SENT)
        else:
            try:
                with connection.transaction():
                    if effect is not None:
                        effect(connection)
                    else:
                        _answer(connection, message, result, one_reply)
            except (psycopg.Error, SafError) as error:
                if connection.broken or not is_refusal(error):
                    raise
                delivery.reject(message, f"its reply is refused: {said(error)}")
    return delivery.settle()


def _answer(
    connection: psycopg.Connection[Any],
    message: Received,
    result: Talked,
    one_reply: Collection[str],
) -> None:
    dialog = message.dialog
    if dialog is None or dialog.monolog:
        return
    if result.reply is not None:
        reply = result.reply
        headers = reply.headers(message)
        dialog.send(connection, reply.body, message_type=reply.message_type, headers=headers)
    if dialog.contract is not None and dialog.contract.name in one_reply:
        dialog.end(connection)


def _delivery(
    connection: psycopg.Connection[Any],
    reader: Reader,
    batches: Mapping[int, int],
    messages: list[Received],
) -> Delivery[psycopg.Connection[Any]]:
    """Return a delivery of messages in memory, which does not write the cursors of their shards."""
    numbers = {message.shard for message in messages}
    hand = in_hand(
        reader,
        {number: batches[number] for number in numbers},
        transaction=fetch(connection, TRANSACTION)[0][0],
        # a message that already waits is given up where it waits
        late={message.shard for message in messages if message.parked_id is not None},
        messages=messages,
    )
    return Delivery(connection, connection, hand, Policy())


def in_hand(
    reader: Reader,
    batches: Mapping[int, int],
    *,
    transaction: str = "",
    late: Iterable[int] = (),
    messages: Sequence[Received] = (),
) -> Hand:
    """Return shards that a member owns, each with its batch; their cursors count as written."""
    return Hand(
        reader=reader,
        transaction=transaction,
        shards={number: Shard(shard=number, batch=batch) for number, batch in batches.items()},
        written=dict.fromkeys(batches, 0),
        late=sorted(late),
        messages=[*messages],
        spoken=bool(messages),
    )
