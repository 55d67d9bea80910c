"""Figures: a broker's message counts and ages from its database, as samples for Prometheus.

They are queried every few seconds, at brokers of any size. So no statement reads a whole log or
more than `MOST` of the messages set aside, and each has a time limit (the role ``metrics`` of
`saf.database.bounds`). Larger numbers are estimated.

If nothing has been committed in a broker since the last time, its tables are not queried again: two
equal snapshots see the same rows. Values that change with time alone, such as ages, are computed
from the known rows. The broker is queried again when a route expires. Values from outside of the
tables, the server's statistics, are at most `KEPT_SECONDS` old.

A subscription of the outbox other than the forwarder's belongs to an application: it has a lag, and
its messages are not pending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql

from saf.broker.health import refuse
from saf.config import Settings
from saf.database import fetch
from saf.log.backlog import Backlog, Part, backlogs
from saf.log.ring import AGE_COLUMN, SLOTS
from saf.operating.forecast import Way, way
from saf.routing.routes import current_routes
from saf.setaside.failure_groups import failure_groups
from saf.setaside.lane import Kind
from saf.setaside.selection import DeadLetters
from saf.telemetry import metrics as m
from saf.telemetry.metrics import OTHER, Metric, Sample

MOST = 100_000
"""Maximum number of messages set aside to count; larger numbers come from server statistics."""

GROUPED = 2_000
"""Maximum number of dead letters to group by their errors, which takes 20 µs for each."""

SERVICES = 50
"""Number of services per broker with series of their own: those with the most messages."""

MOST_ENDPOINTS = 200

NONE, SEVERAL, ROUTER = "(none)", "(several)", "(router)"

KEPT_SECONDS = 300.0
"""Maximum time without a query while nothing is committed in the broker's server."""

PARKED = """
SELECT s.name, p.destination, p.kind, count(*)
FROM (SELECT subscription_id, destination, kind FROM saf.parked LIMIT {most}) AS p
JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2, 3
"""
ALL_PARKED = "SELECT n_live_tup FROM pg_stat_user_tables WHERE relid = 'saf.parked'::regclass"
LANES = """
SELECT s.name, b.destination, b.kind, max(b.attempts), min(b.since),
       count(*) FILTER (WHERE needs_operator AND attempts > 0)
FROM saf.backoff b JOIN saf.subscription s USING (subscription_id) GROUP BY 1, 2, 3
"""
HELD_MESSAGES = """
SELECT (SELECT count(*) FROM (SELECT FROM saf.held WHERE due IS NOT NULL AND refused IS NULL
                              LIMIT {most}) AS h),
       (SELECT min(due) FROM saf.held WHERE due IS NOT NULL AND refused IS NULL),
       (SELECT count(*) FROM (SELECT FROM saf.held WHERE refused IS NOT NULL LIMIT {most}) AS r)
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
MISSING = """
SELECT fleet, count(*) FILTER (WHERE missing_since IS NOT NULL) FROM saf.fleet_member GROUP BY 1
"""
MEMBERS = """
SELECT s.paused_at IS NOT NULL, s.log, s.name, array_remove(array_agg(m.lease_until), NULL)
FROM saf.subscription s LEFT JOIN saf.member m USING (subscription_id)
WHERE NOT s.stream
GROUP BY s.log, s.name, s.paused_at
"""
USED = """
SELECT log, count(*) FILTER (
           WHERE pg_relation_size(('saf.' || log || '_' || slot)::regclass) > 0)
FROM unnest({logs}::text[]) AS log CROSS JOIN generate_series(0, {slots} - 1) AS slot GROUP BY log
"""
# Only members of pg_read_all_stats see other sessions' transactions. A table lock that is never
# released is noticed here, too, although no rows are read.
MOMENT = """
SELECT pg_current_snapshot()::text, clock_timestamp(), coalesce(greatest(
    (SELECT max(extract(epoch FROM clock_timestamp() - xact_start)) FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid()),
    (SELECT max(extract(epoch FROM clock_timestamp() - prepared)) FROM pg_prepared_xacts
     WHERE database = current_database()), 0), 0)::float
WHERE NOT EXISTS (
    SELECT FROM saf.cursor, saf.member, saf.parked, saf.backoff, saf.dead_letter, saf.held,
                ONLY saf.outbox, ONLY saf.inbox WHERE false)
"""
ENDPOINTS = """
SELECT e.endpoint, CASE WHEN b.paused_at IS NOT NULL THEN 'paused'
                        ELSE coalesce(b.state, 'closed') END
