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

A destination that cannot be read back is named, and not compared. Where a message went is not
recorded. So a message that no other destination has is counted as not compared, instead of lost, in
two cases (`Unread`):

- some routes, current or frozen ones that are kept, lead it to a destination that cannot be read
  back;
- it is for a router, whose answer is not kept for each message.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg

from saf.database import Dsn
from saf.destinations import Entry
from saf.destinations.settings import DestinationSettings
from saf.log.read import since as not_visible_in
from saf.log.side import IN_RANGE, PLAIN, in_order, open_side
from saf.operating.repair.reconcile.copies import Copies, Gone, RoutesOf, set_back_copies
from saf.operating.repair.reconcile.outcome import (
    HARMLESS,
    Both,
    Difference,
    Kind,
    Outcome,
    Range,
    Shard,
    read_both,
)
from saf.operating.repair.replay import Copy
from saf.routing.matching import Routes
from saf.routing.routes import current_routes, versions
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


SENT = f"""
SELECT o.message_id, o.shard, o.id, o.to_service, o.to_broker, o.key, o.created_at,
       CASE WHEN (pg_visible_in_snapshot(o.txid, c.done)
                  OR pg_visible_in_snapshot(o.txid, c.open) AND o.id <= c.position) IS NOT TRUE
                THEN 'pending'
            WHEN aside.id IS NOT NULL OR given_up.message_id IS NOT NULL THEN 'aside'
            ELSE 'complete' END AS state
FROM saf.outbox o
LEFT JOIN saf.cursor c ON c.subscription_id = %(subscription_id)s AND c.shard = o.shard
LEFT JOIN (SELECT shard, id FROM saf.parked WHERE subscription_id = %(subscription_id)s
           UNION SELECT shard, id FROM saf.dead_letter WHERE subscription_id = %(subscription_id)s
          ) AS aside ON aside.shard = o.shard AND aside.id = o.id
LEFT JOIN (SELECT DISTINCT unnest(message_ids) FROM saf.audit WHERE action = 'discard'
          ) AS given_up (message_id) ON given_up.message_id = o.message_id
WHERE {IN_RANGE}
"""

FIGURES_SENT = f"""
SELECT shard, count(*) FILTER (WHERE state = 'complete'),
       count(*) FILTER (WHERE state = 'aside'), count(*) FILTER (WHERE state = 'pending'),
       count(*) FILTER (WHERE state = 'complete' AND {PLAIN}),
       coalesce(sum(uuid_hash_extended(message_id, 0))
                FILTER (WHERE state = 'complete' AND {PLAIN}), 0)
FROM ({SENT}) AS sent GROUP BY shard
"""

