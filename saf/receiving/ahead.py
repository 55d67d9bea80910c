"""Messages taken ahead of the position: chosen messages of an open batch, complete before others.

A shard's position says that every message of the batch up to it is complete. A reader may also
complete messages beyond the position: saf.dispatched keeps their ids, and every reader leaves them
out. Dispatchers do so because endpoints answer in any order. Receivers do so to hand out messages
in an order of their own, such as a fair one (`saf.receiving.fair`):

    claim       lock the cursors of the shards, by any claim of `saf.receiving.claim`
    `take`      read the chosen messages that are still incomplete, and note them in the hand
    …           the consumer's work, and the outcomes of the messages
    move        `saf.receiving.claim.move` writes position and ids, and commits with the work

The choice itself may be older than the locks, because `take` compares it with the locked cursors:
a message that another receiver has completed since is not handed out again. Only the order within
a key is the caller's duty: of each key, it must choose the first incomplete messages of the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from saf.log.read import BEYOND, IN_BATCH
from saf.received import WITH_READABLE, Received, expressions
from saf.receiving.hand import NO_IDS, Hand, Reader, Shard
from saf.receiving.reading import BODY, FATE, FATE_AT, IN_HAND, OF_SERVICE, refuse_doubled

# Rows of a shard are found by their transactions, because only these are indexed. Comparing with
# the first and the last id is cheaper than with each. OFFSET 0 keeps the planner from reading whole
# batches.
_CHOSEN = f"""
SELECT m.*
FROM ({{cursors}}) AS c
JOIN (SELECT shard, txid, min(id) AS first, max(id) AS last, array_agg(id) AS ids
      FROM unnest(%(of)s::smallint[], %(txid)s::xid8[], %(id)s::bigint[])
          AS chosen (shard, txid, id)
      GROUP BY shard, txid) AS g USING (shard)
CROSS JOIN LATERAL (
    SELECT {expressions(body=BODY)}, {FATE}
    FROM (SELECT {WITH_READABLE} FROM saf.inbox r
          WHERE r.shard = c.shard AND r.txid = g.txid AND r.id BETWEEN g.first AND g.last
            AND r.id = ANY (g.ids) AND NOT pg_visible_in_snapshot(txid, c.done)
            AND {IN_BATCH.format(open="c.open")} AND {OF_SERVICE} AND id > c.after
            AND NOT id <@ c.beyond OFFSET 0) AS since
) AS m
"""
CHOSEN = _CHOSEN.replace(
    "{cursors}",
    """
SELECT * FROM unnest(%(shard)s::smallint[], %(done)s::pg_snapshot[], %(open)s::pg_snapshot[],
                     %(after)s::bigint[], %(beyond)s::int8multirange[])
    AS place (shard, done, open, after, beyond)""",
)
CHOSEN_AS_STORED = _CHOSEN.replace(
    "{cursors}",
    f"""
SELECT c.shard, done, open, position AS after, coalesce(d.ids, '{NO_IDS}') AS beyond
FROM {IN_HAND} AS c {BEYOND} WHERE open IS NOT NULL""",
)
"""SQL: as `CHOSEN`, by the stored cursors, which are those in hand if none was changed since."""

# Earlier rows for the same batch stay valid: they may have ids that were not read yet
REMEMBER = """
INSERT INTO saf.dispatched AS d (subscription_id, shard, batch, ids)
SELECT %(subscription_id)s, shard, batch, ids
FROM unnest(%(shard)s::smallint[], %(batch)s::bigint[], %(ids)s::int8multirange[])
    AS m (shard, batch, ids)
ON CONFLICT (subscription_id, shard) DO UPDATE SET
    batch = excluded.batch,
    ids = CASE WHEN d.batch = excluded.batch THEN d.ids + excluded.ids ELSE excluded.ids END
          * (SELECT int8multirange(int8range(c.position, NULL, '()')) FROM saf.cursor c
             WHERE c.subscription_id = excluded.subscription_id AND c.shard = excluded.shard
               AND c.batch = excluded.batch)
"""


class Chosen(NamedTuple):
    """Where a message is that was chosen: its shard, the transaction that wrote it, and its id."""

    shard: int
    txid: int
    id: int


class Progress(NamedTuple):
    """A shard's position, and ranges of complete ids beyond it; both ends belong to a range."""

    position: int
    ranges: list[tuple[int, int]]


