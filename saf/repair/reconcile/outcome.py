"""The outcome of reconciling one source: figures, and the messages at fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

Kind = Literal[
    "lost", "uncertain", "duplicate", "doubled", "unexpected", "in_flight", "not_compared"
]


HARMLESS = ("in_flight", "not_compared", "uncertain")
"""Kinds of differences that are not faults, as far as can be seen."""

Figures = tuple[int, int]
"""The number of messages, and the sum of the hashes of their ids."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of created_at compared: since <= created_at < until; None: unlimited."""

    since: datetime | None = None
    until: datetime | None = None
    purged: tuple[str, ...] = ()
    """Logs that may have been purged, so that the range begins at ``since``."""


@dataclass(kw_only=True)
class Shard:
    """The figures of one shard of the source."""

    shard: int
    complete: int = 0
    """Messages complete at the source, without those that are set aside."""
    stored: int = 0
    """Messages stored at the destinations."""
    aside: int = 0
    pending: int = 0
    hashes: tuple[Figures, Figures] = field(default=((0, 0), (0, 0)), repr=False)
    """The figures of both sides without topics, whose messages are stored more than once."""

    @property
    def same(self) -> bool:
        """Whether both sides have the same messages, topics aside."""
        return self.hashes[0] == self.hashes[1]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A message on which the two sides do not agree."""

    kind: Kind
    shard: int
    id: int | None
    """Its id in the source's outbox, if it exists there."""
    message_id: UUID
    service: str
    key: str | None
    created_at: datetime
    stored: tuple[str, ...]
    """The destination of each stored copy."""
    broker: UUID | None = None
    """The broker that it is addressed to."""
    lost_at: tuple[str, ...] = ()
    """For a topic's message: the destinations that were set back and have lost their copy, or may
    have lost it if uncertain."""

    def as_dict(self) -> dict[str, Any]:
        """Return the difference as a dict for JSON."""
        return asdict(self) | {
            "message_id": str(self.message_id),
            "broker": self.broker and str(self.broker),
            "created_at": self.created_at.isoformat(),
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of reconciling one source."""

    broker: str
    range: Range
    shards: tuple[Shard, ...]
    counts: Mapping[str, int]
    """The number of messages of each `Kind`."""
    named: tuple[Difference, ...]
    """The differences by message, up to the limit; without those in flight or not compared."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Destinations that were not compared, each with the reason."""
    left_out: int = 0
    """Copies that transforms have ever left out; those in the compared range count as lost."""

    @property
    def same(self) -> bool:
        """Whether nothing is lost, duplicated or unexpected in the compared range."""
        return not any(count for kind, count in self.counts.items() if kind not in HARMLESS)
