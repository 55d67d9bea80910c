"""Reading: the next messages of shards, of lanes, and those whose time has come, in order.

Receivers, prefetching receivers and dispatchers read by the same statements. What they may differ
in is an argument: whose shards (`Place`), limits of messages and bytes, and whether messages behind
others of their key are marked (`BEHIND`). Each row that was read has the columns of
`saf.received.READ` and then its fate; `PARKED_AT` is the place of its id in saf.parked, if it was
read from there.

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
from operator import itemgetter
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import Restored
from saf.log.read import IN_BATCH, since_shown
from saf.log.shards import newest
from saf.message import FRAGMENT
from saf.received import EXPRESSIONS, ID, READ, SHARD, WITH_READABLE, Received, expressions
from saf.receiving.hand import (
    BEHIND,
    EXPIRED,
    LATE,
    NOW,
    SPOKEN,
    UNREAD,
    Hand,
    Place,
    Reader,
    Shard,
)
from saf.setaside.lane import Kind

CUT_ROWS, CUTS = 250, 64
"""Minimum number of messages in a batch of a deep backlog, and number of cuts found ahead."""

FATE_AT, PARKED_AT = len(READ), len(READ) + 2
"""Indexes of a message's fate, and of its id in saf.parked, in a row that was read."""

_PLACE_AT = len(READ) + 2

IN_HAND = newest("unnest(%(shards)s::smallint[])")

_FATE = f"""
CASE WHEN NOT readable THEN {UNREAD}
     WHEN expires_at <= now() THEN {EXPIRED} WHEN deliver_at > now() THEN {LATE}
     {{behind}} WHEN from_initiator IS NOT NULL THEN {SPOKEN} ELSE {NOW} END AS fate,
octet_length(body) AS size
"""
FATE = _FATE.format(behind="")
FATE_OR_BEHIND = _FATE.format(
    behind=f"""WHEN %(behind)s AND EXISTS (
        SELECT FROM saf.backoff b
        WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
          AND b.kind = '{Kind.KEY}' AND b.subject = coalesce(since.key, since.message_id::text))
     THEN {BEHIND}"""
)

# The database copies a fragment's body to its place: see saf.dialogs.assembly
BODY = f"""
CASE WHEN from_initiator IS NOT NULL AND sequence IS NOT NULL AND %(converses)s
          AND headers -> '{FRAGMENT}' IS NOT NULL
     THEN ''::bytea WHEN readable THEN body END
"""
OF_SERVICE = "(%(service)s::text IS NULL OR to_service = %(service)s)"
NEXT = f"""
SELECT m.*, c.place
FROM unnest(%(shard)s::smallint[], %(done)s::pg_snapshot[], %(open)s::pg_snapshot[],
            %(after)s::bigint[], %(beyond)s::int8multirange[])
    WITH ORDINALITY AS c (shard, done, open, after, beyond, place)
CROSS JOIN LATERAL (
    SELECT {expressions(body=BODY)}, {FATE_OR_BEHIND}
    FROM (SELECT {WITH_READABLE} FROM ({since_shown()}) AS since
          WHERE {IN_BATCH.format(open="c.open")} AND {OF_SERVICE} AND id > c.after
            AND NOT id <@ c.beyond
          ORDER BY id LIMIT %(each)s) AS since
    ORDER BY id
) AS m
LIMIT %(limit)s
"""

_WAITING = "subscription_id = %(subscription_id)s AND destination = '' AND kind ="
LANES = f"""
SELECT m.*, l.place
FROM unnest(%(lanes)s::text[]) WITH ORDINALITY AS l (subject, place)
CROSS JOIN LATERAL (
    SELECT {EXPRESSIONS}, {FATE}, parked_id
    FROM (SELECT {WITH_READABLE} FROM saf.parked
          WHERE {_WAITING} '{Kind.KEY}' AND subject = l.subject ORDER BY id LIMIT %(each)s) AS lane
    ORDER BY id
) AS m
"""
DELAYED = f"""
SELECT {EXPRESSIONS}, {FATE_OR_BEHIND}, parked_id
FROM (SELECT {WITH_READABLE} FROM saf.parked
      WHERE {_WAITING} '{Kind.LATER}' AND subject = ANY (ARRAY(
          SELECT subject FROM saf.backoff
          WHERE {_WAITING} '{Kind.LATER}' AND subject = ANY (%(subjects)s)
            AND next_attempt_at <= now()))
        AND deliver_at <= now() AND parked_id <> ALL (%(in_memory)s)
      ORDER BY deliver_at, id LIMIT %(limit)s) AS since
ORDER BY deliver_at, id
"""

# Sizes are summed in the database, and only bodies that fit are fetched: up to the first that
# reaches the limit, so that one body of any size is
WITHIN = """
SELECT * FROM (
    SELECT m.*, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS bytes FROM ({rows}) AS m
) AS m WHERE %(bytes)s::bigint IS NULL OR bytes - size < %(bytes)s
"""
NEXT_WITHIN = WITHIN.format(rows=NEXT)
LANES_WITHIN = WITHIN.format(rows=LANES)
DELAYED_WITHIN = WITHIN.format(rows=DELAYED)

