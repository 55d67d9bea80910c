"""Reconciling: the proof that what a source has completed is what its destinations hold.

Per shard of the source, two figures of each side are compared, a count and a sum of hashes of the
message ids, which does not depend on their order. Each side is read once, on the server. Only for
shards whose figures differ are the ids themselves compared, sorted on the servers and merged here
in bounded memory, so that each message at fault is named:

    lost         complete at the source, and in no destination
    duplicate    in the destinations more often than at the source
    unexpected   in a destination, and not at the source

Complete is what `saf.cursor` says, less what stands in saf.parked or saf.dead_letter or was
discarded by a person. A source does not record where each message went, so it is compared with
all of its destinations together.

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
lost; two ids whose hashes add up to those of two others escape it (1 in 2^64).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg import sql

from saf.cursor import since as not_visible_in
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import ConfigurationError
from saf.rebase import refuse
from saf.schema import SLOT_ROWS, SLOTS, shard_expression

Kind = Literal["lost", "duplicate", "unexpected", "in_flight"]
Row = tuple[Any, ...]
ROWS_AT_A_TIME = 10_000

# In a REPEATABLE READ transaction a lock alone takes no snapshot
KEEP_UNPURGED = "LOCK TABLE saf.{log} IN ACCESS SHARE MODE"

NEVER_PURGED = f"""
SELECT last_value < {SLOTS * SLOT_ROWS} AND NOT EXISTS (
    SELECT FROM generate_series(0, {SLOTS - 1}) AS number,
                LATERAL (SELECT ('saf.{{log}}_' || number)::regclass AS slot) AS named
    WHERE pg_relation_filenode(slot) <> slot::oid
       OR number < last_value / {SLOT_ROWS} AND pg_relation_size(slot) = 0)
FROM saf.{{log}}_id_seq
"""

SOURCE = """
SELECT broker_id, shards, subscription_id, pg_current_snapshot()::text, clock_timestamp()
FROM saf.broker, saf.subscription s WHERE s.log = 'outbox' AND s.name = 'forwarder'
"""

IN_RANGE = """
created_at >= coalesce(%(since)s::timestamptz, '-infinity')
AND created_at < coalesce(%(until)s::timestamptz, 'infinity')
"""

SENT = f"""
SELECT o.message_id, o.shard, o.id, o.to_service, o.key, o.created_at,
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

# The destination's own column is of its own number of shards
STORED = f"""
SELECT message_id, {{shard}} AS shard, id, to_service, key, created_at, 'stored' AS state
FROM saf.inbox WHERE source = %(source)s AND {IN_RANGE}
"""

FIGURES_SENT = f"""
SELECT shard, count(*) FILTER (WHERE state = 'complete'),
       coalesce(sum(uuid_hash_extended(message_id, 0)) FILTER (WHERE state = 'complete'), 0),
       count(*) FILTER (WHERE state = 'aside'), count(*) FILTER (WHERE state = 'pending')
FROM ({SENT}) AS sent GROUP BY shard
"""
FIGURES_STORED = f"""
SELECT shard, count(*), sum(uuid_hash_extended(message_id, 0)) FROM ({STORED}) AS stored
GROUP BY shard
"""

# uuid_send: bytes sort like uuids do, and need no object each
SORTED = """
SELECT uuid_send(message_id), %(where)s::text, shard, id, to_service, key, created_at, {state}
FROM ({rows}) AS rows WHERE shard = ANY ({shards}::smallint[]) AND {in_range} ORDER BY message_id
"""


@dataclass(frozen=True, kw_only=True)
class Range:
    """What was compared, by created_at: since <= created_at < until; None is without end."""

    since: datetime | None = None
    until: datetime | None = None
    purged: tuple[str, ...] = ()
    """The logs for whose sake it begins at ``since``, as nobody asked for that."""


