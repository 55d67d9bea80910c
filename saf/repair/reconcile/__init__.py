"""Reconciling: the proof that what a source has completed is what its destinations hold.

For each shard of the source, two figures of each side are compared: a count, and a sum of hashes of
the message ids, which does not depend on their order. Each side is read once, on the server. Only
for shards whose figures differ are the ids themselves compared. They are sorted on the servers and
merged here in bounded memory, so that each message at fault is named:

    lost         complete at the source, and in no destination; or, for a topic's message, no longer
                 in a destination that was set back (`saf.repair.reconcile.copies`)
    duplicate    in the destinations more often than at the source
    doubled      its row stands twice at the source, because a backup was restored over what was
                 there; `saf rebase` removes one
    unexpected   in a destination, and not at the source

A destination that cannot be read back is named, and not compared. A message that may be there, and
is nowhere else, is counted as not compared (`saf.repair.reconcile.unread`).

Complete is what `saf.log.cursor` says, less what stands in saf.parked or saf.dead_letter or was
discarded by a person. A source does not record where each message went, so it is compared with all
of its destinations together. Services that are topics, by any frozen routes that are kept, are
compared by their ids. A message that no destination has is lost, and one that the same destination
has twice is a duplicate. The routes tell which copies a destination has lost that was set back.

There is no false alarm while everything runs. The source's snapshot is taken first, and what is
complete in it was committed at a destination before. What the destinations have beyond it is *in
flight* if the source knows it: the source has not marked it yet, or has sent it after its snapshot.
A second snapshot of the source, taken after the destinations', tells. Both logs are locked against
purging (ACCESS SHARE, so against nothing else) before any snapshot is taken.

What was purged is gone on purpose. Both sides are compared over the same range of created_at, which
travels unchanged. The range begins where the caller says; by default

- at no limit, if neither log has ever been purged: ids are in their first round, each slot that
  they have left holds rows, and no slot's file was ever replaced, as TRUNCATE does;
- else at ``now - retention``, by the source's clock. A purge takes no message younger than its
  retention: by created_at in an outbox, by received_at, which is later, in an inbox. This rests
  on the retention of *all* purges of both sides, which no table records.

Limits:

- Messages of at_most_once that a crash lost, by contract, are reported as lost.
- So are messages of which a transform makes nothing: their ids are not kept, only how many they
  were (``left_out``).
- A topic's message is not missed if another destination still has it, and the one that has lost it
  was not set back: a person has deleted it there, say. Copies that a destination that was set back
  may have lost, or may never have had, are only counted (``uncertain``).
- Two ids whose hashes add up to those of two other ids escape it (1 in 2^64).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from saf.database import Dsn
from saf.destinations.settings import DestinationSettings
from saf.repair.reconcile.comparing import differences, figures
from saf.repair.reconcile.copies import RoutesOf, set_back_copies
from saf.repair.reconcile.outcome import HARMLESS, Difference, Outcome, Range, Shard
from saf.repair.reconcile.sides import Both, read_both
from saf.repair.reconcile.unread import unread_of
from saf.repair.replay import Copy
from saf.routing.routes import current_routes
from saf.setaside.dropped import COUNTED, Reason

__all__ = ["Difference", "Lost", "Outcome", "Range", "Shard", "missing", "reconcile"]


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What a source's destinations have lost."""

    messages: list[tuple[int, int]]
    """The messages that no destination has, as (shard, id) in the source's outbox, sorted."""
    copies: list[Copy]
    """The messages of topics that are lost at some destinations."""
    uncertain: Mapping[str, int]
    """For each destination that was set back, how many copies it may have lost, or never had."""
    range: Range
    """What was compared."""
    unread: Mapping[str, str]
    """The destinations that were not compared, each with the reason."""


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
    """Compare one source with all of its destinations. Reads only.

    Args:
        name: the source's name, for people.
        source: where the source is.
        destinations: the settings of each of its destinations, by name.
        since: compare messages with this created_at or a later one; by default, see the module.
        until: compare messages with an earlier created_at than this.
        retention_seconds: every purge of either side has kept messages at least so long.
        routes: returns where messages go now, given a connection to the source.
        limit: how many messages are named at most; all are counted.

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
        for one in _differences(both, figures(both), routes):
            if one.kind == "uncertain":
                uncertain.update(one.lost_at)
            if one.kind != "lost" or one.id is None:
                continue
            if one.lost_at:
                copies.append(
                    Copy(
                        shard=one.shard,
                        id=one.id,
                        destinations=one.lost_at,
                        address=(one.service, one.broker, one.key),
                    )
                )
            else:
                messages.append((one.shard, one.id))
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
    """Return, as (shard, id), each message that no destination has, of all that can be compared."""
    return lost(name, source, destinations, retention_seconds=retention_seconds).messages


def _left_out(both: Both) -> int:
    ((messages,),) = both.source.fetch(COUNTED, {**both.params, "reason": Reason.LEFT_OUT})
    return int(messages)


def _differences(both: Both, shards: list[Shard], routes: RoutesOf) -> Iterator[Difference]:
    copies = set_back_copies(both.source, both.destinations, both.what.source, both.topics, routes)
    unread = unread_of(both.source.connection, both.unread, routes)
    return differences(both, [shard.shard for shard in shards if not shard.same], copies, unread)
