"""Set-backs: whether a source or a destination was set back, by what each remembers of the other.

The forwarder notices a set-back chunk by chunk (see `saf.destinations.marks`). `set_back` checks
all lanes and shards together: for the doctor, before a forwarder stops, and for the repair.

Forwarders may run. The source is read before and after its destination, each time in one snapshot.
The destination must have all that the source remembered before; and the source must know afterwards
all that the destination has.

The *incarnation* of a broker is the number of its current life, after set-backs and repairs. Every
repair raises it (`raise_incarnation`). From then on the open ends of the broker's dialogs belong to
the new incarnation, and state it in the messages that they send. An end elsewhere that remembers an
older incarnation compares what both ends know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.destinations.marks import (
    MAIN,
    NOTHING,
    InHand,
    Known,
    Lower,
    Mark,
    Place,
    compare,
)
from saf.dialogs.monologs import ReceivedMonolog
from saf.dialogs.set_back import announce
from saf.engine.acknowledged import not_parked

IDENTITY = "SELECT broker_id FROM saf.broker"

# Old versions of a mark may still exist; see saf.log.shards.newest
ACKNOWLEDGED = """
SELECT DISTINCT ON (lane, shard) lane, shard, batch, position, opened_at
FROM saf.acknowledged WHERE destination = %(destination)s ORDER BY lane, shard, batch DESC
"""
CURSORS = """
SELECT DISTINCT ON (shard) subscription_id, shard, epoch, batch, opened_at,
       coalesce(set_aside_at, '{}')
FROM saf.cursor JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND s.name = 'forwarder' ORDER BY shard, batch DESC
"""

# A mere counter would repeat its numbers after another set-back to the same backup
RAISE = """
UPDATE saf.broker SET incarnation = greatest(
    incarnation + 1, CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint))
"""


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """What a source remembers of a destination, and its own open batches."""

    marks: Mapping[Place, Mark]
    subscription_id: int
    in_hand: Mapping[int, InHand]
    epochs: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class SetBack:
    """Marks on which a source and a destination do not agree."""

    ahead: frozenset[Place] = frozenset()
    """Places that show that the source was set back."""
    farther: frozenset[Place] = frozenset()
    """Places where the destination is farther than the source remembers: all in `ahead`, and those
    that look as if an answer was lost."""
    behind: frozenset[Place] = frozenset()
    """Places that show that the destination was set back."""
    since: datetime | None = None
    """The earliest ``opened_at`` of the destination's marks in the places behind."""
    lower: Lower | None = None
    """The mark of one of the places behind, as an example."""


def remembered(connection: psycopg.Connection[Any], destination: UUID) -> Remembered:
    """Return what a source remembers of a destination."""
    found = fetch(connection, ACKNOWLEDGED, {"destination": destination})
    cursors = fetch(connection, CURSORS)
    return Remembered(
        marks={(lane, shard): Mark.of(*mark) for lane, shard, *mark in found},
        subscription_id=cursors[0][0] if cursors else 0,
        in_hand={
            shard: InHand(batch=batch, opened_at=opened_at, set_aside_at=set_aside_at)
            for _, shard, _, batch, opened_at, set_aside_at in cursors
        },
        epochs={shard: epoch for _, shard, epoch, *_ in cursors},
    )


def set_back(
    connection: psycopg.Connection[Any],
    name: str,
    known: Known,
    before: Remembered | None = None,
) -> SetBack:
    """Return whether a source or its destination, called ``name``, was set back.

    ``before`` is what the source remembered before the destination was asked; needed if forwarders
    run. Call it in a transaction of repeatable reads, unless no process is running.
    """
    after = remembered(connection, known.destination)
    differ = compare(known.marks, after.marks, after.in_hand)
    unexplained = {place: known.marks[place] for place in differ.ahead}
    ahead = set(not_parked(connection, after.subscription_id, name, unexplained))
    if before is not None:
        differ = compare(known.marks, before.marks, after.in_hand)
    newer = {s for s, epoch in known.epochs.items() if epoch > after.epochs.get(s, epoch)}
    ahead |= {(MAIN, shard) for shard in newer}
    ahead |= {
        (lane, shard)
        for (lane, shard), mark in known.marks.items()
        if shard in after.in_hand and after.in_hand[shard].has_forgotten(mark)
    }
    higher = {
        place
        for place, mark in known.marks.items()
        if mark.number > after.marks.get(place, NOTHING).number
    }
    return SetBack(
        ahead=frozenset(ahead),
        farther=frozenset(ahead | higher),
        behind=frozenset(differ.behind),
        since=differ.since,
        lower=differ.lower,
    )


def raise_incarnation(
    connection: psycopg.Connection[Any],
    since: datetime | None = None,
    known: Iterable[ReceivedMonolog] = (),
) -> None:
    """Note that this broker was set back, and is repaired now.

    Call it in the transaction of the repair, which keeps all others from sending in a dialog.

    Args:
        connection: to the broker.
        since: when the newest batch was opened that a destination knows and this broker does not;
            None if all batches are known here.
        known: how far destinations have received its monologs.
    """
    connection.execute(RAISE)
    announce(connection, since, known)
