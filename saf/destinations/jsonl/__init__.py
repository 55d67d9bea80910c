"""The kind ``jsonl``: a folder of files, one line of JSON for each message.

    [destinations.lake]
    kind = "jsonl"
    folder = "/data/orders"

`saf.destinations.jsonl.folder` describes the folder and its lines. Readers may delete files that
they have read.

All forwarders see the folder at the same path. ``flock`` must work between them, so the file system
is local, or mounted with locks, such as NFS 4.

The state of a folder and of its sources is in small files of JSON, replaced as a whole. They are
read here, because drivers lack Arrow:

    saf.json               the folder's identity, created once
    .saf/SOURCE.json       a source's marks, and the number of its last file
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, cast
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from pydantic import AfterValidator

from saf.destinations import Capabilities
from saf.destinations.marks import Known, Mark, Place
from saf.destinations.settings import DestinationSettings, readable, within
from saf.log.disk import sync, unavailable_if_lost, write

if TYPE_CHECKING:
    from saf.destinations.jsonl.folder import Folder

IDENTITY, INSIDE = "saf.json", ".saf"
"""Names of the file with the identity, and of the folder for files that readers must not see."""
CURE = "bring the file back as it was, or the folder from a backup"


class Jsonl(DestinationSettings):
    """Settings of a folder of files of JSON lines."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_parts=True
    )

    stores: ClassVar[tuple[str, str]] = ("folder", "Folder")

    kind: Literal["jsonl"] = "jsonl"
    folder: Annotated[Path, AfterValidator(Path.absolute)]
    """Existing folder. An empty folder becomes a destination at the first message."""
    max_line_bytes: Annotated[int, within(1024, 1 << 31)] | None = None
    """Longest line; longer messages are dead letters, because not all readers accept long lines."""
    lock_seconds: Annotated[float, within(0.01, 86_400)] = 30.0
    """Seconds that a forwarder waits for another one that is writing."""

    def identity(self, name: str) -> UUID:
        """Return the folder's identity, stored or future; see `DestinationSettings.identity`."""
        return read_identity(f"destination {name!r}", self.folder)

    def known(self, name: str, source: UUID, *, role: str) -> Known:  # noqa: ARG002 - unused here
        """Return the folder's marks of a source; see `DestinationSettings.known`."""
        return known_of(f"destination {name!r}", self.folder, source)

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if the folder cannot be used. It need not be a destination yet."""
        cast("Folder", self.open(name)).look()
        yield from ()


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
