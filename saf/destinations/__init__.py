"""Where messages are delivered: what the forwarder asks of a destination, of whatever kind.

Here are the protocol, what every kind shares (marks, places, reading back) and a folder or module
for each kind of saf's own. Nothing outside of a kind's folder knows the kind: what it needs it asks
of `saf.destinations.settings.DestinationSettings`, which `saf.destinations.kinds` finds by name.

A destination stores a chunk of messages in one transaction. If it can keep a watermark, it
stores a chunk exactly once however often it is given: that is ``exactly_once``. What it raises:

    Unavailable      it does not answer; the chunk may or may not be stored; give it again later
    UnknownService   services that are addressed do not live there; nothing was stored
    AnotherBroker    messages are addressed to another broker than it is; nothing was stored
    Fenced           it has heard from a newer owner of these shards; nothing was stored
    Ahead            it has stored what the source does not know; nothing was stored
    Behind           it has not any more what it has acknowledged; nothing was stored
    Restored         it is of another cluster, and not repaired; nothing was stored
    Rejected         it answers, and will not have these messages

A kind says by its `Capabilities` which of this it can; `saf.testing.conformance` proves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from saf.destinations.marks import Mark, Place
from saf.log.cursor import Batch

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a kind of destination can. What it says here it has to keep."""

    exactly_once: bool = False
    """It keeps a mark for each place, which moves with the messages or not at all."""
    fences: bool = False
    """It refuses an older epoch than one that it has heard of (`Fenced`)."""
    knows_services: bool = False
    """It can be told which services live there, and refuses others (`UnknownService`)."""
    reads_back: bool = False
    """What it holds can be read: it is reconciled, and what it has lost is sent again."""
    largest_body: int | None = None
    """Bytes; None if it takes any that saf takes. Larger ones are dead letters."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Messages for one destination, in the order of their lanes.

    ``rows`` has the columns ``id`` and ``shard`` of the source, and `saf.message.COLUMNS`; parked
    ones also have the ``batch`` they were parked in, and when that was opened.

    The messages of the destination's own lane are in the order of their ids. All others have the
    columns `saf.setaside.lane_columns.LANE`, and may be of many. Storing them completes, in each
    lane, every message of a shard up to the last one that is here.
    """

    source: UUID
    batch: Batch
    """The batch in hand: whose shards these are."""
    rows: pa.Table
    number: int
    """Of the batch that the last row is from."""
    prefix: str = ""
    """What the names of its marks begin with: other qualities have other marks."""
    known: Mapping[Place, Mark] = field(default_factory=dict)
    """What the source remembers of the destination's marks in these lanes."""
    behind: frozenset[str] = frozenset()
    """Services of which older messages wait in a lane of their own: those that are not stored yet
    wait too, as if the services were unknown."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What became of a chunk: messages stored now, and dropped as stored before."""

    messages: int
    dropped: int = 0
    marks: Mapping[Place, Mark] = field(default_factory=dict)
    """Of the lanes and shards that the chunk has messages of, as they are now."""


class Destination(Protocol):
    """One place to deliver to. Used by one task at a time, and closed at its end."""

    def identity(self) -> UUID:
        """What tells it apart from every other, whatever it is called here, and for ever."""

    def connect(self) -> None:
        """Be connected: what fails here has sent nothing."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk durably, whole or not at all, and commit."""

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """How far the lanes and shards of a chunk are stored; nothing of the chunk is.

        Raises what `store` does.
        """

    def close(self) -> None:
        """Give up the connection."""
