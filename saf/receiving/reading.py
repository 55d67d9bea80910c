"""Reading: the next messages of the shards in hand, in order, and the fate of each.

*Deep backlogs.* Rows are ordered by id, but only (shard, txid) is indexed, so a read sorts the rest
of a shard's batch. A batch need not reach up to now: it may end at a transaction id X if every
message of the shard from X on has a higher id than every message before X (a clean cut). Such a
batch equals one whose snapshot was taken earlier, and keeps the order by id. A deep shard is
searched once for such cuts (``cuts``). Its batches are then opened from one cut to the next, up to
the snapshot for which the cuts were found (``until``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import Restored
from saf.log.shards import newest
from saf.message import FRAGMENT
from saf.received import EXPRESSIONS, ID, READ, SHARD, WITH_READABLE, Received, expressions
from saf.receiving.hand import EXPIRED, LATE, NOW, SPOKEN, UNREAD, Hand, Reader, Shard
from saf.receiving.retries import THIS_LANE
from saf.setaside.lane import Kind

CUT_ROWS, CUTS = 250, 64
"""Minimum number of messages in a batch of a deep backlog, and number of cuts found ahead."""

IN_HAND = newest("unnest(%(shards)s::smallint[])")

FATE_AT = len(READ)
"""Index of the message's fate in a row that was read."""

FATE = f"""
CASE WHEN NOT readable THEN {UNREAD}
     WHEN expires_at <= now() THEN {EXPIRED} WHEN deliver_at > now() THEN {LATE}
     WHEN from_initiator IS NOT NULL THEN {SPOKEN} ELSE {NOW} END
"""

# UNION ALL, as in saf.log.cursor: rows of transactions in progress at ``done``, and of later ones
SINCE = """
    SELECT * FROM saf.inbox i WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done)
    UNION ALL
    SELECT * FROM saf.inbox i
    WHERE i.shard = c.shard AND i.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done)))
"""
IN_BATCH = """
txid < pg_snapshot_xmax({open}) AND pg_visible_in_snapshot(txid, {open})
AND (%(service)s::text IS NULL OR to_service = %(service)s)
"""
# The database copies a fragment's body to its place: see saf.dialogs.assembly
BODY = f"""
CASE WHEN from_initiator IS NOT NULL AND sequence IS NOT NULL AND %(converses)s
          AND headers -> '{FRAGMENT}' IS NOT NULL
     THEN ''::bytea WHEN readable THEN body END
"""
# In a batch that a dispatcher has left open, endpoints have answered messages beyond the position
READ_LOG = f"""
SELECT m.* FROM unnest(%(shards)s::smallint[], %(open)s::pg_snapshot[]) AS h (shard, open)
JOIN {IN_HAND} AS c USING (shard)
LEFT JOIN saf.dispatched d ON c.open IS NOT NULL AND d.subscription_id = c.subscription_id
    AND d.shard = c.shard AND d.batch = c.batch
CROSS JOIN LATERAL (
    SELECT {expressions(body=BODY)}, {FATE} AS fate, octet_length(body) AS size
    FROM (SELECT {WITH_READABLE} FROM ({SINCE}) AS since
          WHERE {IN_BATCH.format(open="h.open")} AND id > c.position
            AND (id <@ d.ids) IS NOT TRUE
          ORDER BY id LIMIT %(limit)s) AS since
    ORDER BY id
) AS m
LIMIT %(limit)s
"""
READ_AHEAD = f"""
SELECT * FROM (
    SELECT m.*, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS bytes FROM ({READ_LOG}) AS m
) AS m WHERE bytes - size < %(bytes)s
"""
READ_LATE = f"""
SELECT {EXPRESSIONS}, {FATE} AS fate, parked_id FROM (
    SELECT {WITH_READABLE} FROM saf.parked
    WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.LATER}'
      AND subject = ANY (%(late)s) AND deliver_at <= now()
    ORDER BY deliver_at, id LIMIT %(limit)s) AS late
ORDER BY deliver_at, id
"""
READ_LANE = f"""
SELECT {EXPRESSIONS}, {FATE} AS fate, parked_id FROM (
    SELECT {WITH_READABLE} FROM saf.parked
    WHERE {THIS_LANE} ORDER BY id LIMIT %(limit)s) AS lane
ORDER BY id
"""

