"""Reconciling: prove that destinations have exactly the messages that a source has completed.

For each shard of the source, two figures of each side are compared: a count, and a sum of hashes of
the message ids, which does not depend on their order. Each side is read once, on the server. Only
for shards whose figures differ are the ids themselves compared. They are sorted on the servers and
merged here in bounded memory, so that each message at fault is named:

    lost         complete at the source, and in no destination; or, for a topic's message, no longer
                 in a destination that was set back (`saf.operating.repair.reconcile.copies`)
    duplicate    in the destinations more often than at the source
    doubled      its row exists twice at the source, because a backup was restored over existing
                 rows; `saf rebase` removes one
    unexpected   in a destination, and not at the source

A destination that cannot be read back is named, and not compared. A message that may be there, and
is nowhere else, is counted as not compared (`saf.operating.repair.reconcile.comparing`).

Messages are complete as `saf.log.cursor` defines it, except those in saf.parked or saf.dead_letter,
or discarded by an operator. A source does not record where each message went, so it is compared
with all of its destinations together. Services that are topics, by any frozen routes that are kept,
are compared by their ids. A message that no destination has is lost, and one that the same
destination has twice is a duplicate. The routes show which copies a destination that was set back
has lost.

There are no false alarms while processes run. The source's snapshot is taken first, and all
messages complete in it were committed at a destination before. Messages that the destinations have
in addition are *in flight* if the source knows them: the source has not marked them yet, or has
sent them after its snapshot. A second snapshot of the source, taken after the destinations', shows
this. Both logs are locked against purging (ACCESS SHARE, so against nothing else) before any
snapshot is taken.

Purged messages are gone on purpose. Both sides are compared over the same range of created_at,
which is transferred unchanged. The range begins where the caller sets it; by default

- without a limit, if neither log has ever been purged: ids are in their first round, each slot that
  they have left contains rows, and no slot's file was ever replaced, as TRUNCATE does;
- else at ``now - retention``, by the source's clock. A purge removes no message younger than its
  retention: by created_at in an outbox, by received_at, which is later, in an inbox. This depends
  on the retention of *all* purges of both sides, which no table records.

Limits:

- at_most_once messages that a crash lost, by contract, are reported as lost.
- So are messages that a transform leaves out: their ids are not kept, only their number
  (``left_out``).
- A missing copy of a topic's message is not noticed if another destination still has the message,
  and the destination without it was not set back, e.g. because an operator has deleted it there.
  Copies that a destination that was set back may have lost, or may never have had, are only counted
  (``uncertain``).
- Two ids whose hashes add up to those of two other ids are not noticed (1 in 2^64).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.operating.repair.reconcile.comparing import differences, figures, unread_of
from saf.operating.repair.reconcile.copies import RoutesOf, set_back_copies
from saf.operating.repair.reconcile.outcome import (
    HARMLESS,
    Both,
    Difference,
    Outcome,
    Range,
    Shard,
    read_both,
)
from saf.operating.repair.replay import Copy
from saf.routing.routes import current_routes
from saf.setaside.dropped import COUNTED, Reason

__all__ = ["Difference", "Lost", "Outcome", "Range", "Shard", "missing", "reconcile"]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Messages that a source's destinations have lost."""

    messages: list[tuple[int, int]]
    """Messages that no destination has, as (shard, id) in the source's outbox, sorted."""
    copies: list[Copy]
    """Messages of topics that are lost at some destinations."""
    uncertain: Mapping[str, int]
    """For each destination that was set back, copies that it may have lost, or never had."""
    range: Range
    """The range that was compared."""
    unread: Mapping[str, str]
    """Destinations that were not compared, each with the reason."""


def reconcile(
    name: str,
    source: Dsn,
    destinations: Mapping[str, DestinationSettings],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    retention_seconds: float,
    routes: RoutesOf = current_routes,
    limit: int = 100,
) -> Outcome:
    """Compare one source with all of its destinations. Only reads.

    Args:
        name: the source's name, for errors.
        source: the source's dsn.
        destinations: the settings of each of its destinations, by name.
        since: earliest created_at of messages to compare; default: see the module.
        until: compare only messages with an earlier created_at.
        retention_seconds: every purge of either side has kept messages at least this long.
        routes: returns the current routes, given a connection to the source.
        limit: maximum number of messages to name; all are counted.

    Raises:
        Unavailable: one of the databases does not answer.
        Restored: the source's cursors mean nothing in its cluster.
        UsageError: a role may not read, or a destination has two names.
    """
    with read_both(
        name, source, destinations, since=since, until=until, retention_seconds=retention_seconds
    ) as both:
        shards = figures(both)
        counts: Counter[str] = Counter()
        named: list[Difference] = []
        for difference in _differences(both, shards, routes):
            counts[difference.kind] += 1
            if difference.kind not in HARMLESS and len(named) < limit:
                named.append(difference)
        return Outcome(
            broker=name,
            range=both.range,
            shards=tuple(shards),
            counts=counts,
            named=tuple(named),
            unread=both.unread,
            left_out=_left_out(both) if counts["lost"] else 0,
        )


def lost(
    name: str,
    source: Dsn,
    destinations: Mapping[str, DestinationSettings],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    retention_seconds: float,
    routes: RoutesOf = current_routes,
) -> Lost:
    """Return each message that is lost; see `reconcile` for the arguments and errors."""
    with read_both(
        name, source, destinations, since=since, until=until, retention_seconds=retention_seconds
    ) as both:
        messages: list[tuple[int, int]] = []
        copies: list[Copy] = []
        uncertain: Counter[str] = Counter()
        for difference in _differences(both, figures(both), routes):
            if difference.kind == "uncertain":
                uncertain.update(difference.lost_at)
            if difference.kind != "lost" or difference.id is None:
                continue
            if difference.lost_at:
                copies.append(
                    Copy(
                        shard=difference.shard,
                        id=difference.id,
                        destinations=difference.lost_at,
                        address=(difference.service, difference.broker, difference.key),
                    )
                )
            else:
                messages.append((difference.shard, difference.id))
        return Lost(
            messages=sorted(messages),
            copies=copies,
            uncertain=uncertain,
            range=both.range,
            unread=both.unread,
        )


def missing(
    name: str,
    source: Dsn,
    destinations: Mapping[str, DestinationSettings],
    *,
    retention_seconds: float,
) -> list[tuple[int, int]]:
    """Return each comparable message that no destination has, as (shard, id)."""
    return lost(name, source, destinations, retention_seconds=retention_seconds).messages


def _left_out(both: Both) -> int:
    ((messages,),) = both.source.fetch(COUNTED, {**both.params, "reason": Reason.LEFT_OUT})
    return int(messages)


def _differences(both: Both, shards: list[Shard], routes: RoutesOf) -> Iterator[Difference]:
    copies = set_back_copies(both.source, both.destinations, both.what.source, both.topics, routes)
    unread = unread_of(both.source.connection, both.unread, routes)
    return differences(both, [shard.shard for shard in shards if not shard.same], copies, unread)