# A shard with fewer messages than a batch is not searched. For each transaction: does every message
# before it have a lower id than all messages from it on, and how many messages are before it?
FIND_CUTS = f"""
SELECT shard, array_agg(txid::text ORDER BY txid) FROM (
    SELECT shard, min(txid) AS txid FROM (
        SELECT c.shard, txid, max(max(id)) OVER before < min(min(id)) OVER after AS clean,
               (sum(count(*)) OVER before)::bigint / %(rows)s AS part
        FROM (SELECT *, %(now)s::pg_snapshot AS now FROM {IN_HAND} AS c
              WHERE EXISTS (
                  SELECT FROM saf.inbox i
                  WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done)
                  OFFSET %(rows)s)) AS c
        CROSS JOIN LATERAL ({since_shown()}) AS since
        WHERE {IN_BATCH.format(open="c.now")} AND {OF_SERVICE}
        GROUP BY c.shard, txid
        WINDOW before AS (PARTITION BY c.shard ORDER BY txid
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
               after AS (PARTITION BY c.shard ORDER BY txid
                         ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)
    ) AS one WHERE clean AND part >= 1 GROUP BY shard, part
) AS cut GROUP BY shard
"""


# A sum of counts is a numeric: only as an integer, it is divided into parts of many transactions
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


def next_messages(
    connection: psycopg.Connection[Any],
    reader: Reader,
    places: Sequence[Place],
    limit: int,
    *,
    each: int | None = None,
    max_bytes: int | None = None,
    converses: bool = False,
    behind: bool = False,
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """Read the next messages of shards; return their rows, and the shards that have no more.

    The rows come shard by shard, in the order of ``places``, each shard's in order.

    Args:
        connection: of the reader.
        reader: the subscription.
        places: where to read on, for each shard.
        limit: number of messages to read at most.
        each: number of messages to read per shard at most; None: ``limit``.
        max_bytes: reading stops once the bodies reach this size; None: unlimited.
        converses: leave out the bodies of fragments, which are then copied in the database.
        behind: mark messages whose keys already wait (`BEHIND`).

    Raises:
        Restored: a backup was restored over existing rows, or the sequence was set back.
    """
    if not places:
        return [], set()
    params = {
        **dict(zip(Place._fields, map(list, zip(*places, strict=True)), strict=False)),
        "subscription_id": reader.subscription_id,
        "service": reader.service,
        "converses": converses,
        "behind": behind,
        "each": limit if each is None else each,
        "limit": limit,
        "bytes": max_bytes,
    }
    rows = _rows(connection, NEXT if max_bytes is None else NEXT_WITHIN, params)
    refuse_doubled(connection, rows)
    last = len(places) + 1
    if len(rows) == limit or (max_bytes is not None and rows and rows[-1][-1] >= max_bytes):
        # the last shard read may have more messages, and the shards after it were not read
        last = rows[-1][_PLACE_AT] if rows else 0
    complete = {place.shard for number, place in enumerate(places, start=1) if number < last}
    if each is not None:
        counts = Counter(map(itemgetter(SHARD), rows))
        complete -= {shard for shard, number in counts.items() if number == each}
    return rows, complete


def of_lanes(
    connection: psycopg.Connection[Any],
    reader: Reader,
    lanes: Sequence[str],
    each: int,
    max_bytes: int | None = None,
) -> dict[str, list[tuple[Any, ...]]]:
    """Read the first messages of keys' lanes, at most ``each`` per lane, in order.

    Reading stops once the bodies reach ``max_bytes``; lanes that were not read are left out.
    """
    params = {
        "subscription_id": reader.subscription_id,
        "lanes": list(lanes),
        "each": each,
        "bytes": max_bytes,
    }
    rows = _rows(connection, LANES_WITHIN, params)
    last = len(lanes)
    if max_bytes is not None and rows and rows[-1][-1] >= max_bytes:
        last = rows[-1][-2]
    found: dict[str, list[tuple[Any, ...]]] = {lane: [] for lane in lanes[:last]}
    for row in rows:
        found[lanes[row[-2] - 1]].append(row)
    return found


def delayed(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Iterable[int],
    limit: int,
    *,
    in_memory: Iterable[int] = (),
    max_bytes: int | None = None,
    behind: bool = False,
) -> list[tuple[Any, ...]]:
    """Read messages of shards whose deliver_at has come, by that time; not those ``in_memory``.

    For the arguments, see `next_messages`; ``in_memory`` are ids in saf.parked.
    """
    params = {
        "subscription_id": reader.subscription_id,
        "subjects": [str(shard) for shard in shards],
        "in_memory": list(in_memory),
        "behind": behind,
        "limit": limit,
        "bytes": max_bytes,
    }
    return _rows(connection, DELAYED_WITHIN, params)


def read(
    connection: psycopg.Connection[Any], hand: Hand, shards: Iterable[int], limit: int
) -> None:
    """Read the next messages of the shards, up to ``limit``, and move the shards past them."""
    numbers = list(shards)
    late = [shard for shard in hand.late if shard in numbers]
    for row in delayed(connection, hand.reader, late, limit) if late else ():
        hand.take(Received(row, row[PARKED_AT]), row[FATE_AT])
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
    for row in of_lanes(connection, hand.reader, [lane], limit)[lane]:
        message = Received(row, row[PARKED_AT], 1 if hand.messages else attempt)
        hand.take(message, row[FATE_AT])


def read_log(
    connection: psycopg.Connection[Any],
    hand: Hand,
    shards: Sequence[int],
    limit: int,
    max_bytes: int | None = None,
) -> tuple[list[tuple[Any, ...]], set[int]]:
    """Read the next messages of shards in hand, as `next_messages` does."""
    places = [hand.shards[number].place for number in shards]
    converses = hand.reader.converses
    return next_messages(
        connection, hand.reader, places, limit, max_bytes=max_bytes, converses=converses
    )


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


def _rows(
    connection: psycopg.Connection[Any], query: str, params: dict[str, Any]
) -> list[tuple[Any, ...]]:
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        return cursor.execute(query, params, binary=True).fetchall()


def _order(message: Received) -> tuple[bool, int]:
    """Return a sort key: delayed messages come first, as they were read; the others by id."""
    return (True, message.id) if message.parked_id is None else (False, 0)
