"""Acknowledged marks: how far each destination has got, as its source remembers.

`saf.destinations.marks` tells what the marks mean. The tables are those of the source:
saf.acknowledged, and saf.parked, saf.taken_out and saf.backoff for messages that the source has set
aside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import psycopg

from saf.database import array, fetch
from saf.destinations.marks import AGAIN, ONCE, Mark, Place, place_name
from saf.log.shards import LAST
from saf.setaside.lane import BROKER, Kind, Lane, WaitsFor, given

# The newest version of each place; see saf.log.shards.newest
ACKNOWLEDGED = f"""
SELECT a.lane, a.shard, a.batch, a.position, a.opened_at
FROM unnest(%(lanes)s::text[], %(shards)s::smallint[]) AS s (lane, shard)
CROSS JOIN LATERAL (
    SELECT * FROM saf.acknowledged
    WHERE (destination, lane, shard, batch) <= (%(destination)s, s.lane, s.shard, {LAST})
    ORDER BY destination DESC, lane DESC, shard DESC, batch DESC LIMIT 1
) AS a
WHERE a.destination = %(destination)s AND a.lane = s.lane AND a.shard = s.shard
"""

# ``known`` is the batch of the version that exists. A task that lags behind another task with the
# same batch sets nothing back. Writing a mark again, after the answer to a commit got lost, changes
# nothing.
ACKNOWLEDGE = """
WITH marks AS (
    SELECT * FROM unnest(
        %(lanes)s::text[], %(shards)s::smallint[], %(known)s::bigint[], %(batches)s::bigint[],
        %(positions)s::bigint[], %(opened_at)s::timestamptz[])
        AS m (lane, shard, known, batch, position, opened_at)
), moved AS (
    UPDATE saf.acknowledged a
    SET batch = m.batch, position = m.position, opened_at = m.opened_at
    FROM marks m
    WHERE a.destination = %(destination)s AND a.lane = m.lane
      AND a.shard = m.shard AND a.batch = m.known
      AND (a.batch, a.position) <= (m.batch, m.position)
)
INSERT INTO saf.acknowledged (destination, lane, shard, batch, position, opened_at)
SELECT %(destination)s, lane, shard, batch, position, opened_at FROM marks WHERE known IS NULL
ON CONFLICT (destination, lane, shard, batch) DO NOTHING
"""

FORGET = """
DELETE FROM saf.acknowledged a
USING unnest(%(lanes)s::text[], %(shards)s::smallint[]) AS m (lane, shard)
WHERE a.destination = %(destination)s AND a.lane = m.lane AND a.shard = m.shard
"""

LANES = f"""
SELECT kind, subject, {BROKER} FROM saf.backoff
WHERE subscription_id = %(subscription_id)s AND destination = %(name)s
UNION
SELECT kind, subject, {BROKER} FROM saf.taken_out
WHERE subscription_id = %(subscription_id)s AND destination = %(name)s
"""
# Messages still in their lane, or taken out by an operator. If such a message is stored, the answer
# got lost. A destination drops it when it comes again, unless it is sent at least once. Then it may
# be refused, and waits for its service: in one of the ``moved`` kinds of lanes.
_STILL_WAITS = """
EXISTS (
    SELECT FROM saf.{table} p
    WHERE p.subscription_id = %(subscription_id)s AND p.destination = %(name)s
      AND ((p.kind, p.subject, p.broker) = (m.kind, m.subject, m.broker)
           OR (m.again AND p.kind = ANY (%(moved)s)))
      AND p.shard = m.shard AND p.opened_at = m.opened_at)
"""
PARKED = f"""
SELECT m.place
FROM unnest(%(kinds)s::text[], %(subjects)s::text[], %(brokers)s::uuid[], %(shards)s::smallint[],
            %(opened_at)s::timestamptz[], %(again)s::boolean[], %(places)s::int[])
    AS m (kind, subject, broker, shard, opened_at, again, place)
WHERE {_STILL_WAITS.format(table="parked")} OR {_STILL_WAITS.format(table="taken_out")}
"""

MOVED = [kind for kind in Kind if kind.waits_for in {WaitsFor.SERVICE, WaitsFor.FOUND_ROUTE}]
"""Lanes in which messages wait for a service that their destination did not know."""


def acknowledged(
    connection: psycopg.Connection[Any], destination: UUID, places: Collection[Place]
) -> dict[Place, Mark]:
    """Return a destination's marks that a source remembers, for some places."""
    params = {"destination": destination, **_columns(places)}
    return {
        (lane, shard): Mark.of(*mark)
        for lane, shard, *mark in fetch(connection, ACKNOWLEDGED, params)
    }


def acknowledge(
    connection: psycopg.Connection[Any],
    destination: UUID,
    marks: Mapping[Place, Mark],
    known: Mapping[Place, Mark],
) -> None:
    """Remember marks, replacing the marks ``known``. Call it in a transaction."""
    places = sorted(marks)
    connection.execute(
        ACKNOWLEDGE,
        {
            "destination": destination,
            **_columns(places),
            "known": array(known[place].batch if place in known else None for place in places),
            "batches": array(marks[place].batch for place in places),
            "positions": array(marks[place].position for place in places),
            "opened_at": array(marks[place].opened_at for place in places),
        },
    )


def adopt(
    connection: psycopg.Connection[Any],
    destination: UUID,
    theirs: Mapping[Place, Mark],
    which: Collection[Place],
) -> None:
    """Remember a destination's own marks for the places ``which``. Call it in a transaction."""
    connection.execute(FORGET, {"destination": destination, **_columns(which)})
    new = {place: theirs[place] for place in which if place in theirs}
    acknowledge(connection, destination, {p: m for p, m in new.items() if m.number > (0, 0)}, {})


def not_parked(
    connection: psycopg.Connection[Any],
    subscription_id: int,
    name: str,
    marks: Mapping[Place, Mark],
) -> list[Place]:
    """Return the places of marks without a message in their lane, parked or taken out of it.

    ``name`` is the destination's. The marks of these places show that the source was set back.
    """
    if not marks:
        return []
    params: dict[str, Any] = {"subscription_id": subscription_id, "name": name}
    own = [Lane(destination=name, kind=kind) for kind in (Kind.MAIN, Kind.RETRY, Kind.REPLAY)]
    lanes = {AGAIN + place_name(lane): lane for lane in own}  # all messages may have moved since
    for kind, subject, broker in fetch(connection, LANES, params):
        lane = Lane(kind=kind, subject=subject, broker=broker)
        lanes |= {quality + place_name(lane): lane for quality in ("", AGAIN, ONCE)}
    waiting = [(n, *entry) for n, entry in enumerate(marks.items()) if entry[0][0] in lanes]
    params |= given(lanes[lane] for _, (lane, _), _ in waiting) | {
        "shards": [shard for _, (_, shard), _ in waiting],
        "again": [
            place.startswith(AGAIN) and lanes[place].kind.waits_for is WaitsFor.DESTINATION
            for _, (place, _), _ in waiting
        ],
        "moved": MOVED,
        "opened_at": [mark.opened_at for _, _, mark in waiting],
        "places": [number for number, _, _ in waiting],
    }
    parked = {place for (place,) in fetch(connection, PARKED, params)}
    return sorted(place for number, place in enumerate(marks) if number not in parked)


def _columns(places: Collection[Place]) -> dict[str, str]:
    """Return places as two columns for a statement: ``lanes`` and ``shards``."""
    return {
        "lanes": array(lane for lane, _ in places),
        "shards": array(shard for _, shard in places),
    }