FROM (SELECT name AS endpoint, subscription_id FROM saf.endpoint
      UNION SELECT endpoint, subscription_id FROM saf.breaker) AS e
LEFT JOIN saf.breaker b USING (subscription_id)
ORDER BY 1
"""
SOURCES = """
SELECT s.name, coalesce(sum(h.pending), 0)::float
FROM saf.source s LEFT JOIN saf.source_shard h USING (source) GROUP BY s.name
"""
STATES = ("closed", "open", "disabled", "paused")
CONDITIONS = ("up", "down", "waiting", "paused")

EXPIRIES = "SELECT expires_at FROM saf.route WHERE enabled AND expires_at IS NOT NULL"

Ask = Callable[[psycopg.Connection[Any], str], list[Sample]]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A figure that changes while nothing is committed."""

    metric: Metric
    labels: tuple[str, ...]
    value: Callable[[datetime], float]
    """Returns the value at a moment, by the broker's clock."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The last figures from a broker's tables."""

    snapshot: str
    """The snapshot from before the queries."""
    at: datetime
    until: datetime
    """When the figures may change, although nothing was committed."""
    figures: tuple[Sample | Timed, ...]

    def holds(self, snapshot: str, now: datetime) -> bool:
        """Return whether the figures still hold.

        >>> from datetime import UTC
        >>> noon = datetime(2024, 1, 1, 12, tzinfo=UTC)
        >>> known = Known(snapshot="7:9:8", at=noon, until=noon.replace(minute=2), figures=())
        >>> known.holds("7:9:8", noon), known.holds("7:9:", noon)
        (True, False)
        >>> known.holds("7:9:8", noon.replace(minute=2)), known.holds("7:9:8", noon.replace(hour=1))
        (False, False)
        """
        return snapshot == self.snapshot and self.at <= now < self.until


def asker(settings: Settings) -> Ask:
    """Return the function that queries one broker, by its name, for its figures.

    It remembers the last figures of each connection.

    Raises:
        Restored: the broker's cursors do not show what is left.
        psycopg.errors.QueryCanceled: a statement took too long.
    """
    before: WeakKeyDictionary[psycopg.Connection[Any], Known] = WeakKeyDictionary()

    def ask(connection: psycopg.Connection[Any], name: str) -> list[Sample]:
        ((snapshot, now, seconds),) = fetch(connection, MOMENT)
        known = before.get(connection)
        if known is None or not known.holds(snapshot, now):
            figures = (*_figures(connection, name, settings),)
            until = _until(connection, now, settings)
            known = Known(snapshot=snapshot, at=now, until=until, figures=figures)
            before[connection] = known
        return [
            _sample(m.OLDEST_TRANSACTION, seconds, name),
            *(
                figure
                if isinstance(figure, Sample)
                else _sample(figure.metric, figure.value(now), *figure.labels)
                for figure in known.figures
            ),
        ]

    return ask


def _until(connection: psycopg.Connection[Any], now: datetime, settings: Settings) -> datetime:
    """Return the end of the figures' validity: a route's expiry sends messages elsewhere."""
    expiries = [item.expires_at for item in settings.declared.routes if item.expires_at is not None]
    expiries += [item for (item,) in fetch(connection, EXPIRIES)]
    return min([now + timedelta(seconds=KEPT_SECONDS), *(item for item in expiries if item > now)])


def _figures(
    connection: psycopg.Connection[Any], broker: str, settings: Settings
) -> Iterator[Sample | Timed]:
    """Yield the figures of a broker. Reads only."""
    refuse(connection)
    for backlog in backlogs(connection):
        labels = (broker, backlog.log, backlog.subscription)
        yield _age(m.LAG, backlog.oldest, *labels)
        unowned = sum(shard.owner is None for shard in backlog.shards)
        yield _sample(m.UNOWNED, unowned, *labels)
        if backlog.log == "inbox":
            yield _sample(m.UNREAD, backlog.messages, broker, backlog.subscription)
        elif backlog.subscription == "forwarder":
            yield from _pending(connection, broker, backlog, settings)
    for paused, log, subscription, leases in fetch(connection, MEMBERS):
        yield _live(leases, broker, log, subscription)
        if log == "inbox":
            yield _sample(m.PAUSED, paused, broker, subscription)
    yield from _set_aside(connection, broker)
    for source, pending in fetch(connection, SOURCES):
        yield _sample(m.SOURCE_PENDING, pending, broker, source)
    query = sql.SQL(USED).format(logs=sql.Literal([*AGE_COLUMN]), slots=sql.Literal(SLOTS))
    for log, used in fetch(connection, query):
        yield _sample(m.SLOTS, used, broker, log)
    for endpoint, state in [*dict(fetch(connection, ENDPOINTS)).items()][:MOST_ENDPOINTS]:
        for one_state in STATES:
            yield _sample(m.ENDPOINTS, state == one_state, broker, endpoint, one_state)
    if broker in settings.brokers or broker.partition("/")[0] in settings.fleets:
        yield from _destinations(connection, broker, settings)


