"""Backlogs: about how many messages each subscription has pending, at a bounded cost.

An exact count reads every pending message, which is too slow for a figure that is polled every few
seconds. So the count reads at most `LOOK` messages per shard, by the index, oldest transactions
first. A shard with fewer messages is counted exactly. Otherwise the rest is estimated, slot by
slot, from the ids assigned since and from this shard's share of the ids that were read.

`written_since` counts what a log has got since a snapshot in the same way: as the backlog of a
reader who has read all that the snapshot sees.

Most of an open batch may be complete. Ids and transaction ids rise together, so a binary search
finds the first transaction that began after the position, and reading begins there. The position
may lie inside the transaction before, for example a COPY. That transaction is sampled separately,
as is each transaction that was in progress when the last batch ended; these samples share the limit
of `LOOK` messages. The rest of such a transaction is estimated from the ids between the position
and its last message. Messages with a higher id from an older transaction may be missing from the
count until their batch is complete. Nothing is decided by these counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql

from saf.database import fetch, of_broker, records
from saf.log.read import BEYOND, BY_INDEX, begun_since
from saf.log.ring import AGE_COLUMN, SLOT_ROWS, SLOTS
from saf.log.shards import LAST

LOOK = 1000
"""Messages read per shard at most."""

SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
TIMEOUT = "SELECT set_config('statement_timeout', %(milliseconds)s, true)"

# The newest version of each cursor, as in saf.log.shards. The messages that a dispatcher completed
# beyond the position belong to the open batch.
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
{BEYOND}
WHERE c.subscription_id = s.subscription_id AND c.shard = n.shard
ORDER BY s.log DESC, s.name, n.shard
"""

# For each shard, about the first transaction of its open batch whose messages are all beyond the
# position, and the transaction before, which may contain the position. One statement searches all
# shards: with a statement a shard, the server's work per statement would dominate.
NOT_COMPLETE_FROM = """
WITH RECURSIVE halving (shard, position, low, high, begun) AS (
    SELECT *, NULL::bigint FROM unnest({shards}::smallint[], {positions}::bigint[],
                                       {low}::bigint[], {high}::bigint[])
    UNION ALL
    SELECT h.shard, h.position,
           CASE WHEN first.id <= h.position THEN first.txid + 1 ELSE h.low END,
           CASE WHEN first.id <= h.position THEN h.high ELSE m.middle END,
           CASE WHEN first.id <= h.position THEN first.txid ELSE h.begun END
    FROM halving h CROSS JOIN LATERAL (SELECT (h.low + h.high) / 2 AS middle) AS m
    LEFT JOIN LATERAL (
        SELECT o.id, o.txid::text::bigint AS txid FROM {log} o
        WHERE o.shard = h.shard AND o.txid >= m.middle::text::xid8
        ORDER BY o.txid LIMIT 1) AS first ON true
    WHERE h.low < h.high)
SELECT shard, low, begun FROM halving WHERE low >= high
"""

# Oldest transactions first, by the index; separately sampled transactions in the order in which
# they wrote. Complete messages count for the estimate only.
READ = """
SELECT shard, to_service, to_broker,
       open IS NULL OR NOT (pg_visible_in_snapshot(txid, open)
                            AND (id <= position OR id <@ beyond)) AS left,
       alone::text, CASE WHEN alone IS NOT NULL THEN id / {slot_rows} END,
       count(*), min(written), min(id), max(id)
FROM unnest({shards}::smallint[], {start}::xid8[], {alone}::text[], {most}::bigint[],
            {open}::pg_snapshot[], {position}::bigint[], {beyond}::int8multirange[])
     AS n (shard, start, those, most, open, position, beyond)
CROSS JOIN LATERAL (
    (SELECT NULL::xid8 AS alone, id, txid, to_service, to_broker, {written} AS written
     FROM {log} o WHERE o.shard = n.shard AND o.txid >= n.start ORDER BY o.txid LIMIT {look})
    UNION ALL
    (SELECT t.alone, looked.* FROM unnest(n.those::xid8[]) AS t (alone) CROSS JOIN LATERAL (
        SELECT id, txid, to_service, to_broker, {written} AS written FROM {log} o
        WHERE o.shard = n.shard AND o.txid = t.alone LIMIT n.most) AS looked)) AS looked
GROUP BY 1, 2, 3, 4, 5, 6
"""

