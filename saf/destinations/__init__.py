"""Where messages are delivered: what the forwarder requires of every kind of destination.

This package contains the protocol, what all kinds share (marks, places, reading back), and a folder
or module for each of saf's own kinds. Code outside a kind's folder does not know the kind. It uses
`saf.destinations.settings.DestinationSettings`, which `saf.destinations.kinds` finds.

A destination stores a chunk of messages in one transaction. If it can keep a watermark, it stores a
chunk exactly once, no matter how often the chunk is given: ``exactly_once``. If it can name the
messages that are concerned, it returns a `Refusal`:

    UnknownService   an addressed service does not live there; nothing was stored
    AnotherBroker    a message is addressed to another broker; nothing was stored
    Rejected, or     some messages were stored all the same, at a destination without marks
    Unavailable

If the whole chunk is refused, it raises:

    Unavailable      no answer; the chunk may or may not be stored; retry later
    Fenced           the destination has met a newer owner of these shards; nothing was stored
    Ahead            the destination has stored what the source does not know; nothing was stored
    Behind           the destination has lost acknowledged messages; nothing was stored
    Restored         the destination was restored and not repaired; nothing was stored
    Rejected         the destination answers, but does not accept some message of the chunk

The `Capabilities` of a kind declare which of these it supports. `saf.testing.conformance` proves
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import UUID

from saf.destinations.marks import Known, Mark, Place
from saf.errors import SafError
from saf.log.cursor import Batch

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a kind of destination. The kind must live up to them."""

    exactly_once: bool = False
    """Keeps a mark for each place, which moves with the messages or not at all."""
    fences: bool = False
    """Refuses an epoch older than one that it has met in any lane (`Fenced`)."""
    knows_services: bool = False
    """Can be told which services live there, and refuses others (`UnknownService`)."""
    reads_back: bool = False
    """Stored messages can be read, so saf reconciles them and sends lost ones again."""
    takes_parts: bool = False
    """Stores all that a transform has made of a message in one step, or none."""
    takes_dialogs: bool = True
    """Accepts messages of dialogs. Otherwise they wait for a route to a broker, because no answer
    could ever come back."""
    holds: bool = False
    """Hides a message from readers until its ``deliver_at``. Other kinds only pass the time on."""
    largest_body: int | None = None
    """Largest body in bytes; messages with larger ones are dead letters. None: saf's limit."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Messages for one destination, in the order of their lanes.

    ``rows`` has the source's columns ``id`` and ``shard``, and `saf.columns.COLUMNS`. Rows of
    parked messages also have the ``batch`` that they were parked in, and its ``opened_at``.

    Messages of the destination's own lane are in the order of their ids. Messages of other lanes
    have the columns `saf.setaside.lane_columns.LANE`, and may belong to many lanes. Storing a chunk
    completes, in each lane, all messages of a shard up to the chunk's last message of that shard.
    """

    source: UUID
    batch: Batch
    """The open batch that the shards belong to."""
    rows: pa.Table
    prefix: str = ""
    """Prefix of the names of its marks, because each quality of service has marks of its own."""
    known: Mapping[Place, Mark] = field(default_factory=dict)
    """The destination's marks in these lanes, as remembered by the source."""
    behind: frozenset[str] = frozenset()
    """Services with older messages in a lane of their own. New messages for these services wait too
    unless they are stored already, as if the destination did not know the services."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Result of a chunk: how many messages were stored now, and how many dropped as repeats."""

    messages: int
    dropped: int = 0
    marks: Mapping[Place, Mark] = field(default_factory=dict)
    """Current marks of the lanes and shards of the chunk's messages."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Result of a chunk that was not stored as a whole."""

    error: SafError
    """The reason."""
    rows: pa.Table | None = None
    """The refused messages; the others can be given again without them. None: the whole chunk."""
    stored: pa.Table | None = None
    """Messages that were stored all the same, and are not given again. None: nothing was stored, or
    what was stored is unknown."""


class Destination(Protocol):
    """One place to deliver to. Used by one task at a time; the task closes it at its end."""

    def identity(self) -> UUID:
        """Return the permanent id of the destination, which does not depend on its name."""

    def connect(self) -> None:
        """Connect. If this fails, nothing was sent."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk durably, all or nothing, and commit.

        A kind that cannot store a whole chunk in one step stores it in several, in order, each with
        the marks after it. If it raises in between, the marks show how far it got. It refuses and
        rejects messages before the first step. A kind without marks that stores only some of a
        chunk lists them as `Refusal.stored`.
        """

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored, without storing anything.

        Raises the same errors as `store`.
        """

    def close(self) -> None:
        """Close the connection."""


class FewMessages(Protocol):
    """A session that stores few messages of one source by one statement."""

    identity: UUID
    """The permanent id of the destination."""

    def store(self, given: Mapping[str, Any]) -> bool:
        """Store messages exactly once and durably, if nothing must be decided about them.

        Return False if nothing was changed, because the destination's marks are not the known ones,
        or it may not store all of the messages.

        Args:
            given: the ``source``; the columns of messages, by name, in order; the parameters of
                `saf.destinations.marks.PLACES`; ``batch`` and ``opened_at`` of the marks to move
                to; the ``services`` addressed; and the ``destination``, which must be this one.
        """

    def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Range of a comparison."""

    source: UUID
    shards: int
    """Number of shards at the source."""
    since: datetime | None
    until: datetime | None
    """The range of created_at: since <= created_at < until; None is unlimited."""
    topics: Sequence[str]
    """Services whose messages are left out of the hashes, because each has several copies."""


class Figures(NamedTuple):
    """Counts of the messages held of one shard of a source."""

    shard: int
    stored: int
    plain: int
    """Number of messages that belong to no topic."""
    hashed: int
    """Sum of ``uuid_hash_extended(message_id, 0)`` over messages that belong to no topic."""


class Entry(NamedTuple):
    """A message's id as one side has it."""

    message_id: bytes
    where: str
    """Destination that stores the message, or for which it is set aside; empty for all."""
    shard: int
    id: int
    service: str
    broker: UUID | None
    key: str | None
    created_at: datetime
    """For a discarded message, when it was discarded."""
    state: str
    """In the source's log: pending, aside or complete. At a destination: stored. Or set_aside or
    discarded."""


class Reading(Protocol):
    """Contents of one destination at one moment."""

    @property
    def name(self) -> str:
        """The destination's name."""

    def identity(self) -> UUID:
        """Return the destination's identity, as `saf.destinations.Destination` does."""

    def purged(self) -> str | None:
        """Return what may have been purged on purpose, such as "inbox"; None if nothing."""

    def known(self, source: UUID) -> Known:
        """Return how far the destination has got with a source; without marks if it keeps none."""

    def figures(self, what: Compared) -> Iterable[Figures]:
        """Return the figures of each shard that has messages."""

    def stored(self, what: Compared, shards: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Yield an `Entry` for each message of some shards and all topics, by message id."""

    def begun(self, source: UUID, topics: Collection[str]) -> Iterable[tuple[str, datetime]]:
        """Return for each topic when the oldest message held was created."""
