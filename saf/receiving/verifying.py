"""Verifying: which messages of a hand must not be handed out, and what becomes of these.

Each becomes a dead letter whose reason is one of `saf.signing.verifier`, and the log warns of it.
It is as if it had not come: it holds nothing of its key up, not even if the policy says ``block``,
and it does nothing to the dialog that it says it belongs to. Whoever has made it up must not be
able to stop anything by it. A dialog waits for the number that was refused, and goes on once `saf
dead retry` brings that message again and its key is known by then.

Messages that wait behind others of their key are verified like all others, because parts of large
bodies are set aside meanwhile. What has expired or cannot be read is not handed out in any case.
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
    """Verify the messages in hand, and note who has signed them; return those that are refused."""
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
    gone: list[int | None] = []
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
        errors = [(one, why.error) for one, why in some.items() if why.reason == reason]
        gone += bury_as_stored(raw, hand.reader, errors, reason=reason)
    return gone
