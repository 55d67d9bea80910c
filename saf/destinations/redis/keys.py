"""Keys: what there is of one destination at a Redis server. All have one hash tag.

{saf}:TOPIC              a stream of messages
{saf}/identity           what the destination is
{saf}/marks/SOURCE       a hash of one source's marks; a field for each shard and lane
{saf}/streams/SOURCE     a set of the streams that messages of one source went to
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from saf.destinations.marks import NOTHING, Mark, Place

ABSENT = ""
"""What a field that is not there counts as."""


def stream(tag: str, topic: str) -> str:
    """Return the key of a topic's stream."""
    return f"{{{tag}}}:{topic}"


def identity(tag: str) -> str:
    """Return the key of the destination's identity."""
    return f"{{{tag}}}/identity"


def marks(tag: str, source: UUID | str) -> str:
    """Return the key of a source's marks."""
    return f"{{{tag}}}/marks/{source}"


def streams(tag: str, source: UUID | str) -> str:
    """Return the key of the set of a source's streams."""
    return f"{{{tag}}}/streams/{source}"


def field(place: Place) -> str:
    """Return the field of a place.

    >>> field(("retry", 7))
    '7:retry'
    """
    lane, shard = place
    return f"{shard}:{lane}"


def place(name: str) -> Place:
    """Return the place of a field.

    >>> place("7:route:x:y")
    ('route:x:y', 7)
    """
    shard, _, lane = name.partition(":")
    return lane, int(shard)


def written(epoch: int, mark: Mark) -> str:
    """Return an epoch and a mark as the value of a field.

    >>> written(3, Mark(batch=5, position=90, acknowledged=True))
    '3 5 90 1 -'
    """
    moment = mark.opened_at.isoformat() if mark.opened_at else "-"
    return f"{epoch} {mark.batch} {mark.position} {int(mark.acknowledged)} {moment}"


def read(value: str) -> tuple[int, Mark]:
    """Return the epoch and the mark that a field's value says.

    >>> read(written(3, NOTHING)) == (3, NOTHING), read(ABSENT)[0]
    (True, 0)
    """
    if value == ABSENT:
        return 0, NOTHING
    epoch, batch, position, acknowledged, moment = value.split(" ")
    opened_at = None if moment == "-" else datetime.fromisoformat(moment)
    return int(epoch), Mark.of(int(batch), int(position), opened_at, acknowledged == "1")


def epochs_of(found: Mapping[Place, tuple[int, Mark]]) -> dict[int, int]:
    """Return the highest epoch of each shard."""
    epochs: dict[int, int] = {}
    for (_, shard), (epoch, _) in found.items():
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return epochs
