"""Reading back: what a destination holds of a source, as of one moment, for `saf reconcile`.

Optional: a kind that cannot be read (`Capabilities.reads_back`) is named, and not compared. It only
reads. While it is entered, what it holds is not purged. It shows the moment of the first question.
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
    """What is compared."""

    source: UUID
    shards: int
    """The number of shards at the source."""
    since: datetime | None
    until: datetime | None
    """The range of created_at: since <= created_at < until; None is without a limit."""
    topics: Sequence[str]
    """Services whose messages are not in the hashes, because there are several copies of each."""


class Figures(NamedTuple):
    """How much is held of one shard of a source."""

    shard: int
    stored: int
    plain: int
    """The number of messages of no topic."""
    hashed: int
    """The sum of ``uuid_hash_extended(message_id, 0)`` over the messages of no topic."""


class Entry(NamedTuple):
    """A message's id, as one side has it."""

    message_id: bytes
    where: str
    """The destination that stores it, or for which it is set aside; empty for all."""
    shard: int
    id: int
    service: str
    broker: UUID | None
    key: str | None
    created_at: datetime
    """When it was discarded, if it was."""
    state: str
    """In the source's log: pending, aside or complete; at a destination: stored; or set_aside or
    discarded."""


class Reading(Protocol):
    """What one destination holds, as of one moment."""

    @property
    def name(self) -> str:
        """The destination's name."""

    def identity(self) -> UUID:
        """The destination's identity, as `saf.destinations.Destination` gives it."""

    def purged(self) -> str | None:
        """What it may have purged on purpose, in words such as "inbox"; None if nothing."""

    def known(self, source: UUID) -> Known:
        """Return how far it has got with a source; without marks, if it keeps none."""

    def figures(self, what: Compared) -> Iterable[Figures]:
        """Return the figures of each shard of which it holds anything."""

    def stored(self, what: Compared, shards: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Give an `Entry` for each message of some shards and of all topics, by message id."""

    def begun(self, source: UUID, topics: Collection[str]) -> Iterable[tuple[str, datetime]]:
        """Return, for each topic, when the oldest message that is held was created."""