# In each slot, a row of the newest transaction has about the highest id
LAST_IDS = """
SELECT n.shard, newest.id
FROM unnest({shards}::smallint[]) AS n (shard) CROSS JOIN LATERAL ({slots}) AS newest
"""
LAST_ID = "(SELECT id FROM {slot} s WHERE s.shard = n.shard ORDER BY txid DESC LIMIT 1)"

# In each slot, about the first and the last id of a transaction. A range of one transaction, since
# PostgreSQL would not read an equality from its end
ENDS = """
SELECT n.shard, n.txid::text, ends.first, ends.last
FROM unnest({shards}::smallint[], {txids}::xid8[]) AS n (shard, txid)
CROSS JOIN LATERAL ({slots}) AS ends WHERE ends.last IS NOT NULL
"""
ENDS_IN_SLOT = """
SELECT (SELECT id FROM {slot} s WHERE s.shard = n.shard AND s.txid >= n.txid AND s.txid <= n.txid
        ORDER BY s.txid LIMIT 1) AS first,
       (SELECT id FROM {slot} s WHERE s.shard = n.shard AND s.txid >= n.txid AND s.txid <= n.txid
        ORDER BY s.txid DESC LIMIT 1) AS last
"""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard of a subscription: its owner and its cursor."""

    subscription_id: int
    subscription: str
    log: str
    service: str | None
    """Service whose messages the subscription reads; None: all services."""
    shard: int
    owner: str | None
    """The member's name, host:pid; None if the shard is free."""
    epoch: int
    batch: int
    done: str
    open: str | None
    position: int
    beyond: str
    """Ids complete beyond the position, as a PostgreSQL multirange."""

    def complete(self, txid: str) -> int:
        """Return the id up to which a transaction that had begun at ``done`` is complete."""
        if self.open is None or txid in begun_since(self.open)[1]:
            return 0
        return self.position


@dataclass
class Part:
    """Pending messages of a shard or an address."""

    messages: float = 0.0
    oldest: datetime | None = None

    def add(self, messages: float, oldest: datetime | None) -> None:
        """Add messages, the oldest written at ``oldest``."""
        self.messages += messages
        if oldest is not None:
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)


Addressed = tuple[str, UUID | None]
"""A service, and the broker if the messages name one."""


@dataclass
class Backlog:
    """Pending messages of a subscription."""

    subscription: str
    log: str
    service: str | None
    shards: list[Shard]
    exact: bool = True
    """Whether every pending message was counted; otherwise the numbers are estimates."""
    by_shard: dict[int, Part] = field(default_factory=lambda: defaultdict(Part))
    by_address: dict[Addressed, Part] = field(default_factory=lambda: defaultdict(Part))

    @property
    def messages(self) -> int:
        """Number of pending messages."""
        return round(sum(part.messages for part in self.by_shard.values()))

    @property
    def oldest(self) -> datetime | None:
        """When the oldest pending message was written or, in an inbox, stored."""
        known = [part.oldest for part in self.by_shard.values() if part.oldest is not None]
        return min(known, default=None)


def backlogs(
    connection: psycopg.Connection[Any], *, look: int = LOOK, seconds: float | None = None
) -> list[Backlog]:
    """Return the backlog of each subscription of a broker, in one snapshot. Only reads.

    Args:
        connection: in autocommit.
        look: messages read per shard at most.
        seconds: statement timeout; None: the session's.

    Raises:
        psycopg.errors.QueryCanceled: a statement took longer.
    """
    with connection.transaction():
        connection.execute(SNAPSHOT)
        connection.execute(BY_INDEX)
        if seconds is not None:
            connection.execute(TIMEOUT, {"milliseconds": str(max(1, round(seconds * 1000)))})
        found: dict[int, Backlog] = {}
        for row in records(connection, Shard, SHARDS):
            one = found.setdefault(
                row.subscription_id,
                Backlog(subscription=row.subscription, log=row.log, service=row.service, shards=[]),
            )
            one.shards.append(row)
        for backlog in found.values():
            _look(connection, backlog, look)
    return list(found.values())


CURRENT = "SELECT pg_current_snapshot()::text, shards FROM saf.broker"


