"""The shards that each receiver of a subscription has in hand, and the reads from them.

Receivers read the inbox by the mechanism of `saf.log.cursor`, with one difference. A consumer's
work and its position commit in one transaction of one database, so that transaction can own the
shards as well. It locks their cursors (FOR UPDATE SKIP LOCKED), reads, works, and moves them:

    claim      lock the cursors of shards with new messages, as few as are needed
    read       read the next messages of those shards, by one query
    move       write the position, or done = open, for all of them

No other receiver gets messages of these shards in that time, so a key is never in two hands. A
receiver that dies loses its locks: its shards are free immediately, at their old positions. Leases,
owners and epochs are not needed, and nothing must be fenced: a transaction that has ended cannot
write.

*Members.* A reader may also be a member (`saf.log.shards`), for the state that it keeps in memory
between deliveries. A member claims the shards that it owns; other readers claim shards without an
owner. The statement that locks a shard also checks its owner, so the owner cannot change until the
transaction ends.

*Whose transaction died?* A transaction that locks a row leaves its id in the row's xmax. So if a
cursor can be locked, and its xmax did not commit, the last delivery from its shard was rolled back
or died. This costs nothing, needs no second transaction, and survives any kill. The shard is then
handed out more carefully (``allowance``; see `saf.receiving.retries`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import UsageError
from saf.log.read import BEYOND
from saf.log.shards import MAX_SHARDS, NEWEST, THIS_ROW, failed, newest
from saf.receiving.ahead import progress, remember
from saf.receiving.hand import NO_IDS, Hand, Reader, Shard, without
from saf.receiving.reading import IN_HAND, find_cuts
from saf.setaside.lane import Kind

ALL_CLEAR = 256
"""From this allowance on, a shard that failed earlier is handed out like any other."""

FEWEST = 1024
"""Minimum number of messages in a batch that a fair receiver opens in a deep backlog."""

# Each statement must see everything committed before it, because the cursors' snapshots do. JIT is
# off because the estimates for a ring's slots are rough, and compiling takes longer than running.
# Parameters are arrays, some with NULLs.
BEGIN = (
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL jit = off; "
    "SET LOCAL array_nulls = on"
)

# For transactions that hold nothing of the application's. Statements that run again and again are
# planned once, because planning takes longer than running. Plans use the indexes, because a slot
# that is empty at planning time may be large a moment later.
PLAN_ONCE = """
SET LOCAL jit = off; SET LOCAL plan_cache_mode = force_generic_plan;
SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off
"""

# Like PLAN_ONCE within a transaction of the application's, whose own settings are restored after it
_SETTINGS = ("plan_cache_mode", "enable_seqscan", "enable_bitmapscan")
REMEMBER = "SELECT " + ", ".join(
    f"set_config('saf.{name}', current_setting('{name}'), true)" for name in _SETTINGS
)
AS_BEFORE = "SELECT " + ", ".join(
    f"set_config('{name}', current_setting('saf.{name}'), true)" for name in _SETTINGS
)

# Waits here, within a bound, for sessions that have locked a table. Sessions that request such a
# lock later wait for this transaction. The rest of the transaction is the application's, with its
# own bounds; a lock timeout that it sets applies here too.
MEET = """
SELECT set_config('saf.lock_timeout', current_setting('lock_timeout'), true),
       CASE WHEN current_setting('lock_timeout') = '0'
            THEN set_config('lock_timeout', '{milliseconds}', true) END;
SELECT FROM saf.cursor WHERE false FOR UPDATE;
SELECT FROM ONLY saf.inbox WHERE false;
SELECT FROM saf.parked, saf.backoff WHERE false;
SELECT set_config('lock_timeout', current_setting('saf.lock_timeout'), true)
"""

# ORDER BY txid makes the planner use the index. Without it, the planner may choose to scan the
# whole table, hoping to meet a row early.
NEW = """(
    SELECT i.txid FROM saf.inbox i WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done)
    ORDER BY i.txid LIMIT 1) IS NOT NULL
