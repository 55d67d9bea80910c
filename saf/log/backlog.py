"""Backlogs: about how much of a log each subscription has left, at a cost that has a bound.

To count all that is pending, one has to read it. What is asked every few seconds may not do that.
So of each shard at most `LOOK` messages are read, by the index, those of the oldest transactions
first. If a shard has no more, the count is exact. Otherwise the rest is estimated from the ids that
were given out since, slot by slot, and from how many of the ids that were read were this shard's.

A batch in hand may be complete in large part. Ids and transaction ids rise together, so the first
transaction that has begun after the position is looked for by halving, and reading begins there.
The position may lie inside the transaction before it, such as a COPY. That one is looked at by
itself, as is each that was in progress when the last batch ended: `LOOK` messages of them all. The
rest of such a transaction is estimated from the ids between the position and its last message. A
message that was written by an older transaction and has a higher id may be left out of the count
until its batch is complete; it is in no count that decides anything.
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

# Of each shard, about the first transaction of its open batch with messages beyond the position
# only, and the one before it, in which the position may lie. Looked for by halving, of all shards
# in one statement: next to many small ones, the server's work for each would be most of it.
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

# Oldest transactions first, by the index; those that are looked at by themselves, in the order in
# which they wrote. What was read and is complete counts for the estimate only.
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

# Of each slot, a row of the newest transaction has about the highest id
LAST_IDS = """
SELECT n.shard, newest.id
FROM unnest({shards}::smallint[]) AS n (shard) CROSS JOIN LATERAL ({slots}) AS newest
"""
LAST_ID = "(SELECT id FROM {slot} s WHERE s.shard = n.shard ORDER BY txid DESC LIMIT 1)"

# Of each slot, about the first and the last id of a transaction. It is a range of one, because an
# equality would not be read from its end
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

    def complete(self, txid: str) -> int:
        """Up to which id the messages of a transaction that had begun at ``done`` are complete."""
        if self.open is None or txid in begun_since(self.open)[1]:
            return 0
        return self.position


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


class Found(NamedTuple):
    """Some of the messages of a shard that were read."""

    shard: int
    service: str
    broker: UUID | None
    left: bool
    alone: str | None
    """The transaction, if it is looked at by itself."""
    slot: int | None
    """Of such a transaction, the slot of the log."""
    messages: int
    written: datetime
    low: int
    high: int


Transaction = tuple[int, str]
"""What a transaction, which is looked at by itself, has written for a shard."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where the messages of a shard are read."""

    start: str
    """The first of the transactions that are read one after the other."""
    alone: list[str]
    """Transactions before it, which are looked at by themselves."""
    most: int
    """How many messages are read of each of these."""


def _look(connection: psycopg.Connection[Any], backlog: Backlog, look: int) -> None:
    """Read what is left of some shards, and add it to their backlog."""
    readings = _readings(connection, backlog, look)
    rows = [*map(Found._make, fetch(connection, _query(backlog, readings, look)))]
    _add_in_order(connection, backlog, [row for row in rows if row.alone is None], look)
    alone: dict[Transaction, list[Found]] = defaultdict(list)
    for row in rows:
        if row.alone is not None:
            alone[row.shard, row.alone].append(row)
    large: dict[Transaction, list[Found]] = {}
    for one, some in alone.items():
        if sum(row.messages for row in some) >= readings[one[0]].most:
            large[one] = some
            continue
        for row in some:
            _add(backlog, row, row.left)
    if large:
        _add_large(connection, backlog, large)


def _add(backlog: Backlog, row: Found, factor: float) -> None:
    if factor and backlog.service in (None, row.service):
        messages = row.messages * factor
        backlog.by_shard[row.shard].add(messages, row.written)
        backlog.by_address[row.service, row.broker].add(messages, row.written)


def _add_in_order(
    connection: psycopg.Connection[Any], backlog: Backlog, rows: list[Found], look: int
) -> None:
    """Add what is left of the transactions that were read one after the other."""
    looked, low, high = _extent(rows)
    cut = [shard for shard, count in looked.items() if count >= look]
    factor = dict.fromkeys(looked, 1.0)
    if cut:
        backlog.exact = False
        for shard, rest in _beyond(connection, backlog.log, cut, high):
            density = looked[shard] / (high[shard] - low[shard] + 1)
            factor[shard] += rest * density / looked[shard]
    for row in rows:
        _add(backlog, row, row.left * factor[row.shard])


