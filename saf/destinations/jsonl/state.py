"""State of a folder and of its sources: small files of JSON, replaced as a whole.

saf.json               the folder's identity, created once
.saf/SOURCE.json       a source's marks, and the number of its last file
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from saf.destinations.marks import Known, Mark, Place
from saf.destinations.queues import readable
from saf.log.disk import sync, unavailable_if_lost, write

IDENTITY, INSIDE = "saf.json", ".saf"
CURE = "bring the file back as it was, or the folder from a backup"


@dataclass(kw_only=True)
class State:
    """State of one source."""

    number: int = 0
    """Number of the source's last file."""
    marks: dict[Place, Mark] = field(default_factory=dict)
    epochs: dict[Place, int] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        """Return the state as the bytes of its file."""
        places = [
            [lane, shard, self.epochs[lane, shard], mark.batch, mark.position,
             _text(mark.opened_at), mark.acknowledged, _text(mark.set_aside_at)]
            for (lane, shard), mark in self.marks.items()
        ]  # fmt: skip
        return json.dumps({"number": self.number, "places": places}).encode()

    @classmethod
    def of(cls, content: bytes) -> State:
        """Make a state from the bytes of its file."""
        data = json.loads(content)
        state = cls(number=data["number"])
        for lane, shard, epoch, batch, position, opened_at, acknowledged, *aside in data["places"]:
            state.marks[lane, shard] = Mark.of(
                batch, position, _moment(opened_at), acknowledged, *map(_moment, aside)
            )
            state.epochs[lane, shard] = epoch
        return state


def read_identity(what: str, folder: Path) -> UUID:
    """Return the identity of a folder, or the future one of an empty folder; write nothing.

    An empty folder's identity is computed from its path. So a folder that is emptied, or whose disk
    is not mounted, is not taken for a new one: it is the same one, without its acknowledged data.

    Raises:
        Unavailable: the folder does not exist.
        Refused: its saf.json is damaged.
    """
    with unavailable_if_lost(what), readable(what, str(folder / IDENTITY), CURE):
        try:
            return UUID(json.loads((folder / IDENTITY).read_bytes())["destination"])
        except FileNotFoundError:
            os.scandir(folder).close()
            return uuid5(NAMESPACE_URL, folder.resolve().as_uri())


def make_identity(what: str, folder: Path) -> UUID:
    """Return the identity of a folder; it stays when the folder is moved.

    An empty folder becomes a destination.
    """
    identity = read_identity(what, folder)
    with unavailable_if_lost(what):
        (folder / INSIDE).mkdir(exist_ok=True)
        if not (folder / IDENTITY).exists():
            draft = folder / INSIDE / f"{uuid4()}.tmp"
            write(draft, json.dumps({"destination": str(identity)}).encode())
            # a concurrent process writes the same identity
            draft.rename(folder / IDENTITY)
            sync(folder)
    return identity


def read_state(what: str, folder: Path, source: UUID) -> State:
    """Return the state of a source.

    Raises:
        Refused: its file is damaged.
    """
    file = folder / INSIDE / f"{source}.json"
    try:
        with readable(what, str(file), CURE):
            return State.of(file.read_bytes())
    except FileNotFoundError:
        return State()


def known_of(what: str, folder: Path, source: UUID) -> Known:
    """Return the marks of a source, for `saf reconcile`, `saf doctor` and repairs."""
    destination = read_identity(what, folder)
    with unavailable_if_lost(what):
        state = read_state(what, folder, source)
    epochs: dict[int, int] = {}
    for (_, shard), epoch in state.epochs.items():
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return Known(destination=destination, marks=state.marks, epochs=epochs)


def _text(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
