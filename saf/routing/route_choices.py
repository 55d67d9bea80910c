"""Choices: which of several routes that share a key has taken, and stays with for life.

Where several routes are equally good, keys take them in turn, each with its first message, and
``saf.route_choice`` remembers which: all later messages of the key go there too, also when routes
are added. So the load is shared, and the order of a key holds.

- Keys take their turns by a counter of each service and broker as addressed (``saf.route_share``),
  which the choosing transaction holds: of 100 new keys, each of two routes gets exactly 50, however
  many tasks choose at the same time.
- A choice is durable before anything of its key is stored at a destination, so that a batch read
  again after a crash is routed the same way.
- A choice whose route is not in force any more is made anew.
- A key that only one route was there for has made no choice; it makes one with its first message
  after another route has come.

The table is bounded by the keys that are in use: a choice that was not used for as long as
messages are kept is forgotten (`forget`). That it is used is noted once a day and key, and not
with each message. A batch in hand keeps the choices that it was delivered by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from saf.database import fetch

NOTED_SECONDS = 86400.0
"""How long the use of a choice goes without being noted again."""

WANTED = """
unnest(%(services)s::text[], %(brokers)s::uuid[], %(keys)s::text[]) AS w (service, broker, key)
"""
# The equality with a null broker cannot use the index, and need not: few choices differ in it alone
SAME = "c.key = w.key AND c.service = w.service AND c.broker IS NOT DISTINCT FROM w.broker"

CHOSEN = f"""
SELECT w.service, w.broker::text, w.key, c.destination,
       c.used_at < now() - make_interval(secs => %(noted)s)
FROM {WANTED} JOIN saf.route_choice c ON {SAME}
"""
USED = f"UPDATE saf.route_choice c SET used_at = now() FROM {WANTED} WHERE {SAME}"
GONE = f"DELETE FROM saf.route_choice c USING {WANTED} WHERE {SAME}"

# In one order, so that two who choose wait for each other instead of deadlocking
TAKE_TURNS = """
INSERT INTO saf.route_share AS s (service, broker, keys)
SELECT * FROM unnest(%(services)s::text[], %(brokers)s::uuid[], %(counts)s::bigint[])
    AS w (service, broker, keys) ORDER BY service, broker
ON CONFLICT ON CONSTRAINT route_share_once DO UPDATE SET keys = s.keys + excluded.keys
RETURNING service, broker::text, keys
"""
CHOOSE = """
INSERT INTO saf.route_choice (service, broker, key, destination)
SELECT * FROM unnest(%(services)s::text[], %(brokers)s::uuid[], %(keys)s::text[],
                     %(destinations)s::text[])
ON CONFLICT DO NOTHING
"""

# Also of what routers have resolved; see `saf.routing.resolved`. A conversation that is open may
# go on after any silence.
FORGET = """
WITH forgotten AS (
    DELETE FROM saf.{table}
    WHERE used_at < now() - make_interval(secs => %(seconds)s)
      AND used_at < coalesce((SELECT min(opened_at) FROM saf.cursor WHERE open IS NOT NULL), now())
                    - make_interval(secs => %(noted)s)
      AND NOT EXISTS (SELECT FROM saf.conversation c
                      WHERE c.conversation_id::text = key AND c.state <> 'closed')
    RETURNING key)
SELECT count(*) FROM forgotten
"""
FORGETTING = tuple(
    FORGET.format(table=table) for table in ("route_choice", "resolved_conversation")
)


class Asker(NamedTuple):
    """A key, and what its message is addressed to."""

    service: str
    broker: str | None
    key: str


Group = tuple[str, str | None]


def chosen(connection: psycopg.Connection[Any], askers: Collection[Asker]) -> dict[Asker, str]:
    """The destinations that keys have chosen before. Reads only."""
    return {asker: destination for asker, (destination, _) in _chosen(connection, askers).items()}


def choose(
    connection: psycopg.Connection[Any], among: Mapping[Asker, Sequence[str]]
) -> dict[Asker, str]:
    """The destination of each key, among those given; new choices are made and kept.

    Call it in a transaction; its commit is durable, and nothing of the keys may go before.
    """
    if not among:
        return {}
    known = _chosen(connection, among)
    unnoted = [asker for asker, (_, unnoted) in known.items() if unnoted]
    gone = [asker for asker, (destination, _) in known.items() if destination not in among[asker]]
    if not unnoted and not gone and len(known) == len(among):
        return {asker: destination for asker, (destination, _) in known.items()}
    connection.execute("SET LOCAL synchronous_commit = on")
    if unnoted:
        connection.execute(USED, _columns(unnoted))
    if gone:
        connection.execute(GONE, _columns(gone))
    new = {asker: one for asker, one in among.items() if asker in gone or asker not in known}
    if new:
        turns = _take_turns(connection, new)
        taken = [among[asker][turns[asker] % len(among[asker])] for asker in new]
        connection.execute(CHOOSE, _columns(new) | {"destinations": taken})
    # what others have chosen or forgotten meanwhile counts
    return choose(connection, among)


def forget(connection: psycopg.Connection[Any], retention_seconds: float) -> int:
    """Forget choices and resolutions not used for so long, and not for a day; return how many."""
    seconds = max(retention_seconds, 2 * NOTED_SECONDS)
    params = {"seconds": seconds, "noted": NOTED_SECONDS}
    return sum(int(fetch(connection, statement, params)[0][0]) for statement in FORGETTING)


def _chosen(
    connection: psycopg.Connection[Any], askers: Collection[Asker]
) -> dict[Asker, tuple[str, bool]]:
    rows = fetch(connection, CHOSEN, _columns(askers) | {"noted": NOTED_SECONDS})
    return {Asker(*row[:3]): (row[3], row[4]) for row in rows}


def _take_turns(connection: psycopg.Connection[Any], askers: Collection[Asker]) -> dict[Asker, int]:
    """A number for each, such as nobody else of its group has."""
    groups: dict[Group, list[Asker]] = defaultdict(list)
    for asker in askers:
        groups[asker.service, asker.broker].append(asker)
    params = {
        "services": [service for service, _ in groups],
        "brokers": [broker for _, broker in groups],
        "counts": [len(group) for group in groups.values()],
    }
    numbers: dict[Asker, int] = {}
    for service, broker, last in fetch(connection, TAKE_TURNS, params):
        group = groups[service, broker]
        numbers |= {asker: last - len(group) + place for place, asker in enumerate(group)}
    return numbers


def _columns(askers: Collection[Asker]) -> dict[str, Any]:
    return {
        "services": [asker.service for asker in askers],
        "brokers": [asker.broker for asker in askers],
        "keys": [asker.key for asker in askers],
    }
