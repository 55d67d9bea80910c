"""Receivers of one subscription: which shards each has in hand, and what it reads of them.

Receivers read the inbox by the mechanism of `saf.log.cursor`, with one difference. A consumer's
work and its position commit in one transaction of one database, so that transaction can own the
shards as well. It locks their cursors (FOR UPDATE SKIP LOCKED), reads, works, and moves them:

    claim      lock the cursors of shards that have something new, and no more than are needed
    read       read the next messages of those shards, by one query
    move       write the position, or done = open, for all of them

Nobody else gets a message of these shards meanwhile, so a key is never in two hands. A receiver
that dies loses its locks: its shards are free at once, at the position that they had. There is no
lease, owner or epoch, and nothing to fence: a transaction that is gone cannot write.

*Members.* A reader may also be a member (`saf.log.shards`), for what it keeps in memory between
deliveries. A member claims the shards that it owns; other readers claim those that nobody owns.
The statement that locks a shard also checks its owner, so the owner cannot change until the
transaction ends.

*Whose transaction died?* A transaction that locks a row leaves its id in the row's xmax. So if a
cursor can be locked, and its xmax did not commit, the last delivery from its shard was rolled back
or died. This costs nothing, needs no second transaction, and survives any kill. The shard is then
handed out more carefully (``allowance``; see `saf.receiving.retries`).

*Deep backlogs.* Rows are ordered by id, but only (shard, txid) is indexed, so a read sorts what is
left of a shard's batch. A batch need not reach up to now: it may end at a transaction id X if every
message of the shard from X on has a higher id than every message before X (a clean cut). That is
as if the snapshot had been taken earlier, and the order by id is kept. A deep shard is searched
once for such cuts (``cuts``). Its batches are then opened from one cut to the next, up to the
snapshot for which the cuts were found (``until``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch
from saf.errors import UsageError
from saf.limits import READABLE
from saf.log.shards import NEWEST, THIS_ROW, failed, newest
from saf.message import FRAGMENT
from saf.received import EXPRESSIONS, ID, READ, SHARD, Received, expressions
from saf.setaside.lane import Kind

if TYPE_CHECKING:
    from saf.signing.signer import Signer

CUT_ROWS, CUTS = 250, 64
"""A batch of a deep backlog holds at least the first number of messages; the second is how many
cuts are found ahead."""

ALL_CLEAR = 256
"""From this allowance on, a shard that had failed is handed out like any other."""

# Each statement must see what was committed before it, because the cursors' snapshots do. JIT is
# off because the estimates for a ring's slots are rough, and compiling takes longer than running.
BEGIN = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL jit = off"

# Waits here, within a bound, for whoever has locked a table. Whoever asks for such a lock later
# waits for this transaction. The rest of the transaction is the application's, with its own bounds;
# a bound for locks that it sets holds here too.
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

# Outside of the part that locks, because only there the columns are as they were before
FAILED = failed("touched")

# In random order, so that receivers seldom meet and no shard is always the last. The join locks
# rows one by one until enough messages are counted; the other rows stay for other receivers. A
# shard that has no message for this service counts as one message, and is passed by. The owner of
# a shard, and whether it is handed out with care, are checked again as its row is locked.
CLAIM = f"""
SELECT shard, bool_or(failed), count(*) FROM (
    SELECT c.shard, {FAILED} AS failed
    FROM (
        SELECT f.shard, f.done, f.open, f.position, f.xmax AS touched
        FROM (
            SELECT subscription_id, shard, batch FROM {NEWEST} AS c
            WHERE allowance IS NULL AND owner IS NOT DISTINCT FROM %(owner)s
              AND (open IS NOT NULL OR {NEW} OR EXISTS (
                  SELECT FROM saf.backoff b
                  WHERE b.subscription_id = c.subscription_id AND b.destination = ''
                    AND b.kind = '{Kind.LATER}' AND b.subject = c.shard::text
                    AND b.next_attempt_at <= now()))
        ) AS c
        JOIN saf.cursor f USING (subscription_id, shard, batch)
        WHERE f.allowance IS NULL AND f.owner IS NOT DISTINCT FROM %(owner)s
        ORDER BY random()
        FOR UPDATE OF f SKIP LOCKED
    ) AS c
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

CLAIM_SHARD = f"""
SELECT shard, {FAILED}, 0 FROM (
    SELECT f.shard, f.xmax AS touched
    FROM {newest("(VALUES (%(shard)s::smallint))")} AS c
    JOIN saf.cursor f USING (subscription_id, shard, batch)
    WHERE f.owner IS NOT DISTINCT FROM %(owner)s
    FOR UPDATE OF f SKIP LOCKED
) AS c
"""

# Runs after the locks are taken, so that no cursor has a later snapshot than this one
STATE = f"""
SELECT pg_current_snapshot()::text, pg_current_xact_id()::text,
       ARRAY(SELECT subject FROM saf.backoff
             WHERE subscription_id = %(subscription_id)s AND shard = ANY (%(shards)s)),
       ARRAY(SELECT s.shard FROM unnest(%(shards)s::smallint[]) AS s (shard)
             JOIN saf.backoff b ON b.subject = s.shard::text
             WHERE subscription_id = %(subscription_id)s AND destination = ''
               AND kind = '{Kind.LATER}' AND next_attempt_at <= now())
"""
IN_HAND = newest("unnest(%(shards)s::smallint[])")
CURSORS = f"""
SELECT shard, batch, done::text, open::text, position, allowance, until::text,
       coalesce(cuts::text[], '{{}}'), epoch
FROM {IN_HAND} AS c
"""

# Fates of a message. NOW: it can be handed out; a message of a dialog only if it is its turn
NOW, LATE, EXPIRED, SPOKEN, UNREAD = 0, 1, 2, 3, 4
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


FIELDS = ("shard", "batch", "done", "open", "position", "allowance", "until", "cuts")


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Who reads: a subscription of the inbox, and the member that reads for it, if there is one."""

    subscription_id: int
    name: str
    service: str | None
    owner: UUID | None = None
    """The member that reads: it claims its own shards only. None: claims those that nobody owns."""
    types: Collection[str | None] | None = None
    """The types of messages that it has handlers for; None: it takes all."""
    signer: Signer | None = None
    """Signs what is said on the dialogs of its messages."""

    @property
    def converses(self) -> bool:
        """Whether it is an end of dialogs. A service's own subscription is; others listen in."""
        return self.name == self.service


@dataclass(kw_only=True)
class Shard:
    """The cursor of a shard in hand; `move` writes it. Snapshots are held as text."""

    shard: int
    batch: int
    done: str
    open: str | None
    position: int
    allowance: int | None
    until: str | None
    """The snapshot for which ``cuts`` were found."""
    cuts: list[str]
    """Transaction ids at which the next batches may end, in order."""
    epoch: int
    closed: tuple[int, str, str, str | None, list[str]] | None = None
    """The batch that was closed last, with what `reopen` needs to know of it."""

    def open_at(self, snapshot: str) -> None:
        """Open a batch: up to the next cut, or up to the snapshot if there is no cut."""
        self.batch += 1
        if self.cuts:
            self.until = self.until or snapshot
            self.open = cut(self.until, int(self.cuts.pop(0)))
        else:
            self.until, self.open = None, snapshot

    def close(self) -> None:
        """Close the batch, which is complete."""
        assert self.open is not None  # noqa: S101 - only what is open is closed
        self.closed = self.batch, self.done, self.open, self.until, [*self.cuts]
        self.done, self.open, self.position = self.open, None, 0
        if self.until is not None and self.cuts:
            self.open_at(self.until)
        else:
            self.until = None

    def reopen(self, position: int) -> None:
        """Go back in the batch that was read: only what is up to the position is complete."""
        if self.closed is not None:
            self.batch, self.done, self.open, self.until, self.cuts = self.closed
        self.position = position


@dataclass(kw_only=True)
class Hand:
    """The shards that this transaction has locked, and what was read of them."""

    reader: Reader
    transaction: str
    """The id of the transaction that has locked them."""
    shards: dict[int, Shard]
    failed: frozenset[int]
    """The shards whose last delivery did not come to its end."""
    waiting: frozenset[str]
    """The lanes of keys in these shards that wait."""
    late: list[int]
    """The shards with delayed messages whose time has come."""
    messages: list[Received] = field(default_factory=list)
    """The messages to hand out, in order."""
    aside: dict[int, list[Received]] = field(
        default_factory=lambda: {LATE: [], EXPIRED: [], UNREAD: []}
    )
    """The messages not to hand out now, by their fate."""
    spoken: bool = False
    """Whether any of the messages belongs to a dialog."""

    @property
    def all(self) -> list[Received]:
        """Every message that was read."""
        return [*self.messages, *(one for some in self.aside.values() for one in some)]

    def take(self, message: Received, fate: int) -> None:
        """Add a message to the others that have the same fate."""
        self.spoken = self.spoken or fate == SPOKEN
        self.aside.get(fate, self.messages).append(message)


def begin(lock_seconds: float) -> str:
    """The statements that begin a transaction which claims shards; sent in one round trip."""
    return f"{BEGIN};{MEET.format(milliseconds=max(1, round(lock_seconds * 1000)))}"


def claim(connection: psycopg.Connection[Any], reader: Reader, limit: int) -> Hand | None:
    """Lock free shards until they have about ``limit`` messages; None if none has any.

    Call it in a transaction begun with `begin`, and pass the result to `move` in the same
    transaction.
    """
    params = {
        "subscription_id": reader.subscription_id,
        "owner": reader.owner,
        "service": reader.service,
        "limit": limit,
    }
    return _hand(connection, reader, fetch(connection, CLAIM, params), limit)


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
) -> Hand | None:
    if not locked:
        return None
    params = {
        "subscription_id": reader.subscription_id,
        "service": reader.service,
        "shards": [shard for shard, *_ in locked],
    }
    ((now, transaction, waiting, late),) = fetch(connection, STATE, params)
    # PostgreSQL counts the asking transaction as complete, but the block may yet write messages
    now = without(now, int(transaction))
    shards = {
        row[0]: Shard(**dict(zip((*FIELDS, "epoch"), row, strict=True)))
        for row in fetch(connection, CURSORS, params)
    }
    closed = [shard for shard in shards.values() if shard.open is None]
    if closed and sum(count for *_, count in locked) >= limit:
        params |= {"shards": [shard.shard for shard in closed], "now": now}
        params["rows"] = max(limit, CUT_ROWS)
        for number, cuts in fetch(connection, FIND_CUTS, params):
            shards[number].cuts = cuts[:CUTS]
    for shard in closed:
        shard.open_at(now)
    return Hand(
        reader=reader,
        transaction=transaction,
        shards=shards,
        failed=frozenset(shard for shard, failed, _ in locked if failed),
        waiting=frozenset(waiting),
        late=late,
    )


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


