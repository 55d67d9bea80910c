"""Progress: how far a dispatcher is in a shard, when its messages are complete in any order.

Endpoints answer in any order. So the messages of a shard's batch are complete in any order:

    position    every message of the batch up to it is complete
    ids         ranges of ids beyond the position: the batch's messages in them are complete

There are no more ranges than messages in memory, however many were answered behind one that is
slow. They hold for this batch only, because a message of the next one may have an id among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

NONE = "{}"
"""No ids, as PostgreSQL writes it."""


@dataclass(kw_only=True)
class InHand:
    """A shard that this member owns, and how far it is in the shard's batch."""

    shard: int
    epoch: int
    batch: int
    done: str
    open: str | None
    position: int
    known: str = NONE
    """What was complete beyond the position when this member took the shard over."""
    ids: str = NONE
    """What this member has marked as complete beyond the position."""
    read: int = 0
    """The messages up to this id were read."""
    whole: bool = False
    """Whether all messages of the batch were read."""
    turn: int = 0
    """Which read of the window's was the last to look at it; 0 before the first."""
    pending: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """The ids that were read and are not complete, in order."""
    last: int = 0
    """The highest id that is complete, among those that were read."""
    touched: bool = False
    """Whether there is anything to mark."""

    def __post_init__(self) -> None:
        self.read = max(self.read, self.position)

    def begin(self, batch: InHand) -> None:
        """Begin a batch that was opened."""
        self.batch, self.done, self.open = batch.batch, batch.done, batch.open

    def complete(self, id_: int) -> None:
        """Note that a message of the batch is complete."""
        del self.pending[id_]
        self.last = max(self.last, id_)
        self.touched = True

    @property
    def closes(self) -> bool:
        """Whether nothing of the batch is left."""
        return self.open is not None and self.whole and not self.pending

    def mark(self) -> Mark:
        """What is to be written; from now on, it counts as written."""
        self.touched = False
        epoch, batch, before = self.epoch, self.batch, self.ids
        if self.closes:
            assert self.open is not None  # noqa: S101 - only what is open is closed
            self.done, self.open, self.position = self.open, None, 0
            self.known, self.ids, self.read, self.whole, self.last = NONE, NONE, 0, False, 0
            return Mark(shard=self.shard, epoch=epoch, batch=batch, position=0, closed=True)
        if self.open is not None:
            first = next(iter(self.pending), None)
            self.position = self.read if first is None else first - 1
            # about ids beyond what was read, `known` stays true
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
    """How far a shard is."""

    shard: int
    epoch: int
    batch: int
    position: int
    closed: bool = False
    ids: str = NONE
    new: bool = False
    """Whether the ids are to be written."""


def _ranges(pending: Iterable[int], last: int) -> str:
    """The ids between pending ones, up to the last complete one, as a multirange of PostgreSQL.

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
    """The pending ids before the last complete one, and then the id after it."""
    for one in pending:
        if one > last:
            break
        yield one
    yield last + 1
