"""Fair receiving: each group gets its share of a delivery, whatever the backlog of the others.

A fair subscription (`saf.broker.fairness`) divides its messages into groups, such as tenants, and
into classes with weights, such as urgent message types. A message's *turn* is its number within its
group and class, divided by the weight of its class. A delivery takes messages in the order of their
turns: the first of each group, then the second of each, and so on. The order within a key stays:
a message never gets an earlier turn than a message before it of the same key.

    look       lock the free shards with messages; open their batches, and commit
    plan       read the first messages of these batches, without bodies and without locks; order
               them by turn
    take       lock only the shards of the next messages; read and hand out those that are still
               incomplete, ahead of their shards' positions (`saf.receiving.ahead`)

A plan lasts for many deliveries. It is only a hint, because `take` checks it under the locks: other
receivers may have completed some of its messages. The messages of a shard that another receiver has
in hand, or whose batch has changed, leave the plan.

If few messages are available, less than a delivery takes, they are handed out as usual, because
then each gets its turn in any order.

*How far it sees.* A plan has at most `SIGHT` messages, so memory is bounded. They are divided among
the shards with messages, and what some shards do not need goes to the others. A message is behind
the others of its shard as long as it is out of sight. Messages that arrive later are seen after
about `REFRESH_SECONDS`: then the open batches are extended (`EXTENDED`), unless a shard has more
messages than fit into its part of a plan. In that case its batch is completed first.

*Within a group*, messages are numbered shard by shard, in an order that each receiver draws for
itself. So a delivery locks few shards, and receivers seldom meet.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from saf.broker.fairness import Fairness
from saf.broker.services import Subscription
from saf.database import fetch
from saf.log.read import BEYOND, IN_BATCH, since_shown
from saf.log.shards import NEWEST
from saf.received import SHARD, Received
from saf.receiving import ahead, claim, reading
from saf.receiving.ahead import Chosen
from saf.receiving.hand import NO_IDS, Hand, Place, Reader
from saf.receiving.reading import FATE_AT, IN_HAND, OF_SERVICE, PARKED_AT

SIGHT = 16_384
"""Maximum number of messages in a plan."""

REFRESH_SECONDS = 1.0
"""Age at which a plan is renewed, in seconds."""

REFRESH_RATIO = 20
"""A plan is kept for at least this many times as long as it took to make it."""

PLACES = f"""
SELECT c.shard, done::text, open::text, position, coalesce(d.ids::text, '{NO_IDS}'), c.batch
FROM {NEWEST} AS c {BEYOND}
WHERE open IS NOT NULL AND allowance IS NULL AND owner IS NOT DISTINCT FROM %(owner)s::uuid
"""

# Groups and keys are hashed, because a plan need not know them: two with the same hash share
_GROUPS = {
    None: "NULL::text",
    "key": "r.key",
    "key:": "split_part(r.key, %(name)s, 1)",
    "header:": "r.headers ->> %(name)s",
    "message_type": "r.message_type",
    "from_service": "r.from_service",
}
_CLASSES = {
    None: "NULL::int",
    "message_type": "array_position(%(classes)s::text[], r.message_type)",
    "from_service": "array_position(%(classes)s::text[], r.from_service)",
}
PLAN = f"""
SELECT c.shard, m.id, m.txid::text::bigint, m.key, m.part, m.class
FROM unnest(%(shard)s::smallint[], %(done)s::pg_snapshot[], %(open)s::pg_snapshot[],
            %(after)s::bigint[], %(beyond)s::int8multirange[])
    WITH ORDINALITY AS c (shard, done, open, after, beyond, place)