def written_since(
    connection: psycopg.Connection[Any], snapshot: str | None, *, look: int = LOOK
) -> tuple[str, dict[str, Backlog]]:
    """Return the present snapshot, and what each log has got since an earlier one. Only reads.

    Without an earlier snapshot, or if nothing was committed since, no log is read.

    Args:
        connection: in autocommit.
        snapshot: the snapshot that an earlier call has returned; None for the first call.
        look: messages read per shard at most; more are estimated.
    """
    with connection.transaction():
        connection.execute(SNAPSHOT)
        connection.execute(BY_INDEX)
        now, shards = of_broker(connection, CURRENT)
        found = {
            log: Backlog(subscription="", log=log, service=None, shards=[])
            for log in (AGE_COLUMN if snapshot not in (None, now) else ())
        }
        for log, backlog in found.items():
            backlog.shards = [
                Shard(
                    subscription_id=0,
                    subscription="",
                    log=log,
                    service=None,
                    shard=shard,
                    owner=None,
                    epoch=0,
                    batch=0,
                    done=str(snapshot),
                    open=None,
                    position=0,
                    beyond="{}",
                )
                for shard in range(shards)
            ]
            _look(connection, backlog, look)
    return now, found


class Found(NamedTuple):
    """A group of messages that were read from a shard."""

    shard: int
    service: str
    broker: UUID | None
    left: bool
    alone: str | None
    """The transaction, if sampled separately."""
    slot: int | None
    """The slot of the log, for a separately sampled transaction."""
    messages: int
    written: datetime
    low: int
    high: int


Transaction = tuple[int, str]
"""A shard, and a separately sampled transaction."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where to read the messages of a shard."""

    start: str
    """First transaction to read in order."""
    alone: list[str]
    """Earlier transactions to sample separately."""
    most: int
    """Messages to read from each of these."""


def _look(connection: psycopg.Connection[Any], backlog: Backlog, limit: int) -> None:
    """Read the pending messages of a backlog's shards, and add them."""
    readings = _readings(connection, backlog, limit)
    rows = [*map(Found._make, fetch(connection, _query(backlog, readings, limit)))]
    _add_in_order(connection, backlog, [row for row in rows if row.alone is None], limit)
    by_transaction: dict[Transaction, list[Found]] = defaultdict(list)
    for row in rows:
        if row.alone is not None:
            by_transaction[row.shard, row.alone].append(row)
    large: dict[Transaction, list[Found]] = {}
    for transaction, group in by_transaction.items():
        if sum(row.messages for row in group) >= readings[transaction[0]].most:
            large[transaction] = group
            continue
        for row in group:
            _add(backlog, row, row.left)
    if large:
        _add_large(connection, backlog, large)


def _add(backlog: Backlog, row: Found, factor: float) -> None:
    if factor and backlog.service in (None, row.service):
        messages = row.messages * factor
        backlog.by_shard[row.shard].add(messages, row.written)
        backlog.by_address[row.service, row.broker].add(messages, row.written)


def _add_in_order(
    connection: psycopg.Connection[Any], backlog: Backlog, rows: list[Found], limit: int
) -> None:
    """Add the pending messages of transactions that were read in order."""
    counts, low, high = _extent(rows)
    cut = [shard for shard, count in counts.items() if count >= limit]
    factor = dict.fromkeys(counts, 1.0)
    if cut:
        backlog.exact = False
        for shard, rest in _beyond(connection, backlog.log, cut, high):
            density = counts[shard] / (high[shard] - low[shard] + 1)
            factor[shard] += rest * density / counts[shard]
    for row in rows:
        _add(backlog, row, row.left * factor[row.shard])


def _add_large(
    connection: psycopg.Connection[Any],
    backlog: Backlog,
    large: Mapping[Transaction, list[Found]],
) -> None:
    """Add an estimate for transactions that were read only in part.

    The density of a transaction's ids is taken to be the same in its unread part.
    """
    backlog.exact = False
    shards = {one.shard: one for one in backlog.shards}
    slots: dict[Transaction, dict[int, tuple[int, int]]] = defaultdict(dict)
    for one, rows in large.items():
        for row in rows:
            assert row.slot is not None  # noqa: S101 - sampled separately
            low, high = slots[one].get(row.slot, (row.low, row.high))
            slots[one][row.slot] = min(low, row.low), max(high, row.high)
    counts = {one: sum(row.messages for row in rows) for one, rows in large.items()}
    rest: dict[Transaction, float] = defaultdict(float)
    for shard, txid, first, last in _ends(connection, backlog.log, large):
        one, before = (shard, txid), max(first - 1, shards[shard].complete(txid))
        if before < last:
            extent = sum(high - low + 1 for low, high in slots[one].values())
            rest[one] += 1 + (last - before - 1) * counts[one] / extent
    for one, rows in large.items():
        for row in rows:
            _add(backlog, row, rest[one] / counts[one])


