"""Both sides of a comparison, each read as of one moment and kept from purges during it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from saf.broker.health import refuse
from saf.database import Dsn, unavailable_if_lost
from saf.destinations.reading import Compared, Reading
from saf.destinations.settings import DestinationSettings
from saf.errors import CannotReadBack, ConfigurationError
from saf.log.side import Side, open_side
from saf.repair.reconcile.outcome import Range

SOURCE = """
SELECT broker_id, shards, subscription_id, pg_current_snapshot()::text, clock_timestamp(),
       ARRAY(SELECT DISTINCT unnest(topics) FROM saf.route_version)
FROM saf.broker, saf.subscription s WHERE s.log = 'outbox' AND s.name = 'forwarder'
"""


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
