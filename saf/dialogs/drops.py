"""Drops: reasons for which an end of a dialog drops a message. Pure."""

from __future__ import annotations

from saf.dialogs.facts import Facts
from saf.received import Received
from saf.setaside.dropped import Reason


def why_dropped(facts: Facts, message: Received, *, ended_here: bool, over: bool) -> Reason:
    """Return why `saf.dialogs.facts.judge` drops a message, from the facts before the message.

    ``over``: the dialog's lifetime is over.
    """
    if message.sequence is None:
        return Reason.OUTDATED
    if message.sequence <= facts.receive_sequence:
        return Reason.REPEAT
    if over and not (ended_here or facts.ended_there or facts.error_code is not None):
        return Reason.EXPIRED
    return Reason.ENDED


def no_end(message: Received) -> str:
    """Return the error for a message that answers a dialog not begun here."""
    broker = message.to_broker
    address = "" if broker is None else f" It is addressed to broker {broker}."
    return (
        f"this broker has no end of conversation {message.conversation_id}: the dialog was "
        f"begun elsewhere, or ended long ago and is forgotten."
        f"{address}"
    )
