"""Messages of dialogs that saf sends unsigned, because a broker or an operator sends them.

    Error     the lifetime is over, a message could not be handled or was given up, an end was set
              back; with one of saf's own codes, which are below zero
    timer     to oneself
    compare   how much an end has sent and received

A receiver that requires signatures takes these messages unsigned, as long as they contain nothing
else: a forger can end a dialog with one, but do nothing more. An End is not in this list, because a
forged End would make a dialog that was cut off look complete; nor is an application's own Error.
"""

from __future__ import annotations

import json
from typing import Any

from saf.dialogs.statements import COMPARE, ERROR, TIMER
from saf.received import Received

LARGEST = 64 * 1024
"""Maximum size of such a message in bytes."""


def is_harmless(message: Received) -> bool:
    """Return whether a message may be taken without a signature."""
    if message.conversation_id is None or message.size > LARGEST:
        return False
    of_dialog = message.from_initiator is not None
    if message.message_type == TIMER:
        return of_dialog and message.sequence is None and message.body == b"{}"
    match message.message_type, _said(message.body):
        case str(kind), {"code": int(code), "text": str(), **more}:
            return kind == ERROR and not more and code < 0
        case str(kind), {"received": int(), "answer": bool(), **more}:
            return kind == COMPARE and not more and of_dialog and message.sequence is not None
        case _:
            return False


def _said(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
