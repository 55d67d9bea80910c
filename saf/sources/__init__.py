"""Sources: topics of other brokers, read into the inbox of a broker of saf, exactly once.

This is the mirror image of `saf.destinations`. The package contains the protocol, what all kinds
share, and a folder for each kind. Code outside a kind's folder uses
`saf.sources.settings.SourceSettings`, which `saf.sources.kinds` finds.

A queue has no places: its messages are acknowledged after they are stored, and a window of ids
recognises those that are delivered again (`saf.sources.window`).

A partition of a topic is a shard of a source. Each message has a `Position` in its partition, two
numbers that rise with each message: an offset, a sequence or the two parts of an entry's id. A
source's mark is a row of saf.watermark at the inbox, with the position as its batch and position.
The mark moves in the transaction that stores the messages (`saf.sources.storing`). Nothing is
written at the topic's broker, and nothing is remembered anywhere else. So a process that is killed,
or an answer that gets lost, leaves a mark that tells exactly where to continue.

Forwarders share the partitions of a source, with owners, leases and epochs
(`saf.sources.ownership`). `saf.sources.reader` reads, and `saf.sources.judging` compares a mark
with what its partition has now: a topic that was set back, deleted and made again, or purged past
the mark is refused by name. `saf.sources.decoding` turns records into messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol

Position = tuple[int, int]
"""Place of a message in its partition. Positions rise; they need not be consecutive."""

BEGINNING: Position = (0, 0)
"""Position before the first message of any partition."""


MOST_BYTES = 32 << 20
"""Bytes of bodies to read at a time, by default."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What a partition has at one moment."""

    last: Position
    """Position of the newest message ever added; `BEGINNING` if there was none."""
    first: Position | None
    """Position of the oldest message that still exists; None if the partition is empty."""
    added: int
    """Number of messages, or of positions, that were ever added."""
    removed: int
    """Number of these that no longer exist."""
    exists: bool = True
    """False if the topic does not exist."""
    topic_id: str | None = None
    """Id that the topic got when it was created; None if its broker gives none."""
    waiting: int | None = None
    """For a topic without places: the number of messages that wait in it. The numbers above mean
    nothing then."""

    def end(self, position: Position) -> Position:
        """Return the present end of a partition that was read up to a position."""
        return self.last if self.waiting is None else (position[0], position[1] + self.waiting)

    def pending(self, progress: Progress) -> int:
        """Return how many messages were not read yet."""
        if self.waiting is not None:
            return self.waiting
        return max(self.added - (progress.added or 0), 0)


GONE = Extent(last=BEGINNING, first=None, added=0, removed=0, exists=False)
"""Extent of a partition that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a partition was read."""

    shard: int
    position: Position
    """Position of the last message that was read."""
    added: int | None
    """Number of messages up to that position, as `Extent.added` counts them; None: unknown."""
    topic_id: str | None = None
    """Id of the topic that was read; None: unknown."""


class Record(NamedTuple):
    """A message as its broker has it. A tuple, because making one takes a quarter of the time."""

    position: Position
    headers: Mapping[str, bytes]
    body: bytes
    key: bytes | None = None
    """Key of the record, where the broker's records have keys."""
    created_at: datetime | None = None
    """Time at which the broker added it; None if unknown."""
    problem: str | None = None
    """Why the record cannot be read; None if it can."""
    id: str | None = None
    """For a topic without places: the id that the writer gave it, by which it is recognised when it
    is delivered again, or a new one."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Consecutive records of a partition, with the partition's extent as they were read."""

    extent: Extent
    records: Sequence[Record] = field(default_factory=tuple)
    added: int | None = None
    """Number of messages up to the last record, as `Extent.added` counts them; None: unknown."""
    end: Position | None = None
    """Position up to which nothing more can be read; None: that of the last record."""
    receipt: object | None = None
    """What `Source.acknowledge` needs once the records are stored; None: nothing to acknowledge."""


class Source(Protocol):
    """A topic that is read. Used by one thread at a time."""

    @property
    def prefix(self) -> str:
        """Prefix of CloudEvents attributes in headers."""

    def connect(self) -> None:
        """Connect.

        Raises:
            Unavailable: the broker does not answer.
            Refused: an operator must fix something.
        """

    def partitions(self) -> int:
        """Return the number of partitions."""

    def extent(self, shard: int) -> Extent:
        """Return what a partition has now."""

    def read(self, shard: int, after: Position, limit: int, size: int = MOST_BYTES) -> Records:
        """Return the records of a partition after a position, in order.

        Return at most ``limit`` records, and no more once their bodies have ``size`` bytes, so that
        memory does not grow with large bodies.
        """

    def acknowledge(self, receipt: object) -> None:
        """Acknowledge records that are stored now, by their receipt.

        Only called for a topic without places, whose `Records` have receipts.
        """

    def close(self) -> None:
        """Close the connection."""
