"""Comparing two sides: the two figures of each shard, and the messages where they differ.

`figures` returns a count and a sum of hashes for each shard, computed on the servers. `differences`
reads the messages of both sides in the order of their ids and merges them, in bounded memory.

Some destinations cannot be read back, and where a message went is not recorded. So a message that
no other destination has counts as not compared, instead of lost, in two cases (`Unread`):

- some routes, current or frozen ones that are kept, lead it to a destination that cannot be read
  back;
- it is for a router, whose answer is not kept for each message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import psycopg

from saf.destinations import Entry
from saf.log.read import since as not_visible_in
from saf.log.side import IN_RANGE, PLAIN, in_order, open_side
from saf.operating.repair.reconcile.copies import Copies, Lost, RoutesOf
from saf.operating.repair.reconcile.outcome import Both, Difference, Kind, Shard
from saf.routing.matching import Routes
from saf.routing.routes import versions

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
    gone = copies.lost(entries) if copies else Lost(address=entries[0])
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
