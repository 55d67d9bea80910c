"""Keys of one destination at a Redis server. All have one hash tag.

{saf}:TOPIC              a stream of messages
{saf}/identity           the destination's identity
{saf}/marks/SOURCE       a hash of one source's marks: a field for each shard and lane, with a value
                         in the form of `saf.destinations.written`
{saf}/streams/SOURCE     a set of the streams that messages of one source went to
{saf}/waited             nothing; written before a wait for replicas
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from saf.destinations.marks import Place


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


def waited(tag: str) -> str:
    """Return the key that is written before a wait for replicas."""
    return f"{{{tag}}}/waited"


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


def texts(fields: Mapping[bytes, bytes]) -> dict[Place, str]:
    """Return the written marks of places, from the fields of a source's marks."""
    return {place(name.decode()): value.decode() for name, value in fields.items()}