# A shard with fewer messages than a batch is not searched. For each transaction: does every message
# before it have a lower id than all messages from it on, and how many messages are before it?
FIND_CUTS = f"""
SELECT shard, array_agg(txid::text ORDER BY txid) FROM (
    SELECT shard, min(txid) AS txid FROM (
        SELECT c.shard, txid, max(max(id)) OVER before < min(min(id)) OVER after AS clean,
               sum(count(*)) OVER before / %(rows)s AS part
        FROM (SELECT *, %(now)s::pg_snapshot AS now FROM {IN_HAND} AS c
              WHERE EXISTS (
                  SELECT FROM saf.inbox i
                  WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done)
                  OFFSET %(rows)s)) AS c
        CROSS JOIN LATERAL ({SINCE}) AS since
        WHERE {IN_BATCH.format(open="c.now")}
        GROUP BY c.shard, txid
        WINDOW before AS (PARTITION BY c.shard ORDER BY txid
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
               after AS (PARTITION BY c.shard ORDER BY txid
                         ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)
    ) AS one WHERE clean AND part >= 1 GROUP BY shard, part
) AS cut GROUP BY shard
"""


def find_cuts(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Sequence[Shard],
    now: str,
    rows: int,
) -> None:
    """Find where batches of at least ``rows`` messages may end, up to a snapshot."""
    params = {
        "subscription_id": reader.subscription_id,
        "service": reader.service,
        "shards": [shard.shard for shard in shards],
        "now": now,
        "rows": max(rows, CUT_ROWS),
    }
    found = dict(fetch(connection, FIND_CUTS, params))
    for shard in shards:
        shard.cuts = found.get(shard.shard, [])[:CUTS]


def read(
    connection: psycopg.Connection[Any], hand: Hand, shards: Iterable[int], limit: int
) -> None:
    """Read the next messages of the shards, up to ``limit``, and move the shards past them."""
    numbers = list(shards)
    late = [str(shard) for shard in hand.late if shard in numbers]
    if late:
        params = {
            "subscription_id": hand.reader.subscription_id,
            "late": late,
            "limit": limit,
        }
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            for row in cursor.execute(READ_LATE, params, binary=True).fetchall():
                hand.take(Received(row, row[-1]), row[FATE_AT])
                limit -= 1
    rows, complete = read_log(connection, hand, numbers, limit)
    if rows and rows[-1][SHARD] not in complete:
        hand.shards[rows[-1][SHARD]].position = rows[-1][ID]
    for number in complete:
        hand.shards[number].close()
    if any(row[FATE_AT] for row in rows):
        for row in rows:
            hand.take(Received(row), row[FATE_AT])
    else:
        hand.messages += map(Received, rows)
    hand.messages.sort(key=_order)


def read_lane(
    connection: psycopg.Connection[Any], hand: Hand, lane: str, attempt: int, limit: int
) -> None:
    """Read the first messages of a key's lane, up to ``limit``; ``attempt`` is the first one's."""
    params = {"subscription_id": hand.reader.subscription_id, "lane": lane, "limit": limit}
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        for row in cursor.execute(READ_LANE, params, binary=True).fetchall():
            message = Received(row, row[-1], 1 if hand.messages else attempt)
            hand.take(message, row[FATE_AT])


def read_log(
    connection: psycopg.Connection[Any],
    hand: Hand,
    shards: Sequence[int],
    limit: int,
    most_bytes: int | None = None,
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """Read the next messages of shards; return them with the shards that have no more.

    Messages come shard by shard, each in order. The columns are those of `saf.received.READ`, the
    fate, and others. With ``most_bytes``, reading stops once the bodies reach that size.
    """
    params = {
        "subscription_id": hand.reader.subscription_id,
        "service": hand.reader.service,
        "converses": hand.reader.converses,
        "shards": shards,
        "open": [hand.shards[number].open for number in shards],
        "limit": limit,
        "bytes": most_bytes,
    }
    query = READ_LOG if most_bytes is None else READ_AHEAD
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        rows = cursor.execute(query, params, binary=True).fetchall()
    refuse_doubled(connection, rows)
    if len(rows) < limit and (most_bytes is None or not rows or rows[-1][-1] < most_bytes):
        return rows, set(shards)
    # the last shard read may have more messages, and the shards after it were not read
    seen = dict.fromkeys(row[SHARD] for row in rows)
    return rows, set(list(seen)[:-1])


def refuse_doubled(connection: psycopg.Connection[Any], rows: Sequence[tuple[Any, ...]]) -> None:
    """Refuse rows with the same id: a position could not tell them apart.

    Raises:
        Restored: a backup was restored over existing rows, or the sequence was set back.
    """
    ids = [row[ID] for row in rows]
    if len({*ids}) < len(ids):
        first = min(id_ for id_, times in Counter(ids).items() if times > 1)
        reason = f"saf.inbox has several messages with id {first}"
        raise Restored(connection.info.dbname, why=[reason])


def _order(message: Received) -> tuple[bool, int]:
    """Return a sort key: delayed messages come first, as they were read; the others by id."""
    return (True, message.id) if message.parked_id is None else (False, 0)
