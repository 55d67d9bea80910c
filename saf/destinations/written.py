"""Written marks: an epoch and a mark as text, for kinds that store texts instead of columns."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from saf.destinations.marks import NOTHING, Known, Mark, Place

ABSENT = ""
"""Stands for a text that does not exist."""


def written(epoch: int, mark: Mark) -> str:
    """Return an epoch and a mark as text.

    >>> written(3, Mark(batch=5, position=90, acknowledged=True))
    '3 5 90 1 -'
    """
    moment = mark.opened_at.isoformat() if mark.opened_at else "-"
    aside = f" {mark.set_aside_at.isoformat()}" if mark.set_aside_at else ""
    return f"{epoch} {mark.batch} {mark.position} {int(mark.acknowledged)} {moment}{aside}"


def read(text: str) -> tuple[int, Mark]:
    """Return the epoch and the mark written in a text.

    >>> read(written(3, NOTHING)) == (3, NOTHING), read(ABSENT)[0]
    (True, 0)
    """
    if text == ABSENT:
        return 0, NOTHING
    epoch, batch, position, acknowledged, moment, *aside = text.split(" ")
    opened_at = None if moment == "-" else datetime.fromisoformat(moment)
    set_aside_at = datetime.fromisoformat(aside[0]) if aside else None
    answered = acknowledged == "1"
    return int(epoch), Mark.of(int(batch), int(position), opened_at, answered, set_aside_at)


def known_of(identity: UUID, texts: Mapping[Place, str]) -> Known:
    """Return a destination's knowledge of a source from the texts of its marks."""
    states = {place: read(text) for place, text in texts.items()}
    epochs: dict[int, int] = {}
    for (_, shard), (epoch, _) in states.items():
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return Known(
        destination=identity,
        marks={place: mark for place, (_, mark) in states.items()},
        epochs=epochs,
    )