def _add_large(
    connection: psycopg.Connection[Any],
    backlog: Backlog,
    large: Mapping[Transaction, list[Found]],
) -> None:
    """Add about what is left of transactions of which only the beginning was read.

    Before its last message, each has as many messages to an id as where it was read.
    """
    backlog.exact = False
    shards = {one.shard: one for one in backlog.shards}
    slots: dict[Transaction, dict[int, tuple[int, int]]] = defaultdict(dict)
    for one, rows in large.items():
        for row in rows:
            assert row.slot is not None  # noqa: S101 - it is looked at by itself
            low, high = slots[one].get(row.slot, (row.low, row.high))
            slots[one][row.slot] = min(low, row.low), max(high, row.high)
    looked = {one: sum(row.messages for row in rows) for one, rows in large.items()}
    rest: dict[Transaction, float] = defaultdict(float)
    for shard, txid, first, last in _ends(connection, backlog.log, large):
        one, before = (shard, txid), max(first - 1, shards[shard].complete(txid))
        if before < last:
            extent = sum(high - low + 1 for low, high in slots[one].values())
            rest[one] += 1 + (last - before - 1) * looked[one] / extent
    for one, rows in large.items():
        for row in rows:
            _add(backlog, row, rest[one] / looked[one])


def _extent(rows: Iterable[Found]) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Of each shard: how many rows were read, their lowest id and their highest."""
    looked: dict[int, int] = defaultdict(int)
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for row in rows:
        looked[row.shard] += row.messages
        low[row.shard] = min(low.get(row.shard, row.low), row.low)
        high[row.shard] = max(high.get(row.shard, row.high), row.high)
    return looked, low, high


def _beyond(
    connection: psycopg.Connection[Any], log: str, shards: list[int], high: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """For shards and slots, how many ids were given out above those that were read."""
    query = sql.SQL(LAST_IDS).format(shards=sql.Literal(shards), slots=_of_slots(log, LAST_ID))
    for shard, last in fetch(connection, query):
        base = last // SLOT_ROWS * SLOT_ROWS
        yield shard, max(0, last - max(base, high[shard]))


def _ends(
    connection: psycopg.Connection[Any], log: str, those: Iterable[Transaction]
) -> list[tuple[Any, ...]]:
    """For transactions and slots: shard, transaction, its first id there and its last."""
    shards, txids = zip(*those, strict=True)
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
    connection: psycopg.Connection[Any], backlog: Backlog, look: int
) -> dict[int, Reading]:
    """Return where to read each shard."""
    known = _not_complete_from(connection, backlog)
    found = {}
    for one in backlog.shards:
        first, in_progress = begun_since(one.done)
        start, begun = known.get(one.shard, (first, None))
        alone = [*in_progress, *([begun] if begun else [])]
        most = max(1, look // max(1, len(alone)))
        found[one.shard] = Reading(start=start, alone=alone, most=most)
    return found


def _query(backlog: Backlog, readings: Mapping[int, Reading], look: int) -> sql.Composed:
    shards = backlog.shards
    where = [readings[one.shard] for one in shards]
    columns = {
        "shards": [one.shard for one in shards],
        "start": [one.start for one in where],
        "alone": [f"{{{','.join(one.alone)}}}" for one in where],
        "most": [one.most for one in where],
        "open": [one.open for one in shards],
        "position": [one.position for one in shards],
        "beyond": [one.beyond for one in shards],
    }
    return sql.SQL(READ).format(
        log=sql.Identifier("saf", backlog.log),
        written=sql.Identifier(AGE_COLUMN[backlog.log]),
        look=sql.Literal(look),
        slot_rows=sql.Literal(SLOT_ROWS),
        **{name: sql.Literal(values) for name, values in columns.items()},
    )


def _not_complete_from(
    connection: psycopg.Connection[Any], backlog: Backlog
) -> dict[int, tuple[str, str | None]]:
    """Of each shard that has completed some of its open batch: where the rest begins, about.

    It is the first transaction of the rest, and the one before it, which the position may lie in.
    """
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
    return {
        shard: (str(low), None if begun is None else str(begun))
        for shard, low, begun in fetch(connection, query)
    }
