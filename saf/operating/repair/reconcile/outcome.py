"""Reconciling one source: both sides, open for reading, and the outcome of their comparison.

`read_both` opens the source and its destinations. Each is read as of one moment, and kept from
purges while it is open. A destination that cannot be read back raises no error: `Both.unread` names
it with the reason.

An `Outcome` has the figures of each shard, and the messages at fault. The comparison itself is in
`saf.operating.repair.reconcile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from saf.broker.health import refuse
from saf.database import Dsn, unavailable_if_lost
from saf.destinations import Compared, Reading
from saf.destinations.settings import DestinationSettings
from saf.errors import CannotReadBack, ConfigurationError
from saf.log.side import Side, open_side

Kind = Literal[
    "lost", "uncertain", "duplicate", "doubled", "unexpected", "in_flight", "not_compared"
]

HARMLESS = ("in_flight", "not_compared", "uncertain")
"""Kinds of differences that are not faults, as far as can be seen."""

Figures = tuple[int, int]
"""The number of messages, and the sum of the hashes of their ids."""

SOURCE = """
SELECT broker_id, shards, subscription_id, pg_current_snapshot()::text, clock_timestamp(),
       ARRAY(SELECT DISTINCT unnest(topics) FROM saf.route_version)
FROM saf.broker, saf.subscription s WHERE s.log = 'outbox' AND s.name = 'forwarder'
"""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of created_at compared: since <= created_at < until; None: unlimited."""

    since: datetime | None = None
    until: datetime | None = None
    purged: tuple[str, ...] = ()
    """Logs that may have been purged, so that the range begins at ``since``."""


@dataclass(frozen=True, kw_only=True)
class Both:
    """A source and its destinations, with the range and parameters of the comparison."""

    source: Side
    destinations: tuple[Reading, ...]
    unread: Mapping[str, str]
    """Destinations that cannot be read back, each with the reason."""
    range: Range
    what: Compared
    snapshot: str
    params: Mapping[str, Any]
    """The parameters of queries at the source."""
    later: Dsn
    """Dsn for reading the source again, after the destinations."""

    @property
    def topics(self) -> frozenset[str]:
        """Services that are topics now, or in frozen routes that are kept."""
        return frozenset(self.what.topics)


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


@contextmanager
def read_both(
    name: str,
    source: Dsn,
    destinations: Mapping[str, DestinationSettings],
    *,
    since: datetime | None,
    until: datetime | None,
    retention_seconds: float,
) -> Iterator[Both]:
    """Open a source and its destinations for reading; the source's snapshot is the first.

    Raises:
        Unavailable: one of the databases does not answer.
        Restored: the source's cursors mean nothing in its cluster.
        UsageError: a role may not read, or a destination has two names.
    """
    with ExitStack() as stack:
        here = stack.enter_context(open_side(name, f"broker {name!r}", source, "outbox"))
        sides: list[Reading] = []
        unread: dict[str, str] = {}
        for destination, settings in destinations.items():
            try:
                sides.append(stack.enter_context(settings.reading(destination)))
            except CannotReadBack as error:
                unread[destination] = error.why
        with unavailable_if_lost(here.what):
            refuse(here.connection)
        ((broker_id, shards, subscription_id, snapshot, now, topics),) = here.fetch(SOURCE, {})
        _refuse_twins(sides)
        purged = [f"outbox of {here.what}"] if here.may_be_purged() else []
        purged += [
            f"{what} of destination {side.name!r}" for side in sides if (what := side.purged())
        ]
        span = Range(since=since, until=until)
        if since is None and purged:
            span = Range(
                since=now - timedelta(seconds=retention_seconds), until=until, purged=tuple(purged)
            )
        params = {
            "source": broker_id,
            "subscription_id": subscription_id,
            "since": span.since,
            "until": span.until,
            "topics": topics,
        }
        yield Both(
            source=here,
            destinations=tuple(sides),
            unread=unread,
            range=span,
            what=Compared(
                source=broker_id, shards=shards, since=span.since, until=span.until, topics=topics
            ),
            snapshot=snapshot,
            params=params,
            later=source,
        )


def _refuse_twins(sides: list[Reading]) -> None:
    known: dict[UUID, str] = {}
    for side in sides:
        identity = side.identity()
        if identity in known:
            raise ConfigurationError(
                f"destinations {known[identity]!r} and {side.name!r} are the same broker, so "
                "messages would count twice: keep one of the two in saf.toml"
            )
        known[identity] = side.name
