"""Reconciling: the proof that what a source has completed is what its destinations hold.

Per shard of the source, two figures of each side are compared, a count and a sum of hashes of the
message ids, which does not depend on their order. Each side is read once, on the server. Only for
shards whose figures differ are the ids themselves compared, sorted on the servers and merged here
in bounded memory, so that each message at fault is named:

    lost         complete at the source, and in no destination
    duplicate    in the destinations more often than at the source
    unexpected   in a destination, and not at the source

Complete is what `saf.log.cursor` says, less what stands in saf.parked or saf.dead_letter or was
discarded by a person. A source does not record where each message went, so it is compared with
all of its destinations together. Services that are topics, by any frozen routes that are kept, are
compared by their ids: a message that no destination has is lost, and one that the same
destination has twice a duplicate.

Why there is no false alarm while everything runs: the source's snapshot is taken first, and what
is complete in it was committed at a destination before. What the destinations have beyond it is
*in flight* if the source knows it and has not marked it, or sent it after its snapshot; that is
looked up in a second snapshot of the source, taken after the destinations'. Both logs are
locked against purging (ACCESS SHARE, so against nothing else) before any snapshot is taken.

What was purged is gone on purpose. By created_at, which travels unchanged, both sides are compared
over the same range. Its beginning, unless given, is

- none, if neither log has ever been purged: ids are in their first round, each slot that they
  have left holds rows, and no slot's file was ever replaced, as TRUNCATE does;
- else ``now - retention``, by the source's clock. A purge takes no message younger than its
  retention: by created_at in an outbox, by received_at, which is later, in an inbox. This rests
  on the retention of *all* purges of both sides, which no table records.

What it does not see: messages of at_most_once that a crash lost, by contract, are reported as
lost; a topic's message that only some of its destinations have is taken for whole, because which
they were is not recorded for ever; two ids whose hashes add up to those of two others escape it
(1 in 2^64).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from saf.database import Dsn
from saf.repair.reconcile.comparing import differences, figures
from saf.repair.reconcile.outcome import Difference, Outcome, Range, Shard
from saf.repair.reconcile.sides import read_both

__all__ = ["Difference", "Outcome", "Range", "Shard", "missing", "reconcile"]


def reconcile(
    name: str,
    source: Dsn,
    destinations: Mapping[str, Dsn],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    retention_seconds: float,
    limit: int = 100,
) -> Outcome:
    """Compare one source with all of its destinations. Reads only.

    Args:
        name: the source's, for people.
        source: where the source is.
        destinations: where each of its destinations is, by name.
        since: from which created_at on; by default from where on nothing was purged.
        until: before which created_at.
        retention_seconds: how long every purge, of either side, has kept messages at least.
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
        for difference in differences(both, [s.shard for s in shards if not s.same]):
            counts[difference.kind] += 1
            if difference.kind != "in_flight" and len(named) < limit:
                named.append(difference)
        return Outcome(
            broker=name,
            range=both.range,
            shards=tuple(shards),
            counts=counts,
            named=tuple(named),
        )


def lost(
    name: str,
    source: Dsn,
    destinations: Mapping[str, Dsn],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    retention_seconds: float,
) -> tuple[list[tuple[int, int]], Range]:
    """(shard, id) in the source's outbox of each lost message, sorted, and what was compared.

    See `reconcile`.
    """
    with read_both(
        name, source, destinations, since=since, until=until, retention_seconds=retention_seconds
    ) as both:
        differ = [shard.shard for shard in figures(both) if not shard.same]
        found = sorted(
            (difference.shard, difference.id)
            for difference in differences(both, differ)
            if difference.kind == "lost" and difference.id is not None
        )
        return found, both.range


def missing(
    name: str, source: Dsn, destinations: Mapping[str, Dsn], *, retention_seconds: float
) -> list[tuple[int, int]]:
    """The same alone, of all that can be compared."""
    return lost(name, source, destinations, retention_seconds=retention_seconds)[0]
