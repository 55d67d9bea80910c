"""Reading: the next messages of the shards in hand, in order, and what each of them is.

*Deep backlogs.* Rows are ordered by id, but only (shard, txid) is indexed, so a read sorts what is
left of a shard's batch. A batch need not reach up to now: it may end at a transaction id X if every
message of the shard from X on has a higher id than every message before X (a clean cut). That is
as if the snapshot had been taken earlier, and the order by id is kept. A deep shard is searched
once for such cuts (``cuts``). Its batches are then opened from one cut to the next, up to the
snapshot for which the cuts were found (``until``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.limits import READABLE
from saf.log.shards import newest
from saf.message import FRAGMENT
from saf.received import EXPRESSIONS, ID, READ, SHARD, Received, expressions
from saf.receiving.hand import EXPIRED, LATE, NOW, SPOKEN, UNREAD, Hand, Reader, Shard
from saf.setaside.lane import Kind

CUT_ROWS, CUTS = 250, 64
"""A batch of a deep backlog holds at least the first number of messages; the second is how many
cuts are found ahead."""

IN_HAND = newest("unnest(%(shards)s::smallint[])")

FATE = f"""
CASE WHEN NOT ({READABLE}) THEN {UNREAD}
     WHEN expires_at <= now() THEN {EXPIRED} WHEN deliver_at > now() THEN {LATE}
     WHEN from_initiator IS NOT NULL THEN {SPOKEN} ELSE {NOW} END
"""

# UNION ALL, as in saf.log.cursor: what was in progress at ``done``, and what began after it
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
# The database copies a fragment's body to where it waits: see saf.dialogs.assembly
BODY = f"""
CASE WHEN from_initiator IS NOT NULL AND sequence IS NOT NULL AND %(converses)s
          AND headers -> '{FRAGMENT}' IS NOT NULL
     THEN ''::bytea WHEN {READABLE} THEN body END
"""
READ_LOG = f"""
SELECT m.* FROM unnest(%(shards)s::smallint[], %(open)s::pg_snapshot[]) AS h (shard, open)
JOIN {IN_HAND} AS c USING (shard)
CROSS JOIN LATERAL (
    SELECT {expressions(body=BODY)}, {FATE} AS fate FROM ({SINCE}) AS since
    WHERE {IN_BATCH.format(open="h.open")} AND id > c.position ORDER BY id LIMIT %(limit)s
) AS m
LIMIT %(limit)s
"""
READ_LATE = f"""
SELECT {EXPRESSIONS}, {FATE} AS fate, parked_id FROM saf.parked
WHERE subscription_id = %(subscription_id)s AND destination = '' AND kind = '{Kind.LATER}'
  AND subject = ANY (%(late)s) AND deliver_at <= now()
ORDER BY deliver_at, id LIMIT %(limit)s
"""

# For each transaction: does every message before it have a lower id than all messages from it on,
# and how many messages are before it?
FIND_CUTS = f"""
SELECT shard, array_agg(txid::text ORDER BY txid) FROM (
    SELECT shard, min(txid) AS txid FROM (
        SELECT c.shard, txid, max(max(id)) OVER before < min(min(id)) OVER after AS clean,
               sum(count(*)) OVER before / %(rows)s AS part
        FROM (SELECT *, %(now)s::pg_snapshot AS now FROM {IN_HAND} AS c) AS c
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
    """Find where batches of at least so many messages may end, up to a snapshot."""
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
    params = {
        "subscription_id": hand.reader.subscription_id,
        "service": hand.reader.service,
        "converses": hand.reader.converses,
        "shards": numbers,
        "open": [hand.shards[number].open for number in numbers],
        "late": [str(shard) for shard in hand.late if shard in numbers],
    }
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        if params["late"]:
            cursor.execute(READ_LATE, {**params, "limit": limit}, binary=True)
            for row in cursor.fetchall():
                hand.take(Received(row, row[-1]), row[len(READ)])
                limit -= 1
        cursor.execute(READ_LOG, {**params, "limit": limit}, binary=True)
        rows = cursor.fetchall()
    # rows come shard by shard, each in order
    last = {row[SHARD]: row[ID] for row in rows}
    complete = set(numbers)
    if len(rows) == limit:
        # the last shard read may have more messages, and those after it were not looked at
        complete = set(list(last)[:-1])
        for partly in list(last)[-1:]:
            hand.shards[partly].position = last[partly]
    for number in complete:
        hand.shards[number].close()
    if any(row[-1] for row in rows):
        for row in rows:
            hand.take(Received(row), row[-1])
    else:
        hand.messages += map(Received, rows)
    hand.messages.sort(key=_order)


def _order(message: Received) -> tuple[bool, int]:
    """A sort key: delayed messages come first, as they were read; the others come by id."""
    return (True, message.id) if message.parked_id is None else (False, 0)
