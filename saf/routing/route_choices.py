"""Choices: which of several routes that share a key has taken, and keeps.

Where several routes are equally specific, keys take them in turn, each with its first message.
``saf.route_choice`` stores the choice, and all later messages of the key follow it, even when
routes are added. So the load is shared, and the order of each key holds.

- Keys take turns by a counter for each service and broker as addressed (``saf.route_share``), which
  the choosing transaction locks. Of 100 new keys, each of two routes gets exactly 50, however many
  tasks choose at the same time.
- A choice is durable before any message of its key is stored at a destination, so a batch that is
  read again after a crash is routed the same way.
- A choice whose route is no longer in force is replaced by a new one.
- A key that had only one route has made no choice. It makes one with its first message after
  another route is added.

Only keys in use have a row in the table: a choice is forgotten if it is not used for as long as
messages are kept (`forget`). Its use is noted once a day per key, not with each message. A batch in
hand keeps the choices that it was delivered by. Messages that wait for a destination keep the
choices of their lane: later messages of the key go behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from saf.database import DURABLY, fetch

NOTED_SECONDS = 86400.0
"""Minimum time between two notes of a choice's use, in seconds."""

WANTED = """
unnest(%(services)s::text[], %(brokers)s::uuid[], %(keys)s::text[]) AS w (service, broker, key)
"""
# The comparison with a null broker cannot use the index, and need not: few choices differ only by
# broker
SAME = "c.key = w.key AND c.service = w.service AND c.broker IS NOT DISTINCT FROM w.broker"

CHOSEN = f"""
SELECT w.service, w.broker::text, w.key, c.destination,
       c.used_at < now() - make_interval(secs => %(noted)s)
FROM {WANTED} JOIN saf.route_choice c ON {SAME}
"""
USED = f"UPDATE saf.route_choice c SET used_at = now() FROM {WANTED} WHERE {SAME}"
GONE = f"DELETE FROM saf.route_choice c USING {WANTED} WHERE {SAME}"

# In a fixed order, so that two transactions wait for each other instead of deadlocking
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

# Also used for resolutions; see `saf.routing.resolved`. An open conversation may continue after any
# silence, so its rows are kept. The query reads lanes instead of the messages in them, because
# there are few lanes, however many messages wait. Lanes of one service and lanes of a whole
# destination need separate subqueries, because an OR could not be hashed.
FORGET = """
WITH forgotten AS (
    DELETE FROM saf.{table} one
    WHERE used_at < now() - make_interval(secs => %(seconds)s)
      AND used_at < coalesce((SELECT min(opened_at) FROM saf.cursor WHERE open IS NOT NULL), now())
                    - make_interval(secs => %(noted)s)
      AND NOT EXISTS (SELECT FROM saf.conversation c
                      WHERE c.conversation_id::text = key AND c.state <> 'closed')
      AND {unused}
      AND NOT EXISTS (SELECT FROM saf.backoff b WHERE {lane} AND b.subject = one.service)
      AND NOT EXISTS (SELECT FROM saf.backoff b WHERE {lane} AND b.subject = '')
    RETURNING key)
SELECT count(*) FROM forgotten
"""
FORGETTING = (
    # each with the lanes whose waiting messages may have used a row
    FORGET.format(table="route_choice", lane="b.destination = one.destination", unused="true"),
    FORGET.format(
        table="resolved_conversation",
        lane="b.destination <> ''",
        unused="coalesce(kept_until < now(), true)",
    ),
)


class Asker(NamedTuple):
    """A key, with the service and broker that its message is addressed to."""

    service: str
    broker: str | None
    key: str


Group = tuple[str, str | None]


def chosen(connection: psycopg.Connection[Any], askers: Collection[Asker]) -> dict[Asker, str]:
    """Return the destinations that keys have chosen before. Only reads."""
    return {asker: destination for asker, (destination, _) in _chosen(connection, askers).items()}


def choose(
    connection: psycopg.Connection[Any], among: Mapping[Asker, Sequence[str]]
) -> dict[Asker, str]:
    """Return each key's destination among those given; make and store missing choices.

    Call it in a transaction. Store no message of these keys anywhere before that transaction has
    committed durably.
    """
    if not among:
        return {}
    known = _chosen(connection, among)
    unnoted = [asker for asker, (_, unnoted) in known.items() if unnoted]
    gone = [asker for asker, (destination, _) in known.items() if destination not in among[asker]]
    if not unnoted and not gone and len(known) == len(among):
        return {asker: destination for asker, (destination, _) in known.items()}
    connection.execute(DURABLY)
    if unnoted:
        connection.execute(USED, _columns(unnoted))
    if gone:
        connection.execute(GONE, _columns(gone))
    new = {asker: choice for asker, choice in among.items() if asker in gone or asker not in known}
    if new:
        turns = _take_turns(connection, new)
        taken = [among[asker][turns[asker] % len(among[asker])] for asker in new]
        connection.execute(CHOOSE, _columns(new) | {"destinations": taken})
    # read again, because others may have chosen or forgotten in the same time
    return choose(connection, among)


def forget(connection: psycopg.Connection[Any], retention_seconds: float) -> int:
    """Forget choices and resolutions unused for max(retention, two days); return how many."""
    # one use may not have been noted
    seconds = max(retention_seconds, 2 * NOTED_SECONDS) + NOTED_SECONDS
    params = {"seconds": seconds, "noted": NOTED_SECONDS}
    return sum(int(fetch(connection, statement, params)[0][0]) for statement in FORGETTING)


def _chosen(
    connection: psycopg.Connection[Any], askers: Collection[Asker]
) -> dict[Asker, tuple[str, bool]]:
    rows = fetch(connection, CHOSEN, _columns(askers) | {"noted": NOTED_SECONDS})
    return {Asker(*row[:3]): (row[3], row[4]) for row in rows}


def _take_turns(connection: psycopg.Connection[Any], askers: Collection[Asker]) -> dict[Asker, int]:
    """Give each asker a number that no other asker for the same service and broker has."""
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