OR EXISTS (
    SELECT FROM saf.inbox i
    WHERE i.shard = c.shard AND i.txid = ANY (ARRAY(SELECT pg_snapshot_xip(c.done))))"""

# Outside the part that locks: only there do the columns have their old values
FAILED = failed("touched")

# In random order, so that receivers seldom meet and no shard is always the last. The join locks
# rows one by one until enough messages are counted; the other rows stay for other receivers. A
# shard without messages for this service counts as one message and is skipped. A shard's owner, and
# whether it is handed out with care, are checked again when its row is locked.
LOCK = f"""
SELECT f.shard, f.done, f.open, f.position, f.xmax AS touched, random() AS turn
FROM (
    SELECT subscription_id, shard, batch FROM {NEWEST} AS c
    WHERE allowance IS NULL AND owner IS NOT DISTINCT FROM %(owner)s
      AND (%(only)s::smallint IS NULL OR c.shard = %(only)s)
      AND (open IS NOT NULL OR {NEW} OR EXISTS (
          SELECT FROM saf.backoff b
          WHERE b.subscription_id = c.subscription_id AND b.destination = ''
            AND b.kind = '{Kind.LATER}' AND b.subject = c.shard::text
            AND b.next_attempt_at <= now()))
) AS c
JOIN saf.cursor f USING (subscription_id, shard, batch)
WHERE f.allowance IS NULL AND f.owner IS NOT DISTINCT FROM %(owner)s
ORDER BY turn
FOR UPDATE OF f SKIP LOCKED
"""
CLAIM_SOME = f"""
SELECT shard, {FAILED}, 1, turn FROM ({LOCK} LIMIT %(shards)s) AS c
"""
CLAIM = f"""
SELECT shard, bool_or(failed), count(*), max(turn) FROM (
    SELECT c.shard, {FAILED} AS failed, turn
    FROM ({LOCK}) AS c
    LEFT JOIN LATERAL (
        SELECT FROM saf.inbox i
        WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done) AND i.id > c.position
          AND i.txid < coalesce(pg_snapshot_xmax(c.open), '9223372036854775807')
          AND (%(service)s::text IS NULL OR i.to_service = %(service)s)
        ORDER BY i.txid LIMIT %(limit)s
    ) AS one ON true
    LIMIT %(limit)s
) AS enough
GROUP BY shard
"""

# Of all services, because only the index is read
COUNT = f"""
SELECT count(*) FROM (
    SELECT FROM {IN_HAND} AS c CROSS JOIN LATERAL (
        SELECT FROM saf.inbox i
        WHERE i.shard = c.shard AND i.txid >= pg_snapshot_xmax(c.done) LIMIT %(sight)s) AS one
    LIMIT %(sight)s) AS messages
"""
CLAIM_THESE = f"""
SELECT shard, {FAILED}, 0, 0.0 FROM (
    SELECT f.shard, f.xmax AS touched
    FROM {IN_HAND} AS c
    JOIN saf.cursor f USING (subscription_id, shard, batch)
    WHERE f.allowance IS NULL AND f.owner IS NOT DISTINCT FROM %(owner)s
    FOR UPDATE OF f SKIP LOCKED
) AS c
"""
CLAIM_SHARD = f"""
SELECT shard, {FAILED}, 0, 0.0 FROM (
    SELECT f.shard, f.xmax AS touched
    FROM {newest("(VALUES (%(shard)s::smallint))")} AS c
    JOIN saf.cursor f USING (subscription_id, shard, batch)
    WHERE f.owner IS NOT DISTINCT FROM %(owner)s
    FOR UPDATE OF f SKIP LOCKED
) AS c
"""


def waits_in(shard: str) -> str:
    """Return SQL that is true if keys or delayed messages of a shard wait for a receiver."""
    return f"""(
    EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard = {shard})
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}' AND b.subject = {shard}::text))"""


_STATE = f"""
SELECT pg_current_snapshot()::text, pg_current_xact_id()::text,
       ARRAY(SELECT subject FROM saf.backoff
             WHERE subscription_id = %(subscription_id)s AND shard = ANY (%(shards)s)),
       ARRAY(SELECT s.shard FROM unnest(%(shards)s::smallint[]) AS s (shard)
             JOIN saf.backoff b ON b.subject = s.shard::text
             WHERE subscription_id = %(subscription_id)s AND destination = ''
               AND kind = '{Kind.LATER}' AND next_attempt_at <= now()),
       ARRAY(SELECT shard FROM unnest(%(shards)s::smallint[]) AS s (shard)
             WHERE {waits_in("s.shard")})
"""
_CURSORS = f"""
SELECT c.shard, c.batch, done::text, open::text, position, allowance, until::text,
       coalesce(cuts::text[], '{{}}'), epoch, coalesce(d.ids::text, '{NO_IDS}')
FROM {IN_HAND} AS c {BEYOND}
"""
# Runs after the locks are taken, so that no cursor has a later snapshot than the state's. Returns a
# row for each cursor, prefixed with the state
LOCKED = f"SELECT * FROM ({_STATE}) AS state CROSS JOIN ({_CURSORS}) AS cursor"