# The destinations, and the addresses that routers had found, if any
SET_ASIDE = """
SELECT uuid_send(message_id), destination, shard, id, to_service, to_broker, key, created_at,
       'set_aside'
FROM (SELECT destination, shard, id, message_id, to_service, to_broker, key, created_at
      FROM saf.parked WHERE subscription_id = %(subscription_id)s
      UNION ALL
      SELECT destination, shard, id, message_id, to_service, to_broker, key, created_at
      FROM saf.dead_letter WHERE subscription_id = %(subscription_id)s) AS aside
ORDER BY message_id
"""
DISCARDED = """
SELECT uuid_send(message_id), '', 0::smallint, 0::bigint, '', NULL::uuid, NULL::text, audit_at,
       'discarded'
FROM saf.audit, unnest(message_ids) AS message_id WHERE action = 'discard' ORDER BY message_id
"""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Destinations that cannot be read back, and all routes that could have led there."""

    destinations: frozenset[str]
    routes: Sequence[Routes] = ()

    def may_have(self, sent: Entry) -> bool:
        """Return whether any of the destinations may have a message of the source."""
        return bool(self.destinations) and any(
            self._led(routes, sent.service, sent.broker) for routes in self.routes
        )

    def _led(self, routes: Routes, service: str, broker: UUID | None) -> bool:
        if any(router.service == service for router in routes.routers):
            return True
        match = routes.match(service, str(broker) if broker else None)
        return match is not None and not self.destinations.isdisjoint(match.destinations)


def figures(both: Both) -> list[Shard]:
    """Return the count and the sum of hashes of each shard, for both sides.

    The figures of the destinations are added up.
    """
    found = {number: Shard(shard=number) for number in range(both.what.shards)}
    for number, complete, aside, pending, *plain in both.source.fetch(FIGURES_SENT, both.params):
        shard = found[number]
        shard.complete, shard.aside, shard.pending = complete, aside, pending
        shard.hashes = ((plain[0], int(plain[1])), (0, 0))
    for side in both.destinations:
        for number, stored, count, hashed in side.figures(both.what):
            shard = found[number]
            shard.stored += stored
            sent, (others, sum_of_others) = shard.hashes
            shard.hashes = (sent, (others + count, sum_of_others + hashed))
    return list(found.values())


def unread_of(
    source: psycopg.Connection[Any], destinations: Collection[str], routes: RoutesOf
) -> Unread:
    """Return destinations that cannot be read back, with all routes that the source has."""
    if not destinations:
        return Unread(destinations=frozenset())
    frozen = [version.routes for version in versions(source)]
    return Unread(destinations=frozenset(destinations), routes=[routes(source), *frozen])


def differences(
    both: Both, shards: list[int], copies: Copies | None, unread: Unread
) -> Iterator[Difference]:
    """Yield the differences between the two sides in some shards and topics, unordered."""
    if not shards and not both.topics:
        return
    everywhere = list(range(both.what.shards)) if both.topics else shards
    late = not_visible_in("outbox", everywhere, both.snapshot)
    with open_side("", both.source.what, both.later, "outbox") as later:
        streams = [
            both.source.stream(in_order(SENT, shards, state="state"), both.params),
            later.stream(in_order(late, shards, state="'pending'"), both.params),
            *(side.stored(both.what, shards) for side in both.destinations),
        ]
        if copies is not None:
            streams += [both.source.stream(q, both.params) for q in (SET_ASIDE, DISCARDED)]
        for _, rows in groupby(merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
            yield from _judged([Entry._make(row) for row in rows], both.topics, copies, unread)


def _judged(
    entries: list[Entry], topics: frozenset[str], copies: Copies | None, unread: Unread
) -> Iterator[Difference]:
    """Yield the differences that the rows of one message id show."""
    rows = [one for one in entries if one.state in ("complete", "aside", "pending")]
    rows.sort(key=lambda one: ("complete", "aside", "pending").index(one.state))
    # a message is identified by its message_id and its place: two rows may be one message
    known = [*{(one.shard, one.id): one for one in reversed(rows)}.values()][::-1]
    complete = [one for one in known if one.state == "complete"]
    everywhere = stored = [one for one in entries if one.state == "stored"]
    if stored and stored[0].service in topics:
        # each destination has a copy: the destination with most copies decides
        ((most, _),) = Counter(one.where for one in stored).most_common(1)
        stored = [one for one in stored if one.where == most]
    gone = copies.lost(entries) if copies else Gone(address=entries[0])
    wrong: list[tuple[Kind, Entry]] = []
    if not known:
        wrong = [("unexpected", one) for one in stored[:1]]
    elif len(stored) > len(known):
        wrong = [("duplicate", known[0])]
    else:
        wrong += [
            ("not_compared" if unread.may_have(one) else "lost", one)
            for one in complete[len(stored) :]
            if not gone.at
        ]
        wrong += [("in_flight", one) for one in known[len(complete) : len(stored)]]
    if len(rows) > len(known):
        wrong.append(("doubled", known[0]))
    if gone.at:
        wrong.append(("lost", known[0]))
    if gone.uncertain and stored:
        wrong.append(("uncertain", known[0]))
    for kind, one in wrong:
        addressed = gone.address if gone.at and kind == "lost" else one
        yield Difference(
            kind=kind,
            shard=one.shard,
            id=one.id if known else None,
            message_id=UUID(bytes=one.message_id),
            service=addressed.service,
            broker=addressed.broker,
            key=addressed.key,
            created_at=one.created_at,
            stored=tuple(each.where for each in everywhere),
            lost_at={"lost": gone.at, "uncertain": gone.uncertain}.get(kind, ()),
        )