def take(connection: psycopg.Connection[Any], hand: Hand, chosen: Iterable[Chosen]) -> None:
    """Read chosen messages of the open batches of shards in hand, and take them in hand.

    Messages that are complete are left out, and so are those of shards that are not in hand or have
    no open batch. The shards' positions stay until `saf.receiving.claim.move` writes them. Messages
    keep their fates: an expired one becomes a dead letter, for example.

    Raises:
        Restored: a backup was restored over existing rows, or the sequence was set back.
    """
    places = [shard.place for shard in hand.shards.values() if shard.open is not None]
    known = {place.shard for place in places}
    wanted = [one for one in chosen if one.shard in known]
    if not wanted:
        return
    params = {
        "shard": [place.shard for place in places],
        "done": [place.done for place in places],
        "open": [place.open for place in places],
        "after": [place.after for place in places],
        "beyond": [place.beyond for place in places],
        **params_of(hand.reader, wanted),
    }
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        rows = cursor.execute(CHOSEN, params, binary=True).fetchall()
    take_rows(connection, hand, rows)


def params_of(reader: Reader, chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Return the parameters of `CHOSEN` that name the messages."""
    return {
        "of": [one.shard for one in chosen],
        "txid": [str(one.txid) for one in chosen],
        "id": [one.id for one in chosen],
        "service": reader.service,
        "converses": reader.converses,
    }


def take_rows(
    connection: psycopg.Connection[Any], hand: Hand, rows: Sequence[tuple[Any, ...]]
) -> None:
    """Take rows of `CHOSEN` in hand, of shards in hand.

    Raises:
        Restored: as `take`.
    """
    refuse_doubled(connection, rows)
    taken: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        message = Received(row)
        hand.take(message, row[FATE_AT])
        taken[message.shard].append(message.id)
    for number, ids in taken.items():
        shard = hand.shards[number]
        shard.ahead, shard.taken = True, sorted([*shard.taken, *ids])
    # delayed messages, which were parked, stay first
    hand.messages.sort(key=lambda message: (message.parked_id is None, message.id))


def progress(shard: Shard) -> Progress:
    """Return a shard's progress once the messages that were taken are complete.

    Where the incomplete messages of the batch are known, the position rises up to the first of
    them, and a range reaches from one to the next.

    >>> shard = Shard(shard=1, batch=1, position=10, ahead=True, taken=[20, 40, 44], left=None)
    >>> progress(shard)
    Progress(position=10, ranges=[(20, 20), (40, 40), (44, 44)])
    >>> shard.left = [31, 50]
    >>> progress(shard)
    Progress(position=30, ranges=[(32, 49)])
    >>> shard.left = [31]
    >>> progress(shard)
    Progress(position=30, ranges=[(32, 40), (32, 44)])
    >>> shard.left = []
    >>> progress(shard)
    Progress(position=44, ranges=[])
    """
    position, left = shard.position, shard.left
    if not shard.ahead or shard.closed is not None:
        return Progress(position, [])
    if left is None:
        return Progress(position, [(id_, id_) for id_ in shard.taken])
    position = max(position, left[0] - 1 if left else max(shard.taken, default=0))
    ranges: dict[tuple[int, int], None] = {}
    for id_ in shard.taken:
        if id_ > position:
            above = bisect_left(left, id_)
            last = left[above] - 1 if above < len(left) else id_
            ranges[left[above - 1] + 1 if above else id_, last] = None
    return Progress(position, [*ranges])


def remember(connection: psycopg.Connection[Any], reader: Reader, shards: Iterable[Shard]) -> None:
    """Write the complete ids beyond the positions of shards, whose cursors are written already."""
    ids = {}
    for shard in shards:
        if ranges := progress(shard).ranges:
            parts = ",".join(f"[{first},{last}]" for first, last in ranges)
            ids[shard.shard, shard.batch] = f"{{{parts}}}"
    write(connection, reader, ids)


def write(
    connection: psycopg.Connection[Any], reader: Reader, ids: Mapping[tuple[int, int], str]
) -> None:
    """Write complete ids, as int8multiranges, by shard and batch; the cursors are written."""
    if ids:
        params = {
            "subscription_id": reader.subscription_id,
            "shard": [shard for shard, _ in ids],
            "batch": [batch for _, batch in ids],
            "ids": [*ids.values()],
        }
        connection.execute(REMEMBER, params)