@dataclass(kw_only=True)
class Shard:
    """The figures of one shard of the source."""

    shard: int
    complete: int = 0
    """At the source, less what is set aside."""
    stored: int = 0
    """At the destinations."""
    aside: int = 0
    pending: int = 0
    hashes: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def same(self) -> bool:
        """Whether both sides hold the same messages."""
        return self.complete == self.stored and self.hashes[0] == self.hashes[1]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A message of which the two sides do not say the same."""

    kind: Kind
    shard: int
    id: int | None
    """In the source's outbox, if it is there."""
    message_id: UUID
    service: str
    key: str | None
    created_at: datetime
    stored: tuple[str, ...]
    """The destination of each copy."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "message_id": str(self.message_id),
            "created_at": self.created_at.isoformat(),
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What reconciling one source came to."""

    broker: str
    range: Range
    shards: tuple[Shard, ...]
    counts: Mapping[str, int]
    """Messages by `Kind`."""
    named: tuple[Difference, ...]
    """As many of them as asked for; none that is only in flight."""

    @property
    def same(self) -> bool:
        """Whether nothing is lost, duplicated or unexpected."""
        return not any(count for kind, count in self.counts.items() if kind != "in_flight")


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One database, read in one snapshot of its own."""

    name: str
    what: str
    connection: psycopg.Connection[Any]

    def fetch(self, query: sql.Composed | str, params: Mapping[str, Any]) -> list[Row]:
        with unavailable_if_lost(self.what):
            return fetch(self.connection, _sql(query), params)

    def stream(self, query: sql.Composed | str, params: Mapping[str, Any]) -> Iterator[Row]:
        with (
            unavailable_if_lost(self.what),
            self.connection.cursor(name="saf_reconcile") as cursor,
        ):
            cursor.itersize = ROWS_AT_A_TIME
            yield from cursor.execute(_sql(query), {**params, "where": self.name}, binary=True)


@dataclass(frozen=True, kw_only=True)
class _Both:
    source: _Side
    destinations: tuple[_Side, ...]
    range: Range
    shards: int
    snapshot: str
    params: Mapping[str, Any]
    later: Dsn


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
    with _read_both(
        name, source, destinations, since=since, until=until, retention_seconds=retention_seconds
    ) as both:
        shards = _figures(both)
        counts: Counter[str] = Counter()
        named: list[Difference] = []
        for difference in _differences(both, [s.shard for s in shards if not s.same]):
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


def missing(
    name: str,
    source: Dsn,
    destinations: Mapping[str, Dsn],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    retention_seconds: float,
) -> list[tuple[int, int]]:
    """(shard, id) in the source's outbox of each lost message, sorted; see `reconcile`."""
    with _read_both(
        name, source, destinations, since=since, until=until, retention_seconds=retention_seconds
    ) as both:
        differ = [shard.shard for shard in _figures(both) if not shard.same]
        return sorted(
            (difference.shard, difference.id)
            for difference in _differences(both, differ)
            if difference.kind == "lost" and difference.id is not None
        )


@contextmanager
def _read_both(
    name: str,
    source: Dsn,
    destinations: Mapping[str, Dsn],
    *,
    since: datetime | None,
    until: datetime | None,
    retention_seconds: float,
) -> Iterator[_Both]:
    """The source's snapshot, and then the destinations'."""
    with ExitStack() as stack:
        here = stack.enter_context(_side(name, f"broker {name!r}", source, "outbox"))
        there = tuple(
            stack.enter_context(_side(one, f"destination {one!r}", dsn, "inbox"))
            for one, dsn in destinations.items()
        )
        ((broker_id, shards, subscription_id, snapshot, now),) = here.fetch(SOURCE, {})
        with unavailable_if_lost(here.what):
            refuse(here.connection)
        _refuse_twins(there)
        purged = [
            f"{log} of {side.what}"
            for side, log in [(here, "outbox"), *((side, "inbox") for side in there)]
            if (True,) not in side.fetch(sql.SQL(NEVER_PURGED).format(log=sql.SQL(log)), {})
        ]
        span = Range(since=since, until=until)
        if since is None and purged:
            span = Range(
                since=now - timedelta(seconds=retention_seconds), until=until, purged=tuple(purged)
            )
        params = {
            "source": broker_id,
            "subscription_id": subscription_id,
            "since": span.since,
            "until": span.until,
        }
        yield _Both(
            source=here,
            destinations=there,
            range=span,
            shards=shards,
            snapshot=snapshot,
            params=params,
            later=source,
        )


