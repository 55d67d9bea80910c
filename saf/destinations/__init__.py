"""Where messages are delivered: what the forwarder asks of a destination, of whatever kind.

Here are the protocol, what all kinds share (marks, places, reading back), and a folder or module
for each of saf's own kinds. Code outside of a kind's folder does not know the kind. It asks what it
needs of `saf.destinations.settings.DestinationSettings`, which `saf.destinations.kinds` finds.

A destination stores a chunk of messages in one transaction. If it can keep a watermark, it stores a
chunk exactly once, however often it is given: that is ``exactly_once``. It raises:

    Unavailable      it does not answer; the chunk may or may not be stored; give it again later
    UnknownService   a service that is addressed does not live there; nothing was stored
    AnotherBroker    a message is addressed to another broker; nothing was stored
    Fenced           it has met a newer owner of these shards; nothing was stored
    Ahead            it has stored what the source does not know; nothing was stored
    Behind           it no longer has what it has acknowledged; nothing was stored
    Restored         it was restored, and not repaired; nothing was stored
    Rejected         it answers, but does not accept these messages

The `Capabilities` of a kind say which of this it can do; `saf.testing.conformance` proves it.
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
    """What a kind of destination can do. It must keep what it says here."""

    exactly_once: bool = False
    """It keeps a mark for each place, which moves with the messages or not at all."""
    fences: bool = False
    """It refuses an epoch older than one that it has met in any lane (`Fenced`)."""
    knows_services: bool = False
    """It can be told which services live there, and refuses others (`UnknownService`)."""
    reads_back: bool = False
    """What it holds can be read, so it is reconciled, and what it has lost is sent again."""
    takes_parts: bool = False
    """It stores all that a transform has made of a message in one step, or nothing of it."""
    takes_dialogs: bool = True
    """It takes messages of dialogs. Otherwise they wait for a route to a broker: an answer could
    never come from there."""
    holds: bool = False
    """It gives no reader a message before its ``deliver_at``. Other kinds only pass the time on."""
    largest_body: int | None = None
    """The largest body that it takes, in bytes; larger ones are dead letters. None: saf's limit."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Messages for one destination, in the order of their lanes.

    ``rows`` has the source's columns ``id`` and ``shard``, and `saf.message.COLUMNS`. Rows of
    parked messages also have the ``batch`` that they were parked in, and when that was opened.

    Messages of the destination's own lane are in the order of their ids. Messages of other lanes
    have the columns `saf.setaside.lane_columns.LANE`, and may be of many lanes. Storing a chunk
    completes, in each lane, every message of a shard up to the last one that is in it.
    """

    source: UUID
    batch: Batch
    """The open batch, to which the shards belong."""
    rows: pa.Table
    prefix: str = ""
    """The prefix of its marks' names, because each quality of service has marks of its own."""
    known: Mapping[Place, Mark] = field(default_factory=dict)
    """The destination's marks in these lanes, as the source remembers them."""
    behind: frozenset[str] = frozenset()
    """Services with older messages in a lane of their own. New messages for them, if they are not
    stored yet, wait too, as if the destination did not know the services."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What became of a chunk: how many messages were stored now, and dropped as stored before."""

    messages: int
    dropped: int = 0
    marks: Mapping[Place, Mark] = field(default_factory=dict)
    """The marks of the lanes and shards of the chunk's messages, as they are now."""


class Destination(Protocol):
    """One place to deliver to. Used by one task at a time, and closed at its end."""

    def identity(self) -> UUID:
        """What tells it apart from every other destination, for ever, whatever its name is here."""

    def connect(self) -> None:
        """Connect. If this fails, nothing has been sent."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored:
        """Store a chunk durably, the whole or nothing, and commit.

        A kind that cannot store so much at once stores it in steps, in its order, each one with the
        marks after it. If it raises in between, what is stored is what the marks say. It refuses
        and rejects before the first step. A kind without marks that takes only some of a chunk
        says which ones, as `SafError.stored`: they are not given again.
        """

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; store nothing.

        Raises what `store` does.
        """

    def close(self) -> None:
        """Give up the connection."""