CROSS JOIN LATERAL (
    SELECT * FROM ({{since}}) AS since
    WHERE {IN_BATCH.format(open="c.open")} AND {OF_SERVICE} AND id > c.after
      AND NOT id <@ c.beyond
    ORDER BY id LIMIT %(each)s
) AS m
"""

# Extended batches: the rest of open batches, and the messages that arrived since. The new batch
# begins with the first transaction that has an incomplete message, unless that was in progress when
# the old one began: then it begins where the old one began. Complete messages are merged to ranges.
# Large batches stay as they are, and so do the batches of deep backlogs, and those that were opened
# a moment ago.
EXTENDED = f"""
WITH c AS MATERIALIZED (
    SELECT c.*, coalesce(d.ids, '{NO_IDS}') AS ids, %(now)s::pg_snapshot AS now
    FROM {IN_HAND} AS c {BEYOND}
    WHERE c.open IS NOT NULL AND c.until IS NULL AND c.allowance IS NULL
      AND c.opened_at < clock_timestamp() - make_interval(secs => %(seconds)s)
      AND EXISTS (SELECT FROM ({since_shown("saf.inbox", "txid, to_service", done="c.open")}) AS new
                  WHERE {IN_BATCH.format(open="%(now)s")} AND {OF_SERVICE})
), seen AS MATERIALIZED (
    SELECT c.shard, pg_snapshot_xmax(c.done) AS began, since.id, since.txid,
           pg_visible_in_snapshot(since.txid, c.open)
           AND (since.id <= c.position OR since.id <@ c.ids) AS complete
    FROM c CROSS JOIN LATERAL (
        SELECT * FROM ({since_shown(columns="id, txid, to_service")}) AS since
        WHERE {IN_BATCH.format(open="c.now")} AND {OF_SERVICE} LIMIT %(most)s + 1) AS since
), first AS (
    SELECT shard, min(id) FILTER (WHERE NOT complete) AS id,
           CASE WHEN min(txid) FILTER (WHERE NOT complete) >= began
                THEN min(txid) FILTER (WHERE NOT complete) END AS txid
    FROM seen GROUP BY shard, began HAVING count(*) <= %(most)s AND NOT bool_and(complete)
), numbered AS (
    SELECT seen.shard, seen.id, complete, count(*) FILTER (WHERE NOT complete)
               OVER (PARTITION BY seen.shard ORDER BY seen.id) AS part
    FROM seen JOIN first USING (shard) WHERE (seen.txid < first.txid) IS NOT TRUE
), run AS (
    SELECT shard, int8range(min(id), max(id), '[]') AS ids
    FROM numbered WHERE complete GROUP BY shard, part
)
SELECT first.shard, first.txid::text::bigint, first.id - 1,
       (coalesce(range_agg(run.ids), '{NO_IDS}')
        * int8multirange(int8range(first.id, NULL)))::text
