"""Figures: what the database of a broker says of its messages, as samples for Prometheus.

They are asked for every few seconds, at brokers of any size. So no statement reads a whole log or
more than `MOST` of what was set aside, and each has a bound (the role ``metrics`` of
`saf.database.bounds`). What a broker has more of is estimated.

A subscription of the outbox other than the forwarder's is an application's own: it has a lag, and
its messages are not pending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from saf.broker.restored import refuse
from saf.config import Settings
from saf.database import fetch
from saf.log.backlog import Backlog, Part, backlogs
from saf.log.ring import AGE_COLUMN, SLOTS
from saf.metrics import declared as m
from saf.metrics.declared import Metric
from saf.metrics.process import OTHER, Sample
from saf.operating.forecast import Way, way
from saf.routing.routes import current_routes
from saf.setaside.lane import Kind

MOST = 100_000
"""How many messages that were set aside are counted; of more, the server's statistics say."""

SERVICES = 50
"""How many services of a broker have series of their own: those with the most messages."""

MOST_ENDPOINTS = 200

NONE, SEVERAL, ROUTER = "(none)", "(several)", "(router)"

NOW = "SELECT clock_timestamp()"

PARKED = """
SELECT s.name, p.destination, p.kind, count(*)
FROM (SELECT subscription_id, destination, kind FROM saf.parked LIMIT {most}) AS p
JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2, 3
"""
ALL_PARKED = "SELECT n_live_tup FROM pg_stat_user_tables WHERE relid = 'saf.parked'::regclass"
LANES = """
SELECT s.name, b.destination, b.kind, max(b.attempts),
       extract(epoch FROM clock_timestamp() - min(b.since))::float
FROM saf.backoff b JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2, 3
"""
DEAD = """
SELECT s.name, d.reason, count(*)
FROM (SELECT subscription_id, reason FROM saf.dead_letter LIMIT {most}) AS d
JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2
"""
DROPPED = """
SELECT s.name, d.reason, sum(d.messages)::bigint
FROM saf.dropped d JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2
"""
MEMBERS = """
SELECT s.log, s.name, count(m.member_id)
FROM saf.subscription s
LEFT JOIN saf.member m ON m.subscription_id = s.subscription_id AND m.lease_until > now()
WHERE NOT s.stream
GROUP BY s.log, s.name
"""
USED = """
SELECT count(*) FILTER (WHERE pg_relation_size(('saf.' || {log} || '_' || slot)::regclass) > 0)
FROM generate_series(0, {slots} - 1) AS slot
"""
# Other sessions' transactions are hidden from who is no member of pg_read_all_stats
OLDEST_TRANSACTION = """
SELECT coalesce(greatest(
    (SELECT max(extract(epoch FROM clock_timestamp() - xact_start)) FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid()),
    (SELECT max(extract(epoch FROM clock_timestamp() - prepared)) FROM pg_prepared_xacts
     WHERE database = current_database()), 0), 0)::float
"""
ENDPOINTS = """
SELECT e.endpoint, CASE WHEN b.paused_at IS NOT NULL THEN 'paused'
                        ELSE coalesce(b.state, 'closed') END
FROM (SELECT name AS endpoint, subscription_id FROM saf.endpoint
      UNION SELECT endpoint, subscription_id FROM saf.breaker) AS e
LEFT JOIN saf.breaker b USING (subscription_id)
ORDER BY 1
"""
STATES = ("closed", "open", "disabled", "paused")
CONDITIONS = ("up", "down", "waiting")

Ask = Callable[[psycopg.Connection[Any], str], list[Sample]]


def asker(settings: Settings) -> Ask:
    """Return the function that asks one broker, by its name, for its figures; see `figures`."""
    return lambda connection, name: [*figures(connection, name, settings)]