@contextmanager
def _side(name: str, what: str, dsn: Dsn, log: str) -> Iterator[_Side]:
    """Connected, its log safe from purges, and no snapshot taken yet."""
    with dsn.connect(role="reconcile") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with unavailable_if_lost(what):
            check_schema(connection)
            connection.rollback()
            connection.execute(sql.SQL(KEEP_UNPURGED).format(log=sql.Identifier(log)))
        yield _Side(name=name, what=what, connection=connection)


def _refuse_twins(there: tuple[_Side, ...]) -> None:
    known: dict[UUID, str] = {}
    for side in there:
        ((broker_id,),) = side.fetch("SELECT broker_id FROM saf.broker", {})
        if broker_id in known:
            raise ConfigurationError(
                f"destinations {known[broker_id]!r} and {side.name!r} are the same broker, whose "
                "messages would count twice: keep one of them in saf.toml"
            )
        known[broker_id] = side.name


def _figures(both: _Both) -> list[Shard]:
    """Count and sum of hashes of each shard, of both sides; the destinations' add up."""
    found = {number: Shard(shard=number) for number in range(both.shards)}
    for number, complete, hashed, aside, pending in both.source.fetch(FIGURES_SENT, both.params):
        shard = found[number]
        shard.complete, shard.aside, shard.pending = complete, aside, pending
        shard.hashes = (int(hashed), 0)
    for side in both.destinations:
        query = sql.SQL(FIGURES_STORED).format(shard=_shard(both.shards))
        for number, stored, hashed in side.fetch(query, both.params):
            shard = found[number]
            shard.stored += stored
            shard.hashes = (shard.hashes[0], shard.hashes[1] + int(hashed))
    return list(found.values())


def _differences(both: _Both, shards: list[int]) -> Iterator[Difference]:
    """What the two sides say differently of some shards, in no order that means anything."""
    if not shards:
        return
    stored = sql.SQL(STORED).format(shard=_shard(both.shards))
    late = not_visible_in("outbox", shards, both.snapshot)
    with _side("", both.source.what, both.later, "outbox") as later:
        streams = [
            both.source.stream(_sorted(SENT, shards, state="state"), both.params),
            later.stream(_sorted(late, shards, state="'pending'"), both.params),
            *(
                side.stream(_sorted(stored, shards, state="state"), both.params)
                for side in both.destinations
            ),
        ]
        for message_id, rows in groupby(merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
            yield from _judged(UUID(bytes=message_id), list(rows))


def _judged(message_id: UUID, rows: list[Row]) -> Iterator[Difference]:
    """What is to be said of one message id, given every row that has it."""
    complete = [row for row in rows if row[7] == "complete"]
    known = complete + [row for row in rows if row[7] in ("aside", "pending")]
    stored = [row for row in rows if row[7] == "stored"]
    wrong: list[tuple[Kind, Row]] = []
    if not known:
        wrong = [("unexpected", stored[0])]
    elif len(stored) > len(known):
        wrong = [("duplicate", known[0])]
    else:
        wrong += [("lost", row) for row in complete[len(stored) :]]
        wrong += [("in_flight", row) for row in known[len(complete) : len(stored)]]
    for kind, (_, _, shard, id_, service, key, created_at, _) in wrong:
        yield Difference(
            kind=kind,
            shard=shard,
            id=id_ if known else None,
            message_id=message_id,
            service=service,
            key=key,
            created_at=created_at,
            stored=tuple(row[1] for row in stored),
        )


def _sorted(rows: sql.Composed | str, shards: list[int], *, state: str) -> sql.Composed:
    return sql.SQL(SORTED).format(
        state=sql.SQL(state),
        rows=_sql(rows),
        shards=sql.Literal(shards),
        in_range=sql.SQL(IN_RANGE),
    )


def _shard(shards: int) -> sql.SQL:
    """The shard that a row has at a source with so many; a percent sign begins a parameter."""
    return sql.SQL(shard_expression(shards).replace("%", "%%"))


def _sql(query: sql.Composed | str) -> sql.Composed:
    return sql.SQL(query).format() if isinstance(query, str) else query
