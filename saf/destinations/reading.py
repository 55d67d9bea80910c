"""Reading back: messages that a destination holds of a source at one moment, for `saf reconcile`.

Optional: a kind that cannot be read (`Capabilities.reads_back`) is named, and not compared. Reading
changes nothing. While a reading is open, its messages are not purged. A reading shows the
state at its first query.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from saf.destinations.marks import Known


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