def move(connection: psycopg.Connection[Any], hand: Hand) -> None:
    """Write the position of each shard in hand.

    Raises:
        UsageError: the transaction that locked the shards is over.
    """
    columns: dict[str, Any] = {
        name: [getattr(shard, name) for shard in hand.shards.values()] for name in FIELDS
    }
    columns["cuts"] = [f"{{{','.join(cuts)}}}" for cuts in columns["cuts"]]
    columns["subscription_id"] = hand.reader.subscription_id
    columns["transaction"] = hand.transaction
    if psycopg.Cursor(connection).execute(MOVE_CURSORS, columns).rowcount < len(hand.shards):
        raise UsageError(
            "the transaction of this delivery was committed or rolled back inside of its block: "
            "leave that to saf.receive"
        )


def _order(message: Received) -> tuple[bool, int]:
    """A sort key: delayed messages come first, as they were read; the others come by id."""
    return (True, message.id) if message.parked_id is None else (False, 0)


def cut(snapshot: str, txid: int) -> str:
    """Return the part of a snapshot that lies before a transaction.

    >>> cut("10:20:10,15", 12), cut("10:20:10,15", 17), cut("18:20:18", 17)
    ('10:12:10', '10:17:10,15', '17:17:')
    """
    running = [number for number in snapshot.split(":")[2].split(",") if number]
    before = [number for number in running if int(number) < txid]
    return f"{before[0] if before else txid}:{txid}:{','.join(before)}"


def without(snapshot: str, txid: int) -> str:
    """Return a snapshot in which one transaction counts as still in progress.

    >>> without("10:20:10,15", 12), without("20:20:", 19), without("20:20:", 25)
    ('10:20:10,12,15', '19:20:19', '20:20:')
    """
    first, end, running = snapshot.split(":")
    if txid >= int(end):
        return snapshot
    numbers = sorted({int(number) for number in running.split(",") if number} | {txid})
    return f"{min(int(first), txid)}:{end}:{','.join(map(str, numbers))}"
