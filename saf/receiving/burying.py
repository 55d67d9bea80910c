"""Dead letters of messages that cannot be handed out: the database copies the stored rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from saf.received import Received
from saf.receiving import claim
from saf.receiving.arrival import hook
from saf.receiving.hand import Hand, Reader
from saf.setaside import dead, parking
from saf.setaside.isolation import said


def bury_alone(raw: psycopg.Connection[Any], hand: Hand, error: Exception) -> None:
    """Make a dead letter of the only message in hand, because every way to handle it raises.

    Its conversation ends with an error, and its shard moves past it.
    """
    buried = bury_as_stored(raw, hand.reader, [(message, said(error)) for message in hand.all])
    parking.unpark(raw, [number for number in buried if number])
    fail_unseen(raw, hand.reader, hand.all)
    claim.move(raw, hand)


def fail_unseen(raw: psycopg.Connection[Any], reader: Reader, messages: Iterable[Received]) -> None:
    """End the conversations of messages that cannot be received, unless the reader listens in."""
    if reader.converses:
        for message in messages:
            hook().fail_unseen(raw, message)


def bury_as_stored(
    raw: psycopg.Connection[Any],
    reader: Reader,
    some: Sequence[tuple[Received, str | None]],
    *,
    reason: str = "rejected",
) -> list[int | None]:
    """Make dead letters of messages from their stored rows, not from the rows that were read.

    Each message comes with its error; None stands for "too large to be read". Return the messages'
    ids in saf.parked.
    """
    for table, places in (
        ("inbox", [(one.id, one, error) for one, error in some if one.parked_id is None]),
        ("parked", [(one.parked_id, one, error) for one, error in some if one.parked_id]),
    ):
        rows = [
            dead.AsStored(
                shard=one.shard,
                id=place or 0,
                reason="over_size" if error is None else reason,
                error=error and said(error),
            )
            for place, one, error in places
        ]
        dead.bury_as_stored(raw, reader.subscription_id, table, rows)
    return [one.parked_id for one, _ in some]