def _pending(
    connection: psycopg.Connection[Any],
    broker: str,
    backlog: Backlog,
    settings: Settings,
) -> Iterator[Sample | Timed]:
    """Yield pending messages by destination; the services with most of them by name."""
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
    if not parts:  # report 0 pending, not the absence of a figure
        yield _sample(m.PENDING, 0, broker, default or NONE, "")
    for (destination, service), part in parts.items():
        yield _sample(m.PENDING, round(part.messages), broker, destination, service)
        if part.oldest is not None:
            yield _age(m.OLDEST_PENDING, part.oldest, broker, destination, service)


def _where(going: Way) -> str:
    if len(going.destinations) == 1:
        return going.destinations[0]
    if going.destinations:
        return SEVERAL
    return ROUTER if going.how.startswith("a router") else NONE


def _set_aside(connection: psycopg.Connection[Any], broker: str) -> Iterator[Sample | Timed]:
    most = {"most": sql.Literal(MOST)}
    rows = fetch(connection, sql.SQL(PARKED).format(**most))
    counted = sum(count for *_, count in rows)
    factor = 1.0
    if counted >= MOST:
        ((live,),) = fetch(connection, ALL_PARKED)
        factor = max(1.0, live / counted)
    for *lane, count in rows:
        yield _sample(m.PARKED, round(count * factor), broker, *lane)
    for *lane, attempts, since, waiting_for_operator in fetch(connection, LANES):
        yield _sample(m.ATTEMPTS, attempts, broker, *lane)
        if waiting_for_operator:
            yield _sample(m.NEEDS_OPERATOR, waiting_for_operator, broker, *lane)
        yield _age(m.OLDEST_PARKED, since, broker, *lane)
    for name, reason, count in fetch(connection, sql.SQL(DEAD).format(**most)):
        yield _sample(m.DEAD, count, broker, name, reason)
    ((held, next_due, refused),) = fetch(connection, sql.SQL(HELD_MESSAGES).format(**most))
    yield _sample(m.HELD, held, broker)
    yield _age(m.OVERDUE, next_due, broker)
    yield _sample(m.REFUSED, refused, broker)
    named: set[tuple[str, str]] = set()
    for group in failure_groups(connection, DeadLetters(), newest=GROUPED).shown:
        if (of := (group.subscription, group.reason)) not in named:
            named.add(of)
            labels = (broker, group.subscription, group.service, group.reason, group.group)
            yield _sample(m.DEAD_GROUP, group.messages, *labels)
    for fleet, count in fetch(connection, MISSING):
        yield _sample(m.MISSING_MEMBERS, count, broker, fleet)
    for name, reason, count in fetch(connection, DROPPED):
        yield _sample(m.DROPPED, count, broker, name, reason)


HELD = """
SELECT b.destination, max(b.attempts), bool_or(b.paused_at IS NOT NULL)
FROM saf.backoff b JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND s.name = 'forwarder' AND b.kind = {kind} GROUP BY 1
"""


def _destinations(
    connection: psycopg.Connection[Any], broker: str, settings: Settings
) -> Iterator[Sample]:
    query = sql.SQL(HELD).format(kind=sql.Literal(str(Kind.MAIN)))
    held = {
        name: "paused" if paused else "down" if attempts else "waiting"
        for name, attempts, paused in fetch(connection, query)
    }
    for name in {**settings.destinations, **held}:
        is_in = held.get(name, "up")
        for state in CONDITIONS:
            yield _sample(m.DESTINATIONS, state == is_in, broker, name, state)


def _age(metric: Metric, moment: datetime | None, *labels: str) -> Timed:
    """Return the age of a moment; 0 without one."""

    def value(now: datetime) -> float:
        return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())

    return Timed(metric=metric, labels=labels, value=value)


def _live(leases: list[datetime], *labels: str) -> Timed:
    """Return the number of members whose leases have not expired."""
    return Timed(
        metric=m.MEMBERS, labels=labels, value=lambda now: sum(lease > now for lease in leases)
    )


def _sample(metric: Metric, value: float, *labels: str) -> Sample:
    return Sample(metric=metric, labels=labels, value=float(value))