MOVE_CURSORS = f"""
UPDATE saf.cursor c SET
    opened_at = CASE WHEN m.batch > c.batch THEN now() ELSE c.opened_at END,
    batch = m.batch, done = m.done, open = m.open, position = m.position,
    allowance = m.allowance, until = m.until, cuts = m.cuts::xid8[]
FROM unnest(%(shard)s::smallint[], %(batch)s::bigint[], %(done)s::pg_snapshot[],
            %(open)s::pg_snapshot[], %(position)s::bigint[], %(allowance)s::int[],
            %(until)s::pg_snapshot[], %(cuts)s::text[])
     AS m (shard, batch, done, open, position, allowance, until, cuts)
JOIN {newest("unnest(%(shard)s::smallint[])")} AS n USING (shard)
WHERE {THIS_ROW} AND pg_current_xact_id() = %(transaction)s::xid8
"""

# A delivery ahead of the position may leave the position as it is. The epoch shows readers that
# have prefetched messages that some of these are complete.
MOVE_AHEAD = MOVE_CURSORS.replace("saf.cursor c SET", "saf.cursor c SET epoch = c.epoch + 1,")

TRANSACTION = "SELECT pg_current_xact_id_if_assigned()::text"

MARK = "default_transaction_read_only"
"""A setting that the server reports to its client at each change.

Set until the end of a transaction, it shows without a query that the transaction is still open. It
has no effect on the transaction in which it is set.
"""

FIELDS = ("shard", "batch", "done", "open", "position", "allowance", "until", "cuts")


def begin(lock_seconds: float) -> str:
    """Return the statements that begin a claiming transaction; sent in one round trip."""
    return f"{BEGIN};{MEET.format(milliseconds=max(1, round(lock_seconds * 1000)))}"


def claim(
    connection: psycopg.Connection[Any],
    reader: Reader,
    limit: int,
    only: int | None = None,
    batch: int = 0,
) -> Hand | None:
    """Lock free shards until they have about ``limit`` messages; None if no shard has any.

    With ``only``, lock this shard or none. Batches of a deep backlog are opened with at least
    ``batch`` messages.

    Call it in a transaction begun with `begin` and `PLAN_ONCE`, and pass the result to `move` in
    the same transaction.
    """
    params = {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "service": reader.service,
        "limit": limit,
        "only": only,
    }
    return _hand(connection, reader, fetch(connection, CLAIM, params), limit, batch)


def claim_some(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: int,
    only: int | None = None,
    batch: int = 0,
) -> Hand | None:
    """Lock up to ``shards`` free shards that have messages; otherwise as `claim`."""
    params = {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "shards": shards,
        "only": only,
    }
    return _hand(connection, reader, fetch(connection, CLAIM_SOME, params), 0, batch)


