"""Prefetching: a receiver reads messages of a shard ahead of their deliveries.

Claiming shards, looking for new messages and reading cost the same for one message as for a
thousand. So while a backlog exists, a receiver reads ahead, as kernels do with files: after each
full delivery, more. It opens the batches of some shards, reads them, and releases the shards.
Nothing stays locked, and no other receiver is blocked.

The messages read stay valid, because a batch never changes. The shard's position may change. So a
delivery of prefetched messages begins with one statement, `TAKE`, which compares and sets: it moves
the cursor past the messages if the cursor is still at their beginning, in the same batch, with the
same owner, and not locked. Otherwise `TAKE` does nothing, and the shard's prefetched messages are
discarded. If two receivers have prefetched the same messages, only one delivers them.

    take       move the position past the messages, if it is unchanged
    …          the consumer's work
    settle     write the messages set aside, and close the batch if it is complete
    commit

The position is written first and not last, so the transaction's id is in the row's xmax while the
messages are handled. That makes a receiver's death visible, as `saf.receiving.claim` explains.

*Exceptions.* Messages that are delayed, expired or too large to read end a shard's prefetch; `TAKE`
checks the clock again for messages that expire. A shard in which keys or delayed messages wait, or
whose last delivery failed, is claimed instead, for as many messages as would have been prefetched;
`TAKE` checks again whether any wait. New lanes come from two sources: the transaction that has the
shard in hand, out of messages that move the position or out of existing lanes; and an operator who
retries a dead letter.

A receiver continues with a shard that it has begun, because opening the first batch of a deep
backlog means searching through it. After `STAY_SECONDS` it gives the shard up, so that other shards
have a turn. Memory is bounded by a number of messages and of bytes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from saf.log.shards import failed
from saf.received import ID, READ, SHARD, Received
from saf.receiving import claim, reading
from saf.receiving.claim import MARK, waits_in
from saf.receiving.hand import NOW, SPOKEN, Hand, Reader, Shard
from saf.receiving.reading import FATE_AT

EXPIRES_AT = READ.index("expires_at")

FEWEST, MOST = 1024, 4096
"""Maximum number of prefetched messages, for deliveries of one message and for large deliveries."""
MOST_BYTES = 8 << 20
"""Maximum size of all prefetched bodies together, in bytes; the last body may exceed it."""
STAY_SECONDS = 1.0
"""Seconds for which a receiver stays with the shards that it prefetches from."""
DELIVERIES = 16
"""Number of deliveries to prefetch messages for, between `FEWEST` and `MOST` messages."""
GROWTH = 4
"""Factor by which prefetching grows after each full read."""

# A delivery needs only this statement, so it must be quick: it finds rows by key, then by place. It
# locks before it writes, to skip rows that others have in hand. A failure of the last delivery is
# visible only before the lock.
TAKE = """
WITH n AS MATERIALIZED (
    SELECT f.ctid AS place, m.position
    FROM {prefetched} AS m (shard, batch, epoch, was, position, expires_at)
    JOIN saf.cursor f ON f.subscription_id = %(subscription_id)s
                     AND f.shard = m.shard AND f.batch = m.batch
    WHERE f.position = m.was AND f.epoch = m.epoch AND f.open IS NOT NULL AND f.allowance IS NULL
      AND f.owner IS NOT DISTINCT FROM %(owner)s::uuid
      AND {failed} IS NOT TRUE AND (now() < m.expires_at) IS NOT FALSE AND NOT {waits}
    FOR UPDATE OF f SKIP LOCKED
)
UPDATE saf.cursor c SET position = n.position FROM n WHERE c.ctid = n.place
RETURNING c.shard, pg_current_xact_id()::text, set_config('{mark}', 'on', true)
"""
_PARTS = {"mark": MARK, "failed": failed("f.xmax")}
TAKE_ONE = TAKE.format(
    prefetched="""(VALUES (%(shard)s::smallint, %(batch)s::bigint, %(epoch)s::bigint,
                  %(was)s::bigint, %(position)s::bigint, %(expires_at)s::timestamptz))""",
    waits=waits_in("%(shard)s::smallint"),
    **_PARTS,
)
TAKE_SOME = TAKE.format(
    prefetched="""unnest(%(shard)s::smallint[], %(batch)s::bigint[], %(epoch)s::bigint[],
                %(was)s::bigint[], %(position)s::bigint[], %(expires_at)s::timestamptz[])""",
    waits=waits_in("f.shard"),
    **_PARTS,
)


@dataclass(kw_only=True)
class Prefetched:
    """Messages read from one shard and not delivered yet."""

    shard: Shard
    """The shard's cursor before the first message."""
    rows: list[tuple[Any, ...]]
    """The messages, as they were read. Empty if the shard is claimed instead."""
    whole: bool
    """True if the batch ends with these messages."""
    messages: int
    """Number of messages to deliver before another shard has its turn."""

    def next(self, limit: int) -> Next:
        """Move the cursor past the first ``limit`` messages and return them."""
        shard, rows = self.shard, self.rows[:limit]
        before = shard.shard, shard.batch, shard.epoch, shard.position
        shard.position = rows[-1][ID]
        self.rows = self.rows[limit:]
        if self.whole and not self.rows:
            shard.close()
        return Next(self, rows, before, rows[-1][ID])


