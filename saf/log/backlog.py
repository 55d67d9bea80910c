"""Backlogs: about how much of a log each subscription has left, at a cost that has a bound.

To count all that is pending, one has to read it. What is asked every few seconds may not do that.
So of each shard at most `LOOK` messages are read, by the index, those of the oldest transactions
first. If a shard has no more, the count is exact. Otherwise the rest is estimated from the ids that
were given out since, slot by slot, and from how many of the ids that were read were this shard's.

A batch in hand may be complete in large part. Ids and transaction ids rise together, so the first
message that is not complete is looked for by halving, and reading begins there. A message that was
written by an old transaction and has a high id may then be left out of the count until its batch is
complete; it is in no count that decides anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.database import fetch
from saf.log.cursor import BY_INDEX, begun_since
from saf.log.ring import AGE_COLUMN, SLOT_ROWS, SLOTS
from saf.log.shards import LAST

LOOK = 1000
"""How many messages of a shard are read at most."""

SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
TIMEOUT = "SELECT set_config('statement_timeout', %(milliseconds)s, true)"

# The newest version of each cursor, as in saf.log.shards. What a dispatcher has completed beyond
# the position belongs to the open batch.
SHARDS = f"""
SELECT s.subscription_id, s.name AS subscription, s.log, s.service, n.shard,
       m.name AS owner, c.epoch, c.batch, c.done::text AS done, c.open::text AS open, c.position,
       coalesce(d.ids, '{{}}')::text AS beyond
FROM saf.subscription s CROSS JOIN saf.broker b
CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS n (shard)
CROSS JOIN LATERAL (
    SELECT * FROM saf.cursor
    WHERE (subscription_id, shard, batch) <= (s.subscription_id, n.shard, {LAST})
    ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
LEFT JOIN saf.member m ON m.member_id = c.owner
LEFT JOIN saf.dispatched d ON c.open IS NOT NULL
    AND (d.subscription_id, d.shard, d.batch) = (c.subscription_id, c.shard, c.batch)
WHERE c.subscription_id = s.subscription_id AND c.shard = n.shard
ORDER BY s.log DESC, s.name, n.shard
"""

# Of each shard, about the first transaction of its open batch with messages beyond the position.
# Looked for by halving, of all shards in one statement: next to many small ones, the server's work
# for each would be most of it.
NOT_COMPLETE_FROM = """
WITH RECURSIVE halving (shard, position, low, high) AS (
    SELECT * FROM unnest({shards}::smallint[], {positions}::bigint[], {low}::bigint[],
                         {high}::bigint[])
    UNION ALL
    SELECT h.shard, h.position,
           CASE WHEN first.id <= h.position THEN first.txid + 1 ELSE h.low END,
           CASE WHEN first.id <= h.position THEN h.high ELSE m.middle END
    FROM halving h CROSS JOIN LATERAL (SELECT (h.low + h.high) / 2 AS middle) AS m
    LEFT JOIN LATERAL (
        SELECT o.id, o.txid::text::bigint AS txid FROM {log} o
        WHERE o.shard = h.shard AND o.txid >= m.middle::text::xid8
        ORDER BY o.txid LIMIT 1) AS first ON true
    WHERE h.low < h.high)
SELECT shard, low FROM halving WHERE low >= high
"""

# Oldest transactions first, by the index; those that were in progress at ``done`` by themselves.
# What was read and is complete counts for the estimate only.
READ = """
SELECT shard, to_service, to_broker,
       open IS NULL OR NOT (pg_visible_in_snapshot(txid, open)
                            AND (id <= position OR id <@ beyond)) AS left,
       count(*), min(written), min(id), max(id)
FROM unnest({shards}::smallint[], {start}::xid8[], {xip}::text[], {open}::pg_snapshot[],
            {position}::bigint[], {beyond}::int8multirange[])
     AS n (shard, start, xip, open, position, beyond)
CROSS JOIN LATERAL (
    (SELECT id, txid, to_service, to_broker, {written} AS written FROM {log} o
     WHERE o.shard = n.shard AND o.txid >= n.start ORDER BY o.txid LIMIT {look})
    UNION ALL
    (SELECT id, txid, to_service, to_broker, {written} AS written FROM {log} o
     WHERE o.shard = n.shard AND o.txid = ANY (n.xip::xid8[]) LIMIT {look})) AS looked
GROUP BY 1, 2, 3, 4
"""

# Of each slot, a row of the newest transaction has about the highest id
LAST_IDS = """
SELECT n.shard, newest.id
FROM unnest({shards}::smallint[]) AS n (shard) CROSS JOIN LATERAL ({slots}) AS newest
"""
LAST_ID = "(SELECT id FROM {slot} s WHERE s.shard = n.shard ORDER BY txid DESC LIMIT 1)"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard of a subscription: who owns it, and how far it is."""

    subscription_id: int
    subscription: str
    log: str
    service: str | None
    """Whose messages the subscription reads; None: everybody's."""
    shard: int
    owner: str | None
    """The member's name, host:pid; None if the shard is free."""
    epoch: int
    batch: int
    done: str
    open: str | None
    position: int
    beyond: str
    """What is complete beyond the position, as PostgreSQL writes ranges of ids."""


@dataclass
class Part:
    """What is left of some messages."""

    messages: float = 0.0
    oldest: datetime | None = None

    def add(self, messages: float, oldest: datetime | None) -> None:
        """Add some more."""
        self.messages += messages
        if oldest is not None:
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)


Addressed = tuple[str, UUID | None]
"""A service, and a broker if messages are addressed to one."""