def _extent(rows: Iterable[Found]) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Return the number of rows read, their lowest and their highest id, each by shard."""
    counts: dict[int, int] = defaultdict(int)
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for row in rows:
        counts[row.shard] += row.messages
        low[row.shard] = min(low.get(row.shard, row.low), row.low)
        high[row.shard] = max(high.get(row.shard, row.high), row.high)
    return counts, low, high


def _beyond(
    connection: psycopg.Connection[Any], log: str, shards: list[int], high: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield for each shard and slot the number of ids assigned above those that were read."""
    query = sql.SQL(LAST_IDS).format(shards=sql.Literal(shards), slots=_of_slots(log, LAST_ID))
    for shard, last in fetch(connection, query):
        base = last // SLOT_ROWS * SLOT_ROWS
        yield shard, max(0, last - max(base, high[shard]))


def _ends(
    connection: psycopg.Connection[Any], log: str, transactions: Iterable[Transaction]
) -> list[tuple[Any, ...]]:
    """Return the shard, transaction, first id and last id for each transaction and slot."""
    shards, txids = zip(*transactions, strict=True)
    query = sql.SQL(ENDS).format(
        shards=sql.Literal([*shards]),
        txids=sql.Literal([*txids]),
        slots=_of_slots(log, ENDS_IN_SLOT),
    )
    return fetch(connection, query)


def _of_slots(log: str, query: str) -> sql.Composed:
    return sql.SQL(" UNION ALL ").join(
        sql.SQL(query).format(slot=sql.Identifier("saf", f"{log}_{slot}")) for slot in range(SLOTS)
    )


def _readings(
    connection: psycopg.Connection[Any], backlog: Backlog, limit: int
) -> dict[int, Reading]:
    """Return where to read each shard."""
    known = _not_complete_from(connection, backlog)
    found = {}
    for shard in backlog.shards:
        first, in_progress = begun_since(shard.done)
        start, begun = known.get(shard.shard, (first, None))
        txids = [*in_progress, *([begun] if begun else [])]
        most = max(1, limit // max(1, len(txids)))
        found[shard.shard] = Reading(start=start, alone=txids, most=most)
    return found


def _query(backlog: Backlog, readings: Mapping[int, Reading], limit: int) -> sql.Composed:
    shards = backlog.shards
    where = [readings[item.shard] for item in shards]
    columns = {
        "shards": [item.shard for item in shards],
        "start": [item.start for item in where],
        "alone": [f"{{{','.join(item.alone)}}}" for item in where],
        "most": [item.most for item in where],
        "open": [item.open for item in shards],
        "position": [item.position for item in shards],
        "beyond": [item.beyond for item in shards],
    }
    return sql.SQL(READ).format(
        log=sql.Identifier("saf", backlog.log),
        written=sql.Identifier(AGE_COLUMN[backlog.log]),
        look=sql.Literal(limit),
        slot_rows=sql.Literal(SLOT_ROWS),
        **{name: sql.Literal(values) for name, values in columns.items()},
    )


def _not_complete_from(
    connection: psycopg.Connection[Any], backlog: Backlog
) -> dict[int, tuple[str, str | None]]:
    """Return about where the rest begins, for each shard whose open batch is partly complete.

    The first transaction of the rest, and the transaction before, which may contain the position.
    """
    in_hand = [item for item in backlog.shards if item.open is not None and item.position]
    if not in_hand:
        return {}
    columns = {
        "shards": [item.shard for item in in_hand],
        "positions": [item.position for item in in_hand],
        "low": [int(begun_since(item.done)[0]) for item in in_hand],
        "high": [int(begun_since(item.open)[0]) for item in in_hand if item.open],
    }
    query = sql.SQL(NOT_COMPLETE_FROM).format(
        log=sql.Identifier("saf", backlog.log),
        **{name: sql.Literal(values) for name, values in columns.items()},
    )
    return {
        shard: (str(low), None if begun is None else str(begun))
        for shard, low, begun in fetch(connection, query)
    }