def claim_all(
    connection: psycopg.Connection[Any], reader: Reader, limit: int, sight: int
) -> Hand | None:
    """Lock free shards as `claim` does; all that have messages, if there are ``limit`` or more.

    In that case the hand is ``full``. If the shards have more than ``sight`` messages in total,
    batches of deep backlogs are opened with about that many.
    """
    params = {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "service": reader.service,
        "only": None,
        "shards": MAX_SHARDS,
    }
    locked = fetch(connection, CLAIM, params | {"limit": limit})
    if sum(messages for _, _, messages, _ in locked) < limit:
        return _hand(connection, reader, locked, limit)
    # only the first lock on a row sees the trace of a failed delivery
    failed = {shard for shard, has_failed, *_ in locked if has_failed}
    locked = fetch(connection, CLAIM_SOME, params)
    of_these = {**params, "shards": [shard for shard, *_ in locked], "sight": sight}
    ((messages,),) = fetch(connection, COUNT, of_these)
    batch = sight if messages < sight else max(FEWEST, sight // len(locked))
    locked = [(shard, now or shard in failed, *rest) for shard, now, *rest in locked]
    hand = _hand(connection, reader, locked, 0, batch)
    if hand is not None:
        hand.full = True
    return hand


def claim_these(
    connection: psycopg.Connection[Any],
    reader: Reader,
    shards: Collection[int],
    query: str,
    params: Mapping[str, Any],
) -> tuple[Hand | None, list[tuple[Any, ...]]]:
    """Lock the free ones among the shards, except those that failed; None if none is free.

    Return also the rows of a query that runs in the same round trip, after the locks. A batch is
    opened in hand for a shard without one, but not for that query.
    """
    params = {
        **params,
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "shards": sorted(shards),
    }
    with connection.pipeline():
        locking, asking, reading = (
            psycopg.Cursor(connection, row_factory=tuple_row) for _ in range(3)
        )
        locking.execute(CLAIM_THESE, params)
        asking.execute(LOCKED, params)
        reading.execute(query, params, binary=True)
    locked = locking.fetchall()
    rows = reading.fetchall()
    hand = _hand(connection, reader, locked, 1, state=asking.fetchall())
    return hand, rows


def claim_shard(
    connection: psycopg.Connection[Any], reader: Reader, shard: int, limit: int
) -> Hand | None:
    """Lock one shard, even one without messages; None if another transaction has locked it."""
    params = {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "shard": shard,
    }
    return _hand(connection, reader, fetch(connection, CLAIM_SHARD, params), limit)


def _hand(
    connection: psycopg.Connection[Any],
    reader: Reader,
    locked: list[tuple[Any, ...]],
    limit: int,
    batch: int = 0,
    *,
    state: list[tuple[Any, ...]] | None = None,
) -> Hand | None:
    """Return the locked shards; ``state`` are the rows of `LOCKED`, if they were read already."""
    if not locked:
        return None
    numbers = {shard for shard, *_ in locked}
    params = {"subscription_id": reader.subscription_id, "shards": [*numbers]}
    rows = fetch(connection, LOCKED, params) if state is None else state
    now, transaction, waiting, late, crowded, *_ = rows[0]
    # PostgreSQL counts the transaction that asks as complete, but the block may still write
    # messages
    now = without(now, int(transaction))
    shards = {
        cursor[0]: Shard(**dict(zip((*FIELDS, "epoch", "beyond"), cursor, strict=True)))
        for _, _, _, _, _, *cursor in rows
        if cursor[0] in numbers
    }
    closed = [shard for shard in shards.values() if shard.open is None]
    deep = _deep(locked, limit)
    if uncut := [shard for shard in closed if shard.shard in deep]:
        find_cuts(connection, reader, uncut, now, max(limit, batch))
    for shard in closed:
        shard.open_at(now)
    return Hand(
        reader=reader,
        transaction=transaction,
        shards=shards,
        failed=frozenset(shard for shard, failed, *_ in locked if failed),
        waiting=frozenset(waiting),
        late=late,
        crowded=frozenset(crowded),
        now=now,
        opened=frozenset(shard.shard for shard in closed),
    )


def is_marked(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a transaction that has set `MARK` is open, as far as the client was told."""
    return connection.info.parameter_status(MARK) == "on"


def _deep(locked: Sequence[tuple[Any, ...]], limit: int) -> set[int]:
    """Return the shards that may have more than ``limit`` messages, by the counts of `CLAIM`.

    If `CLAIM` counted ``limit`` messages in all, it stopped counting in the shard locked last.

    >>> _deep([(3, False, 40, 0.2), (5, False, 60, 0.7)], 100)
    {5}
    """
    deep = {shard for shard, _, messages, _ in locked if messages >= limit}
    if sum(messages for _, _, messages, _ in locked) >= limit:
        deep.add(max(locked, key=lambda row: row[-1])[0])
    return deep


def move(connection: psycopg.Connection[Any], hand: Hand, own: str = "") -> None:
    """Write the position of each shard in hand, unless it is already written.

    ``own`` is a statement that runs first, in the same round trip.

    Raises:
        UsageError: the transaction that locked the shards is over.
    """
    shards = hand.unwritten
    if not shards and hand.marked and is_marked(connection):
        return
    if not shards:
        with _after(own, connection) as cursor:
            cursor.execute(TRANSACTION)
        all_moved = cursor.fetchall() == [(hand.transaction,)]
    else:
        columns: dict[str, Any] = {
            name: [getattr(shard, name) for shard in shards] for name in FIELDS
        }
        columns["cuts"] = [f"{{{','.join(cuts)}}}" for cuts in columns["cuts"]]
        ahead = any(shard.ahead for shard in shards)
        if ahead:
            columns["position"] = [progress(shard).position for shard in shards]
        columns["subscription_id"] = hand.reader.subscription_id
        columns["transaction"] = hand.transaction
        with _after(own, connection) as cursor:
            cursor.execute(MOVE_AHEAD if ahead else MOVE_CURSORS, columns)
        all_moved = cursor.rowcount == len(shards)
        if ahead and all_moved:
            remember(connection, hand.reader, shards)
    if not all_moved:
        raise UsageError(
            "the transaction of this delivery was committed or rolled back inside of its block: "
            "leave that to saf.receive"
        )


@contextmanager
def _after(
    own: str, connection: psycopg.Connection[Any]
) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
    """Yield a cursor whose one statement is sent together with ``own``; both run at the end."""
    cursor = psycopg.Cursor(connection, row_factory=tuple_row)
    if not own:
        yield cursor
        return
    with connection.pipeline():
        psycopg.Cursor(connection).execute(own)
        yield cursor
