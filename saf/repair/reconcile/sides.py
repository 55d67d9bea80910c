"""Both sides, each read in one snapshot of its own and kept from being purged meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from saf.broker.restored import refuse
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import ConfigurationError
from saf.log.ring import SLOT_ROWS, SLOTS
from saf.repair.reconcile.outcome import Range

Row = tuple[Any, ...]
ROWS_AT_A_TIME = 10_000
NUMBERS = count()
"""Several of one side may be read at the same time."""

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
SELECT broker_id, shards, subscription_id, pg_current_snapshot()::text, clock_timestamp(),
       ARRAY(SELECT DISTINCT unnest(topics) FROM saf.route_version)
FROM saf.broker, saf.subscription s WHERE s.log = 'outbox' AND s.name = 'forwarder'
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One database, read in one snapshot of its own."""

    name: str
    what: str
    connection: psycopg.Connection[Any]

    def fetch(self, query: sql.Composed | str, params: Mapping[str, Any]) -> list[Row]:
        """All rows at once.

        Raises:
            Unavailable: the database does not answer.
        """
        with unavailable_if_lost(self.what):
            return fetch(self.connection, as_sql(query), params)

    def stream(self, query: sql.Composed | str, params: Mapping[str, Any]) -> Iterator[Row]:
        """Rows as they come, in bounded memory; raises as `fetch` does."""
        with (
            unavailable_if_lost(self.what),
            self.connection.cursor(name=f"saf_reconcile_{next(NUMBERS)}") as cursor,
        ):
            cursor.itersize = ROWS_AT_A_TIME
            yield from cursor.execute(as_sql(query), {**params, "where": self.name}, binary=True)


@dataclass(frozen=True, kw_only=True)
class Both:
    """A source and its destinations, and what is compared of them."""

    source: Side
    destinations: tuple[Side, ...]
    range: Range
    shards: int
    """How many the source has."""
    snapshot: str
    topics: frozenset[str]
    """Services that are topics, or were."""
    params: Mapping[str, Any]
    later: Dsn
    """Where the source is read again, after the destinations."""


@contextmanager
def read_both(
    name: str,
    source: Dsn,
    destinations: Mapping[str, Dsn],
    *,
    since: datetime | None,
    until: datetime | None,
    retention_seconds: float,
) -> Iterator[Both]:
    """The source's snapshot, and then the destinations'."""
    with ExitStack() as stack:
        here = stack.enter_context(open_side(name, f"broker {name!r}", source, "outbox"))
        there = tuple(
            stack.enter_context(open_side(one, f"destination {one!r}", dsn, "inbox"))
            for one, dsn in destinations.items()
        )
        ((broker_id, shards, subscription_id, snapshot, now, topics),) = here.fetch(SOURCE, {})
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
            "topics": topics,
        }
        yield Both(
            source=here,
            destinations=there,
            range=span,
            shards=shards,
            snapshot=snapshot,
            topics=frozenset(topics),
            params=params,
            later=source,
        )


@contextmanager
def open_side(name: str, what: str, dsn: Dsn, log: str) -> Iterator[Side]:
    """Connected, its log safe from purges, and no snapshot taken yet."""
    with dsn.connect(role="reconcile") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with unavailable_if_lost(what):
            check_schema(connection)
            connection.rollback()
            connection.execute(sql.SQL(KEEP_UNPURGED).format(log=sql.Identifier(log)))
        yield Side(name=name, what=what, connection=connection)


def _refuse_twins(there: tuple[Side, ...]) -> None:
    known: dict[UUID, str] = {}
    for side in there:
        ((broker_id,),) = side.fetch("SELECT broker_id FROM saf.broker", {})
        if broker_id in known:
            raise ConfigurationError(
                f"destinations {known[broker_id]!r} and {side.name!r} are the same broker, whose "
                "messages would count twice: keep one of them in saf.toml"
            )
        known[broker_id] = side.name


def as_sql(query: sql.Composed | str) -> sql.Composed:
    """The same as a part of other queries."""
    return sql.SQL(query).format() if isinstance(query, str) else query
