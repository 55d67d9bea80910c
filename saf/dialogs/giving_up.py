"""Giving up: an operator gives up a message that has arrived at its end and was not handled.

The conversation would have a gap. So it fails at both ends, as for a message that becomes a dead
letter there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.dialog import open_dialog
from saf.dialogs.statements import Code
from saf.errors import DialogNotFound, UsageError
from saf.setaside.isolation import of_messages
from saf.transaction import enter

MET_BY = """
SELECT handle FROM saf.conversation
WHERE conversation_id = %(conversation_id)s AND is_initiator = NOT %(from_initiator)s::boolean
"""

Lost = tuple[UUID, bool, str]
"""A message's conversation, True if sent by the initiator, and its name for errors."""


def give_up(connection: psycopg.Connection[Any], lost: Iterable[Lost], who: str) -> None:
    """Fail conversations at both ends, each for its first message that is given up.

    Call it in a transaction that has the shards of the messages in hand.
    """
    known: set[tuple[UUID, bool]] = set()
    for conversation_id, from_initiator, name in lost:
        if (conversation_id, from_initiator) not in known:
            known.add((conversation_id, from_initiator))
            text = f"message {name} was given up by {who}: it was parked where it had arrived"
            fail(connection, conversation_id, from_initiator, Code.GIVEN_UP, text)


def fail(
    connection: psycopg.Connection[Any],
    conversation_id: UUID,
    from_initiator: bool,
    code: Code,
    text: str,
) -> None:
    """Fail the conversation of a message that has come to its end here, if the end is known.

    An end that has failed or ended before gets no further Error.
    """
    params = {"conversation_id": conversation_id, "from_initiator": from_initiator}
    try:
        with connection.transaction():
            for (handle,) in fetch(connection, MET_BY, params):
                open_dialog(connection, handle).fail(enter(connection), code, text)
    except DialogNotFound:
        return  # the conversation was purged: no end waits for the error
    except (psycopg.DatabaseError, UsageError) as error:
        # the error concerns the conversation itself: no message can be sent on it
        if connection.broken or not of_messages(error):
            raise
