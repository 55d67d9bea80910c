"""Progress: a dispatcher's position in a shard, while messages complete in any order.

Endpoints answer in any order. So the messages of a shard's batch complete in any order:

    position    every message of the batch up to it is complete
    ids         ranges of ids beyond the position: the batch's messages in them are complete

There are no more ranges than messages in memory, however many messages were answered behind a slow
one. The ranges hold for this batch only, because a message of the next batch may have an id within
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from saf.receiving.hand import NO_IDS, Cursor, Place


@dataclass(kw_only=True)
class InHand(Cursor):
    """A shard that this member owns, and the progress in its batch."""

    ids: str = NO_IDS
    """Ids beyond the position that this member has marked as complete."""
    read: int = 0
    """Highest id up to which messages were read."""
    whole: bool = False
    """True if all messages of the batch were read."""
    turn: int = 0
    """Number of the window's read that last visited the shard; 0 before the first."""
    pending: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Ids that were read and are not complete, in order."""
    last: int = 0
    """Highest complete id among those that were read."""
    touched: bool = False
    """True if there is anything to mark."""

    def __post_init__(self) -> None:
        self.read = max(self.read, self.position)

    @property
    def place(self) -> Place:
        """Where to read on."""
        return Place(self.shard, self.done, self.open, self.read, self.beyond)

    def begin(self, batch: InHand) -> None:
        """Begin an opened batch."""
        self.batch, self.done, self.open = batch.batch, batch.done, batch.open

    def complete(self, id_: int) -> None:
        """Note that a message of the batch is complete."""
        del self.pending[id_]
        self.last = max(self.last, id_)
        self.touched = True

    @property
    def closes(self) -> bool:
        """True if no message of the batch is left."""
        return self.open is not None and self.whole and not self.pending

    def mark(self) -> Mark:
        """Return the mark to write; from now on, it counts as written."""
        self.touched = False
        epoch, batch, before = self.epoch, self.batch, self.ids
        if self.closes:
            assert self.open is not None  # noqa: S101 - only an open batch is closed
            self.done, self.open, self.position = self.open, None, 0
            self.beyond, self.ids, self.read, self.whole, self.last = NO_IDS, NO_IDS, 0, False, 0
            return Mark(shard=self.shard, epoch=epoch, batch=batch, position=0, closed=True)
        if self.open is not None:
            first = next(iter(self.pending), None)
            self.position = self.read if first is None else first - 1
            # for ids not read yet, `beyond` stays valid
            self.ids = _ranges(self.pending, self.last)
        return Mark(
            shard=self.shard,
            epoch=epoch,
            batch=batch,
            position=self.position,
            ids=self.ids,
            new=self.ids != before,
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Progress of a shard."""

    shard: int
    epoch: int
    batch: int
    position: int
    closed: bool = False
    ids: str = NO_IDS
    new: bool = False
    """True if the ids must be written."""


def _ranges(pending: Iterable[int], last: int) -> str:
    """Return the ids between pending ones, up to the last complete one, as an int8multirange.

    >>> _ranges([3, 7, 8, 20], 15), _ranges([3, 7], 5), _ranges([9], 5), _ranges([], 5)
    ('{[4,7),[9,16)}', '{[4,6)}', '{}', '{}')
    """
    parts = [
        f"[{one + 1},{following})"
        for one, following in pairwise(_until(pending, last))
        if following > one + 1
    ]
    return "{" + ",".join(parts) + "}"


def _until(pending: Iterable[int], last: int) -> Iterator[int]:
    """Yield the pending ids before the last complete one, and then the id after it."""
    for position in pending:
        if position > last:
            break
        yield position
    yield last + 1