@dataclass
class Backlog:
    """What a subscription has left of its log."""

    subscription: str
    log: str
    service: str | None
    shards: list[Shard]
    exact: bool = True
    """Whether all of it was read; otherwise the numbers of messages are estimates."""
    by_shard: dict[int, Part] = field(default_factory=lambda: defaultdict(Part))
    by_address: dict[Addressed, Part] = field(default_factory=lambda: defaultdict(Part))

    @property
    def messages(self) -> int:
        """How many messages are left."""
        return round(sum(part.messages for part in self.by_shard.values()))

    @property
    def oldest(self) -> datetime | None:
        """When the oldest of them was written; at an inbox, when it was stored there."""
        known = [part.oldest for part in self.by_shard.values() if part.oldest is not None]
        return min(known, default=None)


def backlogs(
    connection: psycopg.Connection[Any], *, look: int = LOOK, seconds: float | None = None
) -> list[Backlog]:
    """Return what each subscription of a broker has left, in one snapshot. Only reads.

    Args:
        connection: in autocommit.
        look: how many messages of a shard are read at most.
        seconds: the bound of a statement; None: that of the session.

    Raises:
        psycopg.errors.QueryCanceled: a statement took longer.
    """
    with connection.transaction():
        connection.execute(SNAPSHOT)
        connection.execute(BY_INDEX)
        if seconds is not None:
            connection.execute(TIMEOUT, {"milliseconds": str(max(1, round(seconds * 1000)))})
        with psycopg.Cursor(connection, row_factory=class_row(Shard)) as cursor:
            rows = cursor.execute(SHARDS).fetchall()
        found: dict[int, Backlog] = {}
        for row in rows:
            one = found.setdefault(
                row.subscription_id,
                Backlog(subscription=row.subscription, log=row.log, service=row.service, shards=[]),
            )
            one.shards.append(row)
        for backlog in found.values():
            _look(connection, backlog, look)
    return list(found.values())


def _look(connection: psycopg.Connection[Any], backlog: Backlog, look: int) -> None:
    """Read what is left of some shards, and add it to their backlog."""
    rows = fetch(connection, _query(connection, backlog, look))
    looked, low, high = _extent(rows)
    cut = [shard for shard, count in looked.items() if count >= look]
    factor = dict.fromkeys(looked, 1.0)
    if cut:
        backlog.exact = False
        for shard, rest in _beyond(connection, backlog.log, cut, high):
            density = looked[shard] / (high[shard] - low[shard] + 1)
            factor[shard] += rest * density / looked[shard]
    for shard, service, broker, left, count, written, _, _ in rows:
        if left and backlog.service in (None, service):
            messages = count * factor[shard]
            backlog.by_shard[shard].add(messages, written)
            backlog.by_address[service, broker].add(messages, written)


def _extent(
    rows: Iterable[Sequence[Any]],
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Of each shard: how many rows were read, their lowest id and their highest."""
    looked: dict[int, int] = defaultdict(int)
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for shard, _, _, _, count, _, first, last in rows:
        looked[shard] += count
        low[shard] = min(low.get(shard, first), first)
        high[shard] = max(high.get(shard, last), last)
    return looked, low, high


def _beyond(
    connection: psycopg.Connection[Any], log: str, shards: list[int], high: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """For shards and slots, how many ids were given out above those that were read."""
    slots = sql.SQL(" UNION ALL ").join(
        sql.SQL(LAST_ID).format(slot=sql.Identifier("saf", f"{log}_{slot}"))
        for slot in range(SLOTS)
    )
    query = sql.SQL(LAST_IDS).format(shards=sql.Literal(shards), slots=slots)
    for shard, last in fetch(connection, query):
        base = last // SLOT_ROWS * SLOT_ROWS
        yield shard, max(0, last - max(base, high[shard]))


def _query(connection: psycopg.Connection[Any], backlog: Backlog, look: int) -> sql.Composed:
    shards = backlog.shards
    begun = [begun_since(one.done) for one in shards]
    known = _not_complete_from(connection, backlog)
    start = [known.get(one.shard, first) for one, (first, _) in zip(shards, begun, strict=True)]
    columns = {
        "shards": [one.shard for one in shards],
        "start": start,
        "xip": [f"{{{','.join(xip)}}}" for _, xip in begun],
        "open": [one.open for one in shards],
        "position": [one.position for one in shards],
        "beyond": [one.beyond for one in shards],
    }
    return sql.SQL(READ).format(
        log=sql.Identifier("saf", backlog.log),
        written=sql.Identifier(AGE_COLUMN[backlog.log]),
        look=sql.Literal(look),
        **{name: sql.Literal(values) for name, values in columns.items()},
    )


def _not_complete_from(connection: psycopg.Connection[Any], backlog: Backlog) -> dict[int, str]:
    """Of each shard that has completed some of its open batch: where the rest begins, about."""
    in_hand = [one for one in backlog.shards if one.open is not None and one.position]
    if not in_hand:
        return {}
    columns = {
        "shards": [one.shard for one in in_hand],
        "positions": [one.position for one in in_hand],
        "low": [int(begun_since(one.done)[0]) for one in in_hand],
        "high": [int(begun_since(one.open)[0]) for one in in_hand if one.open],
    }
    query = sql.SQL(NOT_COMPLETE_FROM).format(
        log=sql.Identifier("saf", backlog.log),
        **{name: sql.Literal(values) for name, values in columns.items()},
    )
    return {shard: str(txid) for shard, txid in fetch(connection, query)}
