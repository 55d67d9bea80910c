"""Reading back: what a destination holds of a source, as of one moment, for `saf reconcile`.

Optional: a kind that cannot say it (`Capabilities.reads_back`) is named and not compared. It reads
only. To enter it keeps what is there from being purged, if something could; the moment that it
shows is that of the first question.
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
    """How many the source has."""
    since: datetime | None
    until: datetime | None
    """By created_at: since <= created_at < until; None is without end."""
    topics: Sequence[str]
    """Services whose messages are not in the hashes, because there is more than one of each."""


class Figures(NamedTuple):
    """What is held of one shard of a source."""

    shard: int
    stored: int
    plain: int
    """Those of no topic."""
    hashed: int
    """The sum of ``uuid_hash_extended(message_id, 0)`` of those of no topic."""


class Entry(NamedTuple):
    """A message's id, as one side has it."""

    message_id: bytes
    where: str
    """A destination: that stores it, or for which it is set aside; empty for all."""
    shard: int
    id: int
    service: str
    broker: UUID | None
    key: str | None
    created_at: datetime
    """Of what was discarded: when that was."""
    state: str
    """pending, aside or complete, in the source's log; stored; set_aside or discarded."""


class Reading(Protocol):
    """What one destination holds, as of one moment."""

    @property
    def name(self) -> str:
        """The destination's."""

    def identity(self) -> UUID:
        """As of `saf.destinations.Destination`."""

    def purged(self) -> str | None:
        """What it may have purged of on purpose, in words such as "inbox"; None if nothing."""

    def known(self, source: UUID) -> Known:
        """How far it has got with a source; without marks, if it keeps none."""

    def figures(self, what: Compared) -> Iterable[Figures]:
        """Of each shard that anything is held of."""

    def stored(self, what: Compared, shards: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Each message of some shards, and of all topics, as an `Entry`, by message id, sorted."""

    def begun(self, source: UUID, topics: Collection[str]) -> Iterable[tuple[str, datetime]]:
        """By topic, when the oldest message was created that is held."""