FROM first LEFT JOIN run USING (shard) GROUP BY first.shard, first.txid, first.id
"""


class Seen(NamedTuple):
    """A message of a plan: where it is, and what decides about its turn."""

    shard: int
    id: int
    txid: int
    key: int | None
    """Hash of its key; None if it has none."""
    group: int | None
    """Hash of its group; None if it has none."""
    class_: int | None
    """Number of its class among those with weights, from 1; None if it has no weight."""


def in_turn(seen: Sequence[Seen], weights: Sequence[float]) -> list[Seen]:
    """Return messages in the order of their turns.

    ``seen`` has each shard's messages in order. ``weights`` are those of the classes.

    >>> def three(group: int, key: int, class_: int | None = None) -> list[Seen]:
    ...     return [Seen(1, 10 * group + i, 7, key, group, class_) for i in range(3)]
    >>> [one.id for one in in_turn([*three(1, key=1), *three(2, key=2)], [])]
    [10, 20, 11, 21, 12, 22]
    >>> [one.id for one in in_turn([*three(1, key=1), *three(2, key=2, class_=1)], [2.0])]
    [20, 10, 21, 22, 11, 12]
    >>> [one.id for one in in_turn([*three(1, key=1), *three(2, key=1)], [])]
    [10, 11, 12, 20, 21, 22]
    """
    counts: dict[tuple[int | None, int | None], int] = defaultdict(int)
    last: dict[int, float] = {}
    turns: list[float] = []
    for _, _, _, key, group, class_ in seen:
        counts[group, class_] += 1
        turn = counts[group, class_] / (1.0 if class_ is None else weights[class_ - 1])
        if key is not None:
            last[key] = turn = max(turn, last.get(key, 0.0))
        turns.append(turn)
    return [seen[at] for at in sorted(range(len(seen)), key=turns.__getitem__)]


@dataclass(kw_only=True)
class Seat:
    """A shard of a plan: its open batch, and the messages of the plan that are left in it."""

    batch: int
    left: list[int] = field(default_factory=list)
    """Ids, ascending."""
    whole: bool = False
    """True if the plan has all messages of the batch."""

    @property
    def is_complete(self) -> bool:
        """True if nothing of the batch is left."""
        return self.whole and not self.left


class Plan:
    """Messages in the order of their turns, and those left in each shard."""

    def __init__(self, order: Sequence[Seen], shards: dict[int, Seat]) -> None:
        self._order = order
        self._at = 0
        self.shards = shards
        """The shards whose messages are still in the plan."""
        self.complete = {number for number, seat in shards.items() if seat.is_complete}
        """Shards whose batches are complete, and still open."""

    @property
    def is_used_up(self) -> bool:
        """True if no message is left."""
        while self._at < len(self._order) and self._order[self._at].shard not in self.shards:
            self._at += 1
        return self._at >= len(self._order)

    def next(self, limit: int) -> list[Chosen]:
        """Return the messages with the earliest turns, which leave the plan."""
        chosen: list[Chosen] = []
        while len(chosen) < limit and not self.is_used_up:
            one = self._order[self._at]
            self._at += 1
            left = self.shards[one.shard].left
            del left[bisect_left(left, one.id)]
            chosen.append(Chosen(one.shard, one.txid, one.id))
        return chosen


class Fair:
    """The plan of one receiver, and its next messages.

    A receiver that takes one delivery, such as `saf.receive`, lends its plan to the next one in
    this process (`lend`, `borrow`), because making a plan takes longer than a delivery.
    """

    def __init__(self, fairness: Fairness, limit: int) -> None:
        self.limit = limit
        """Maximum number of messages in one delivery."""
        self._weights = list(fairness.priority.values())
        kind, colon, name = (fairness.fair_by or "").partition(":")
        self._params = {"name": name, "classes": list(fairness.priority)}
        columns = (
            "r.id, r.txid, r.to_service, hashtextextended(r.key, 0) AS key, "
            f"hashtextextended({_GROUPS[kind + colon or None]}, 0) AS part, "
            f"{_CLASSES[fairness.priority_by]} AS class"
        )
        self._query = PLAN.format(since=since_shown(columns=columns))
        self._plan: Plan | None = None
        self._planned_at = 0.0
        self._seconds = 0.0
        self._is_due = False
        """True if the batches are open, and a plan is to be made."""
        self._lacks_messages = False
        """True if messages were out of sight, or in shards that were not free."""
        self._last: Hand | None = None
        """The shards and messages that were taken last."""
        self._transaction = 0
        """Id of the last transaction that took any. A lower one: the database was set back."""
        self._has_looked = False
        """True if the last step has looked: the next one takes messages."""

    @property
    def goes_on(self) -> bool:
        """True if there may be more messages than the last step found."""
        return self._is_due or self._plan is not None

    def rolled_back(self) -> None:
        """Forget the plan: its next messages were not completed."""
        self._plan, self._is_due, self._last = None, False, None

    def next(self, raw: psycopg.Connection[Any], reader: Reader) -> Hand | None:
        """Take the next messages in hand; None if nothing is available, or another step is needed.

        Call it in a transaction begun with `saf.receiving.claim.begin` and `PLAN_ONCE`. If the
        transaction is rolled back, call `rolled_back`.
        """
        last, self._last = self._last, None
        if last is not None and any(
            shard.ahead and shard.left is None for shard in last.shards.values()
        ):
            self._plan = None  # messages were put back, which the plan does not know
        if (self._plan is None or (self._is_old and not self._has_looked)) and not self._is_due:
            self._has_looked = True
            return self._look(raw, reader)
        self._has_looked = False
        if self._is_due or self._plan is None:
            self._make_plan(raw, reader)
        return self._take(raw, reader)

    @property
    def _is_old(self) -> bool:
        """True if it is time to look for messages that are not in the plan."""
        age = time.monotonic() - self._planned_at
        return age > max(REFRESH_SECONDS, REFRESH_RATIO * self._seconds)

    def _look(self, raw: psycopg.Connection[Any], reader: Reader) -> Hand | None:
        """Open batches, or take all messages in hand if one delivery has room for them."""
        self._planned_at = time.monotonic()
        self._seconds = 0.0
        hand = claim.claim_all(raw, reader, self.limit, SIGHT)
        if hand is None:
            return None
        for shard in hand.failed:
            hand.shards[shard].allowance = 1
        clear = set(hand.shards) - hand.failed
        if not hand.full:
            reading.read(raw, hand, clear, self.limit)
            return hand
        extended = self._extend(raw, reader, hand, clear)
        changed = hand.opened | hand.failed | extended
        self._is_due = self._plan is None or self._lacks_messages or bool(changed)
        shards = hand.shards
        hand.shards = {number: shard for number, shard in shards.items() if number in changed}
        if hand.shards:
            claim.move(raw, hand)
            ids = {
                (number, shard.batch): shard.beyond
                for number, shard in hand.shards.items()
                if number in extended and shard.beyond != NO_IDS
            }
            ahead.write(raw, reader, ids)
        late = [shard for shard in hand.late if shard in clear]
        if not late:
            return None
        # delayed messages that are due go first, as they do for other receivers
        hand.shards |= {number: shards[number] for number in late}
        hand.written = {number: shard.position for number, shard in hand.shards.items()}
        for row in reading.delayed(raw, reader, late, self.limit):
            hand.take(Received(row, row[PARKED_AT]), row[FATE_AT])
        return hand

    def _extend(
        self, raw: psycopg.Connection[Any], reader: Reader, hand: Hand, clear: Collection[int]
    ) -> set[int]:
        """Let open batches reach up to now, so that new messages are seen; return the shards."""
        params = {
            "subscription_id": reader.subscription_id,
            "service": reader.service,
            "shards": [number for number in clear if number not in hand.opened],
            "now": hand.now,
            "seconds": REFRESH_SECONDS,
            "most": max(claim.FEWEST, SIGHT // len(hand.shards)),
        }
        extended = set()
        for number, first, position, beyond in fetch(raw, EXTENDED, params):
            hand.shards[number].extend(hand.now, first, position, beyond)
            extended.add(number)
        return extended

    def _make_plan(self, raw: psycopg.Connection[Any], reader: Reader) -> None:
        began = time.monotonic()
        self._is_due = self._lacks_messages = False
        params = {"subscription_id": reader.subscription_id, "owner": reader.owner}
        found = fetch(raw, PLACES, params)
        random.shuffle(found)
        shards = {shard: Seat(batch=batch) for shard, *_, batch in found}
        places = [Place(*row) for *row, _ in found]
        seen: list[Seen] = []
        for _ in range(2):
            each = (SIGHT - len(seen)) // len(places) if places else 0
            if each < 1:
                break
            before = {place.shard: len(shards[place.shard].left) for place in places}
            rows = self._read(raw, reader, places, each)
            for one in rows:
                shards[one.shard].left.append(one.id)
            seen += rows
            for number, count in before.items():
                shards[number].whole = len(shards[number].left) - count < each
            places = [
                place._replace(after=shards[place.shard].left[-1])
                for place in places
                if not shards[place.shard].whole
            ]
        self._plan = Plan(in_turn(seen, self._weights), shards)
        self._planned_at = time.monotonic()
        self._seconds = self._planned_at - began

    def _read(
        self, raw: psycopg.Connection[Any], reader: Reader, places: Sequence[Place], each: int
    ) -> list[Seen]:
        columns = dict(zip(Place._fields, map(list, zip(*places, strict=True)), strict=False))
        params = {**columns, **self._params, "service": reader.service, "each": each}
        with psycopg.Cursor(raw, row_factory=tuple_row) as cursor:
            rows = cursor.execute(self._query, params, binary=True)
            return [Seen._make(row) for row in rows]

    def _take(self, raw: psycopg.Connection[Any], reader: Reader) -> Hand | None:
        """Take the next messages of the plan in hand, except those of shards that are not free."""
        plan = self._plan
        assert plan is not None  # noqa: S101 - it was just made
        chosen = plan.next(self.limit)
        wanted = {one.shard for one in chosen} | plan.complete
        plan.complete = set()
        hand: Hand | None = None
        rows: list[tuple[Any, ...]] = []
        if wanted:
            params = ahead.params_of(reader, chosen)
            hand, rows = claim.claim_these(raw, reader, wanted, ahead.CHOSEN_AS_STORED, params)
        usable = self._usable(plan, hand) if hand is not None else set()
        for number in wanted - usable:
            del plan.shards[number]
            self._lacks_messages = True
        if hand is not None:
            hand.late = []
            ahead.take_rows(raw, hand, [row for row in rows if row[SHARD] in usable])
            for number in usable:
                seat, shard = plan.shards[number], hand.shards[number]
                shard.ahead, shard.left = True, seat.left
                if seat.is_complete:
                    shard.close()
                if not seat.left and shard.open is not None:
                    self._lacks_messages = True
        if plan.is_used_up:
            self._plan = None
        if hand is None or not hand.shards:
            return None
        self._last = hand
        return hand

    @property
    def is_fresh(self) -> bool:
        """True if its plan may be continued on another connection."""
        return self._plan is not None and not self._is_old

    def _usable(self, plan: Plan, hand: Hand) -> set[int]:
        """Return the shards in hand that the plan still knows, and drop the others.

        The trace of a failed delivery stays in hand, to be written.
        """
        for number in hand.failed:
            hand.shards[number].allowance = 1
        is_later = int(hand.transaction) > self._transaction
        self._transaction = int(hand.transaction)
        known = {
            number
            for number, shard in hand.shards.items()
            if is_later
            and shard.open is not None
            and number not in hand.opened | hand.failed
            and shard.batch == plan.shards[number].batch
        }
        hand.shards = {
            number: shard
            for number, shard in hand.shards.items()
            if number in known or number in hand.failed
        }
        return known


_lent: dict[tuple[object, ...], Fair] = {}
"""The plans that nobody uses now, by database, subscription, rules and limit."""

MOST_LENT = 8
"""Maximum number of plans to keep for later receivers of this process."""


def borrow(raw: psycopg.Connection[Any], found: Subscription, limit: int) -> Fair:
    """Return a plan that an earlier receiver has lent, or a new one."""
    lent = _lent.pop(_key(raw, found, limit), None)
    return lent if lent is not None and lent.is_fresh else Fair(found.fairness, limit)


def lend(raw: psycopg.Connection[Any], found: Subscription, fair: Fair) -> None:
    """Let the next receiver of this process continue with a plan, after a commit."""
    for key, other in [*_lent.items()]:
        if not other.is_fresh or len(_lent) >= MOST_LENT:
            _lent.pop(key, None)
    if fair.is_fresh:
        _lent[_key(raw, found, fair.limit)] = fair


def _key(raw: psycopg.Connection[Any], found: Subscription, limit: int) -> tuple[object, ...]:
    info = raw.info
    where = info.host, info.hostaddr, info.port, info.dbname, info.user
    return *where, found.subscription_id, found.created_at, str(found.fairness), limit
