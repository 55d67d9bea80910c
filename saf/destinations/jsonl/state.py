"""What a folder knows of itself and of its sources: small files of JSON, replaced as a whole.

saf.json               what the folder is: its identity, made once
.saf/SOURCE.json       of one source: its marks, and the number of its last file
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

from saf.destinations.marks import Known, Mark, Place
from saf.errors import Refused, Unavailable

IDENTITY, INSIDE = "saf.json", ".saf"
TO_MEND = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}


@dataclass(kw_only=True)
class State:
    """What is stored of one source."""

    number: int = 0
    """Of its last file."""
    marks: dict[Place, Mark] = field(default_factory=dict)
    epochs: dict[Place, int] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        """As it is kept."""
        places = [
            [lane, shard, self.epochs[lane, shard], mark.batch, mark.position,
             mark.opened_at and mark.opened_at.isoformat(), mark.acknowledged]
            for (lane, shard), mark in self.marks.items()
        ]  # fmt: skip
        return json.dumps({"number": self.number, "places": places}).encode()

    @classmethod
    def of(cls, content: bytes) -> State:
        """The same, read."""
        said = json.loads(content)
        state = cls(number=said["number"])
        for lane, shard, epoch, batch, position, opened_at, acknowledged in said["places"]:
            moment = opened_at and datetime.fromisoformat(opened_at)
            state.marks[lane, shard] = Mark.of(batch, position, moment, acknowledged)
            state.epochs[lane, shard] = epoch
        return state


@contextmanager
def unavailable_if_lost(what: str) -> Iterator[None]:
    """Turn what a file system says into `Unavailable`; what a person has to mend, `Refused`."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        if error.errno in TO_MEND:
            cure = "give this user a folder that it may write to"
            raise Refused(what, reason, cure) from None
        raise Unavailable(what, reason) from None


def read_identity(what: str, folder: Path) -> UUID:
    """What the folder is; what an empty one would be, without writing anything.

    That follows from its path. So one that is emptied, or whose disk is not mounted, is not taken
    for a new one, but for itself without what it had acknowledged.

    Raises:
        Unavailable: it is not there.
    """
    with unavailable_if_lost(what):
        try:
            return UUID(json.loads((folder / IDENTITY).read_bytes())["destination"])
        except FileNotFoundError:
            os.scandir(folder).close()
            return uuid5(NAMESPACE_URL, folder.resolve().as_uri())


def make_identity(what: str, folder: Path) -> UUID:
    """What the folder is, and goes on to be if it is moved; an empty one is made a destination."""
    identity = read_identity(what, folder)
    with unavailable_if_lost(what):
        (folder / INSIDE).mkdir(exist_ok=True)
        if not (folder / IDENTITY).exists():
            draft = folder / INSIDE / f"{uuid4()}.tmp"
            write(draft, json.dumps({"destination": str(identity)}).encode())
            draft.rename(folder / IDENTITY)  # whoever else does it writes the same
            sync(folder)
    return identity


def read_state(folder: Path, source: UUID) -> State:
    """What is stored of a source."""
    try:
        return State.of((folder / INSIDE / f"{source}.json").read_bytes())
    except FileNotFoundError:
        return State()


def known_of(what: str, folder: Path, source: UUID) -> Known:
    """The marks of a source, for those who compare."""
    destination = read_identity(what, folder)
    with unavailable_if_lost(what):
        state = read_state(folder, source)
    epochs: dict[int, int] = {}
    for (_, shard), epoch in state.epochs.items():
        epochs[shard] = max(epoch, epochs.get(shard, 0))
    return Known(destination=destination, marks=state.marks, epochs=epochs)


def write(file: Path, content: Any) -> None:
    """Write a file durably; its name is durable once its folder is, see `sync`."""
    with file.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def sync(folder: Path) -> None:
    """Make what a folder says of its files' names durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
