"""Verifying: messages of a hand that must not be handed out, and their dead letters.

The dead letter's reason is one of `saf.signing.verifier`'s, and the log shows a warning. A refused
message has no other effect: it blocks no messages of its key, even if the policy says ``block``,
and it does nothing to the dialog that it claims to belong to. A forger must not be able to stop
anything with it. A dialog waits for the number that was refused, and continues once `saf dead
retry` delivers that message again and its signing key is known.

Messages that wait behind others of their key are verified like all others, because parts of large
bodies are set aside in that time. Expired and unreadable messages are not handed out in any case.
"""

from __future__ import annotations

from typing import Any

import psycopg

from saf.logger import Log
from saf.received import Received
from saf.receiving.arrival import hook
from saf.receiving.burying import bury_as_stored
from saf.receiving.failures import about
from saf.receiving.hand import Hand
from saf.signing.verifier import Refusal, Verifier

log = Log("saf.receive")

Refused = dict[Received, Refusal]


def refused(raw: psycopg.Connection[Any], hand: Hand, verifier: Verifier) -> Refused:
    """Verify the messages in hand and note their signers; return the refused messages."""
    found: Refused = {}
    hashes = hook().body_hashes(raw, hand.reader, hand.messages) if hand.spoken else {}
    for message in hand.messages:
        verdict = verifier(message, hashes.get(message))
        if not isinstance(verdict, Refusal):
            message.is_signed_by(verdict)
        elif not hook().is_of_saf(message):
            found[message] = verdict
    return found


def bury_refused(raw: psycopg.Connection[Any], hand: Hand, some: Refused) -> list[int | None]:
    """Make dead letters of refused messages; return their ids in saf.parked."""
    buried: list[int | None] = []
    for message, refusal in some.items():
        log.warning(
            "message_refused",
            subscription=hand.reader.name,
            **about(message),
            from_service=message.from_service,
            reason=refusal.reason,
            detail=f"{refusal.error}: it is a dead letter",
        )
    for reason in sorted({refusal.reason for refusal in some.values()}):
        errors = [(entry, cause.error) for entry, cause in some.items() if cause.reason == reason]
        buried += bury_as_stored(raw, hand.reader, errors, reason=reason)
    return buried