class Next(NamedTuple):
    """The next messages of a shard, about to be delivered."""

    prefetched: Prefetched
    rows: list[tuple[Any, ...]]
    before: tuple[int, int, int, int]
    """Shard, batch, epoch, and the position before the messages."""
    position: int
    """The position after them."""

    @property
    def params(self) -> tuple[Any, ...]:
        """Values that `TAKE` compares and sets."""
        expires = [row[EXPIRES_AT] for row in self.rows if row[EXPIRES_AT] is not None]
        return *self.before, self.position, min(expires) if expires else None

    @property
    def goes_on(self) -> bool:
        """True if the shard has more prefetched messages, and its position is as planned."""
        return bool(self.prefetched.rows) and self.prefetched.shard.position == self.position


class Prefetch:
    """Prefetched messages of a receiver."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Maximum number of messages in one delivery."""
        self._most = max(limit, min(max(FEWEST, DELIVERIES * limit), MOST))
        self._ahead = 0
        """Number of messages to read ahead next."""
        self._stay: int | None = None
        """Shard to read more from, which has an open batch."""
        self._shards: deque[Prefetched] = deque()
        """In the order of their turns."""
        self._per_shard = MOST
        """Approximate number of messages per shard, by the last read."""
        self._delivered = 0
        """Number of messages delivered since they were read."""
        self._until = 0.0
        # state of the open transaction
        self._read: list[Prefetched] = []
        self._taken: list[Next] = []
        self._claimed: Prefetched | None = None

    @property
    def goes_on(self) -> bool:
        """True if shards are prefetched, or the next read is due."""
        return bool(self._shards) or self._ahead > 0

    @property
    def is_ready(self) -> bool:
        """True if the next messages are known and can be taken."""
        return bool(self._shards and self._shards[0].rows)

    @property
    def is_used_up(self) -> bool:
        """True if it is time to `read`, because all prefetched messages were taken."""
        return not self._shards and self._ahead > 0

    @property
    def batch(self) -> int:
        """Minimum number of messages in a batch, so that one read can prefetch it."""
        return self._most // 2  # a batch has more, because it ends with a transaction

    def stop(self) -> None:
        """Stop prefetching."""
        self._ahead = self._most = 0

    def stay_with(self, hand: Hand) -> None:
        """Continue with the messages that a claim has left in its shards."""
        shards = [number for number, shard in hand.shards.items() if shard.open is not None]
        self._begin_to_stay(shards[0] if shards else None)

    def _begin_to_stay(self, shard: int | None) -> None:
        self._stay, self._until = shard, time.monotonic() + STAY_SECONDS

    def age(self) -> None:
        """Give up the shards after a while, so that other shards have a turn."""
        if self._shards and time.monotonic() > self._until:
            self._shards.clear()
            self._stay, self._ahead = None, min(self._delivered, self._most)

    def read(self, raw: psycopg.Connection[Any], reader: Reader) -> None:
        """Open the batches of some shards and read them. Call it in a transaction of its own."""
        asked, self._ahead = self._ahead, 0
        # no work depends on the opened batches yet, so do not wait for the disk
        raw.execute(f"SET LOCAL synchronous_commit = off; {claim.PLAN_ONCE}")
        hand, wanted = None, 1
        if self._stay is not None and time.monotonic() < self._until:
            hand = claim.claim_some(raw, reader, wanted, self._stay, self.batch)
        if hand is None:
            self._begin_to_stay(None)
            wanted = -(-asked // self._per_shard)
            hand = claim.claim_some(raw, reader, wanted, None, self.batch)
        if hand is None:
            return
        for number in hand.failed:
            hand.shards[number].allowance = 1
        clear = [number for number in hand.shards if number not in hand.failed | hand.crowded]
        rows, complete = reading.read_log(raw, hand, clear, asked, MOST_BYTES)
        for number in complete.difference(row[SHARD] for row in rows):
            hand.shards[number].close()
        claim.move(raw, hand)
        self._per_shard = max(1, len(rows) // max(1, len(clear)))
        self._stay = None
        by_shard: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            by_shard.setdefault(row[SHARD], []).append(row)
        for number, shard_rows in by_shard.items():
            plain = next(
                (at for at, row in enumerate(shard_rows) if row[FATE_AT] not in (NOW, SPOKEN)), None
            )
            whole = plain is None and number in complete
            if number not in complete or hand.shards[number].cuts:
                self._stay = number
            self._read.append(
                Prefetched(
                    shard=hand.shards[number],
                    rows=shard_rows[:plain],
                    whole=whole,
                    messages=len(shard_rows),
                )
            )
        usable = sum(len(one.rows) for one in self._read)
        if usable >= asked:
            self._ahead = min(GROWTH * asked, self._most)
        elif usable < len(rows):
            self._ahead = usable
        elif len(hand.shards) >= wanted:  # there may be more
            self._ahead = asked
        for number in hand.crowded - hand.failed:
            self._read.append(
                Prefetched(shard=hand.shards[number], rows=[], whole=False, messages=asked)
            )

    def take(self, raw: psycopg.Connection[Any], reader: Reader) -> Hand | None:
        """Take the next messages in hand, unless others have them; None if none are left.

        Call it in a transaction, and call `committed` after that.
        """
        self._taken.clear()
        chosen: list[Next] = []
        room = self.limit
        while room and self._shards and self._shards[0].rows:
            part = self._shards.popleft().next(room)
            room -= len(part.rows)
            chosen.append(part)
        marked = claim.is_marked(raw)
        found = _take(raw, reader, chosen)
        if len(found) < len(chosen):
            # a receiver that reads less ahead collides less often
            self._ahead //= GROWTH
            self._stay = None
        if not found:
            return None
        self._taken = [part for part in chosen if part.prefetched.shard.shard in found]
        hand = Hand(
            reader=reader,
            transaction=next(iter(found.values())),
            marked=not marked and claim.is_marked(raw),
            shards={part.prefetched.shard.shard: part.prefetched.shard for part in self._taken},
            written={part.prefetched.shard.shard: part.position for part in self._taken},
        )
        for part in self._taken:
            hand.messages += map(Received, part.rows)
            hand.spoken = hand.spoken or any(row[FATE_AT] == SPOKEN for row in part.rows)
        if len(self._taken) > 1:
            hand.messages.sort(key=lambda message: message.id)
        return hand

    def turn(self) -> int | None:
        """Return the shard whose turn it is, to be claimed because its messages are unknown."""
        self._claimed = self._shards.popleft() if self._shards else None
        return self._claimed.shard.shard if self._claimed else None

    def rolled_back(self) -> None:
        """Forget everything read, taken or claimed in a transaction that was rolled back."""
        self._read.clear()
        self._taken.clear()
        self._claimed = None

    def committed(self, messages: int) -> None:
        """Continue after a commit that delivered ``messages`` messages."""
        self._delivered += messages
        if self._read:
            self._shards.extend(self._read)
            self._read.clear()
            self._delivered = 0
        elif self._taken:
            rest = [part.prefetched for part in self._taken if part.goes_on]
            self._shards.extendleft(reversed(rest))
            self._taken.clear()
        elif self._claimed:
            self._claimed.messages -= messages
            if messages and self._claimed.messages > 0:
                self._shards.appendleft(self._claimed)
            self._claimed = None
        elif messages >= self.limit:
            self._ahead = self._ahead or min(GROWTH * self.limit, self._most)
            self._delivered = 0


def _take(raw: psycopg.Connection[Any], reader: Reader, batch: list[Next]) -> dict[int, str]:
    """Move the cursors past messages; return the moved shards with the transaction's id."""
    names = ("shard", "batch", "epoch", "was", "position", "expires_at")
    params: dict[str, Any] = {"subscription_id": reader.subscription_id, "owner": reader.owner}
    if len(batch) == 1:
        params |= zip(names, batch[0].params, strict=True)
    else:
        columns = zip(*(part.params for part in batch), strict=True)
        params |= {name: list(column) for name, column in zip(names, columns, strict=True)}
    with psycopg.Cursor(raw, row_factory=tuple_row) as cursor:
        query = TAKE_ONE if len(batch) == 1 else TAKE_SOME
        found = cursor.execute(query, params, prepare=True).fetchall()
    return {shard: transaction for shard, transaction, _ in found}