def figures(
    connection: psycopg.Connection[Any], broker: str, settings: Settings
) -> Iterator[Sample]:
    """Give the figures of a broker. Only reads.

    Raises:
        Restored: its cursors do not say what is left.
        psycopg.errors.QueryCanceled: a statement took too long.
    """
    refuse(connection)
    found = backlogs(connection)
    ((now,),) = fetch(connection, NOW)
    for one in found:
        mine = (broker, one.log, one.subscription)
        yield _sample(m.LAG, _age(now, one.oldest) or 0.0, *mine)
        unowned = sum(shard.owner is None for shard in one.shards)
        yield _sample(m.UNOWNED, unowned, *mine)
        if one.log == "inbox":
            yield _sample(m.UNREAD, one.messages, broker, one.subscription)
        elif one.subscription == "forwarder":
            yield from _pending(connection, broker, one, now, settings)
    for *subscription, members in fetch(connection, MEMBERS):
        yield _sample(m.MEMBERS, members, broker, *subscription)
    yield from _set_aside(connection, broker)
    for log in AGE_COLUMN:
        query = sql.SQL(USED).format(log=sql.Literal(log), slots=sql.Literal(SLOTS))
        ((used,),) = fetch(connection, query)
        yield _sample(m.SLOTS, used, broker, log)
    ((seconds,),) = fetch(connection, OLDEST_TRANSACTION)
    yield _sample(m.OLDEST_TRANSACTION, seconds, broker)
    for endpoint, state in [*dict(fetch(connection, ENDPOINTS)).items()][:MOST_ENDPOINTS]:
        for one_state in STATES:
            yield _sample(m.ENDPOINTS, state == one_state, broker, endpoint, one_state)
    if broker in settings.brokers or broker.partition("/")[0] in settings.fleets:
        yield from _destinations(connection, broker, settings)


def _pending(
    connection: psycopg.Connection[Any],
    broker: str,
    backlog: Backlog,
    now: datetime,
    settings: Settings,
) -> Iterator[Sample]:
    """What is pending, by where it would go; the services with the most of it by name."""
    default = settings.forwarder.default_destination
    routes = current_routes(connection, default, settings.declared)
    of_service: dict[str, float] = defaultdict(float)
    for (service, _), part in backlog.by_address.items():
        of_service[service] += part.messages
    named = sorted(of_service, key=lambda one: (-of_service[one], one))[:SERVICES]
    parts: dict[tuple[str, str], Part] = defaultdict(Part)
    for address, part in backlog.by_address.items():
        service = address[0] if address[0] in named else OTHER
        parts[_where(way(routes, address)), service].add(part.messages, part.oldest)
    if not parts:  # nothing pending is a figure too, and not the absence of one
        yield _sample(m.PENDING, 0, broker, default or NONE, "")
    for (destination, service), part in parts.items():
        yield _sample(m.PENDING, round(part.messages), broker, destination, service)
        if (age := _age(now, part.oldest)) is not None:
            yield _sample(m.OLDEST_PENDING, age, broker, destination, service)


def _where(going: Way) -> str:
    if len(going.destinations) == 1:
        return going.destinations[0]
    if going.destinations:
        return SEVERAL
    return ROUTER if going.how.startswith("a router") else NONE


def _set_aside(connection: psycopg.Connection[Any], broker: str) -> Iterator[Sample]:
    most = {"most": sql.Literal(MOST)}
    rows = fetch(connection, sql.SQL(PARKED).format(**most))
    counted = sum(count for *_, count in rows)
    factor = 1.0
    if counted >= MOST:
        ((live,),) = fetch(connection, ALL_PARKED)
        factor = max(1.0, live / counted)
    for *lane, count in rows:
        yield _sample(m.PARKED, round(count * factor), broker, *lane)
    for *lane, attempts, seconds in fetch(connection, LANES):
        yield _sample(m.ATTEMPTS, attempts, broker, *lane)
        yield _sample(m.OLDEST_PARKED, max(0.0, seconds), broker, *lane)
    for name, reason, count in fetch(connection, sql.SQL(DEAD).format(**most)):
        yield _sample(m.DEAD, count, broker, name, reason)
    for name, reason, count in fetch(connection, DROPPED):
        yield _sample(m.DROPPED, count, broker, name, reason)


HELD = """
SELECT b.destination, max(b.attempts) FROM saf.backoff b JOIN saf.subscription s
    USING (subscription_id)
WHERE s.log = 'outbox' AND s.name = 'forwarder' AND b.kind = {kind} GROUP BY 1
"""


def _destinations(
    connection: psycopg.Connection[Any], broker: str, settings: Settings
) -> Iterator[Sample]:
    query = sql.SQL(HELD).format(kind=sql.Literal(str(Kind.MAIN)))
    attempts: Mapping[str, int] = dict(fetch(connection, query))
    for name in {**settings.destinations, **attempts}:
        failed = attempts.get(name)
        is_in = "up" if failed is None else "down" if failed else "waiting"
        for state in CONDITIONS:
            yield _sample(m.DESTINATIONS, state == is_in, broker, name, state)


def _age(now: datetime, moment: datetime | None) -> float | None:
    return None if moment is None else max(0.0, (now - moment).total_seconds())


def _sample(metric: Metric, value: float, *labels: str) -> Sample:
    return Sample(metric=metric, labels=labels, value=float(value))
