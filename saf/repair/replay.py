"""Replay: send again what a destination has lost, such as one restored from an older backup.

The messages are parked once more, in the order they were sent, in a lane of their own (see
`saf.setaside.parking`) that goes before everything else for their destination: what is sent
meanwhile follows behind them, and the lane's watermark sees to it that each is stored once. Which
have to be sent again is `saf.repair.reconcile`'s to say; what was purged from the outbox since
cannot be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg

from saf.columns import COLUMNS
from saf.database import fetch
from saf.routing.choices import Asker, choose
from saf.routing.ways import Routes, Way
from saf.setaside.dead import ONE_AT_A_TIME, audit
from saf.setaside.parking import REPLAY

FIND = """
SELECT o.id, o.message_id, o.to_service, o.to_broker::text, o.key
FROM unnest(%(shards)s::smallint[], %(ids)s::bigint[]) AS lost (shard, id)
JOIN saf.outbox o USING (shard, id) ORDER BY o.id
"""
PARK = f"""
INSERT INTO saf.parked
    (subscription_id, destination, lane, shard, id, batch, position, {", ".join(COLUMNS)})
SELECT s.subscription_id, %(destination)s, %(lane)s, o.shard, o.id, %(number)s,
       row_number() OVER (ORDER BY o.id), {", ".join(f"o.{c}" for c in COLUMNS)}
FROM saf.outbox o
JOIN unnest(%(shards)s::smallint[], %(ids)s::bigint[]) AS lost (shard, id) USING (shard, id)
JOIN saf.subscription s ON s.log = 'outbox' AND s.name = 'forwarder'
WHERE o.id = ANY (%(chosen)s)
"""
DUE = """
INSERT INTO saf.backoff (subscription_id, destination, lane, error)
SELECT subscription_id, %(destination)s, %(lane)s, 'replayed by ' || session_user
FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder'
ON CONFLICT (subscription_id, destination, lane) DO UPDATE SET next_attempt_at = now()
"""


def replay(
    connection: psycopg.Connection[Any],
    lost: Sequence[tuple[int, int]],
    routes: Routes,
    why: str,
    *,
    dry_run: bool = False,
) -> dict[str, list[UUID]]:
    """Hand messages, as (shard, id), to the forwarder again; return their ids by destination.

    They go where the routes lead now, a topic's to all of its destinations; those that none leads
    anywhere are left out. Where a router's go, the forwarder finds out: until then they are for no
    destination, the empty one.
    """
    routers = {router.service for router in routes.routers}
    place = {"shards": [shard for shard, _ in lost], "ids": [number for _, number in lost]}
    with connection.transaction(force_rollback=dry_run):
        connection.execute(ONE_AT_A_TIME)
        found: dict[str, list[tuple[int, UUID]]] = defaultdict(list)
        rows = fetch(connection, FIND, place)
        ways = [
            None if service in routers else routes.way(service, broker)
            for _, _, service, broker, _ in rows
        ]
        chosen = choose(
            connection,
            {
                Asker(service, broker, key): way.destinations
                for (_, _, service, broker, key), way in zip(rows, ways, strict=True)
                if way is not None and way.shared and key is not None
            },
        )
        for (number, message_id, *asker), way in zip(rows, ways, strict=True):
            there = _destinations(way, chosen.get(Asker(*asker)), number)
            for destination in ("",) if asker[0] in routers else there:
                found[destination].append((number, message_id))
        for destination, messages in () if dry_run else found.items():
            params = {
                **place,
                "destination": destination,
                "lane": REPLAY,
                "number": audit(connection, "replay", [m for _, m in messages], why),
                "chosen": [number for number, _ in messages],
            }
            connection.execute(DUE, params)
            connection.execute(PARK, params)
    return {name: [message_id for _, message_id in some] for name, some in found.items()}


def _destinations(way: Way | None, chosen: str | None, number: int) -> tuple[str, ...]:
    if way is None or not way.shared:
        return way.destinations if way else ()
    return (chosen or way.destinations[number % len(way.routes)],)
