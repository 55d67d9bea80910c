"""Receiving the messages of one conversation, or of one group, whatever waits before them.

Service Broker's RECEIVE … WHERE conversation_handle = and conversation_group_id =. A conversation's
key is its id, so its messages are in one shard. `Conversations` takes them *ahead* of the shard's
position (`saf.receiving.ahead`), and leaves all others for other receivers:

    look      find conversations with messages to take, without locks; wait while there are none
    claim     lock the cursor of one of their shards; extend its open batch if a message is newer
    take      read the messages, in order, and note them as complete beyond the position
    …         the consumer's work; position and ids commit with it

*Failures* are treated as by any receiver. If the conversation's key waits, its next message is
tried when its lane is due. In a shard whose last delivery failed, the conversation's first message
is counted and tried alone, before the shard's other messages have had their turn.

*Extending.* A shard's open batch ends at the snapshot at which it was opened. If a message has
arrived since, a batch is opened that reaches up to now: it begins with the first transaction that
has an incomplete message, and what is complete of it stays so. A shard with more than `MOST` unread
messages is not extended: there, a new message is found once receivers have completed the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from saf.database import fetch, of_broker
from saf.errors import DialogNotFound, UsageError
from saf.log.read import BEYOND, COMPLETE, since_shown
from saf.log.shards import shard_of
from saf.received import EXPRESSIONS, WITH_READABLE, Received
from saf.receiving import ahead, claim
from saf.receiving.ahead import Chosen
from saf.receiving.hand import Hand, Reader, Shard, without
from saf.receiving.reading import FATE, FATE_AT, IN_HAND, OF_SERVICE, PARKED_AT
from saf.receiving.retries import Suspect
from saf.setaside.lane import Kind

if TYPE_CHECKING:
    from saf.dialogs.dialog import Dialog

MOST = 16_384
"""Largest number of a shard's unread messages for which its batch is extended."""

SHARDS = "SELECT shards FROM saf.broker"

FIND = """
SELECT service, group_id FROM saf.conversation WHERE handle = %(handle)s
"""
CONVERSATIONS = """
SELECT DISTINCT conversation_id FROM saf.conversation
WHERE service = %(service)s AND (handle = %(handle)s OR group_id = %(group_id)s)
"""

INCOMPLETE = f"""
NOT {COMPLETE.format(row="since")}
AND NOT coalesce(since.id <@ {{ids}} AND pg_visible_in_snapshot(since.txid, c.open), false)
"""
_SINCE = since_shown(columns="id, txid, to_service, conversation_id")
_LATE = f"""
p.subscription_id = %(subscription_id)s AND p.destination = '' AND p.kind = '{Kind.LATER}'
AND p.subject = {{shard}}::text AND p.conversation_id = {{conversation}} AND p.deliver_at <= now()
"""
LOOK = f"""
SELECT w.shard, w.conversation_id::text, c.allowance IS NOT NULL,
       b.subject IS NOT NULL, coalesce(b.next_attempt_at <= now() OR b.awaits_handler, false)
FROM unnest(%(of)s::smallint[], %(conversations)s::uuid[]) AS w (shard, conversation_id)
JOIN {IN_HAND} AS c ON c.shard = w.shard AND c.owner IS NOT DISTINCT FROM %(owner)s
{BEYOND}
LEFT JOIN saf.backoff b ON b.subscription_id = %(subscription_id)s AND b.destination = ''
    AND b.kind = '{Kind.KEY}' AND b.subject = w.conversation_id::text
WHERE b.subject IS NOT NULL
   OR EXISTS (SELECT FROM ({_SINCE}) AS since
              WHERE since.conversation_id = w.conversation_id AND {OF_SERVICE}
                AND {INCOMPLETE.format(ids="d.ids")})
   OR EXISTS (SELECT FROM saf.parked p
              WHERE {_LATE.format(shard="w.shard", conversation="w.conversation_id")})
"""

# Of the cursor in hand, visible in the snapshot up to which its batch may be extended
_VISIBLE = f"""
FROM (SELECT %(shard)s::smallint AS shard, %(done)s::pg_snapshot AS done,
             %(open)s::pg_snapshot AS open, %(after)s::bigint AS position,
             %(beyond)s::int8multirange AS ids) AS c
CROSS JOIN LATERAL ({_SINCE}) AS since
WHERE {OF_SERVICE} AND pg_visible_in_snapshot(since.txid, %(now)s::pg_snapshot)
"""
_LEFT = INCOMPLETE.format(ids="c.ids")
MINE = f"""
SELECT since.id, since.txid::text::bigint, pg_visible_in_snapshot(since.txid, c.open)
{_VISIBLE} AND since.conversation_id = %(conversation_id)s AND {_LEFT}
ORDER BY since.id LIMIT %(limit)s
"""
ALL = f"SELECT since.id, since.txid::text::bigint, NOT ({_LEFT}) {_VISIBLE} LIMIT {MOST} + 1"
DELAYED = f"""
SELECT {EXPRESSIONS}, {FATE}, parked_id
FROM (SELECT {WITH_READABLE} FROM saf.parked p
      WHERE {_LATE.format(shard="%(shard)s", conversation="%(conversation_id)s")}
      ORDER BY deliver_at, id LIMIT %(limit)s) AS since
ORDER BY deliver_at, id
"""
SNAPSHOT = "SELECT pg_current_snapshot()::text"


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which conversations to receive: one end's, or all of its group. Exactly one is given."""

    conversation: UUID | None = None
    """Handle of the end."""
    group: UUID | None = None
    """Handle of an end in the group."""

    @classmethod
    def of(cls, conversation: Dialog | UUID | None, group: Dialog | UUID | None) -> Which | None:
        """Return the choice of `saf.receive`'s arguments; None: receive everything.

        Raises:
            UsageError: both are given, or one is neither a `Dialog` nor a handle.
        """
        if conversation is None and group is None:
            return None
        if conversation is not None and group is not None:
            raise UsageError("conversation and group: give one of them, or neither")
        return cls(
            conversation=_handle("conversation", conversation), group=_handle("group", group)
        )

    @property
    def handle(self) -> UUID:
        """The handle that was given."""
        handle = self.conversation or self.group
        assert handle is not None  # noqa: S101 - see `of`
        return handle


def _handle(name: str, given: object) -> UUID | None:
    handle = getattr(given, "handle", given)
    if handle is not None and not isinstance(handle, UUID):
        raise UsageError(f"{name}: expected a dialog or its handle, a UUID, and not {given!r:.200}")
    return handle


class Waiting(NamedTuple):
    """A conversation that may have messages to take now."""

    shard: int
    conversation: str
    with_care: bool
    """True if the shard's messages are tried alone."""
    has_lane: bool
    """True if its key waits in its lane."""
    is_due: bool
    """True if the lane is to be tried now."""

    @property
    def suspect(self) -> bool:
        """True if the next message is to be tried alone."""
        return self.is_due if self.has_lane else self.with_care

    @property
    def plain(self) -> bool:
        """True if the next messages may be taken."""
        return not (self.has_lane or self.with_care)


class Conversations:
    """The conversations that a receiver receives, and its next messages.

    Raises:
        DialogNotFound: no end in this database has the handle.
        UsageError: the end is not one of the reader's service.
    """

    def __init__(self, raw: psycopg.Connection[Any], reader: Reader, which: Which) -> None:
        found = fetch(raw, FIND, {"handle": which.handle})
        if not found:
            raise DialogNotFound(which.handle, raw.info.dbname)
        ((service, group_id),) = found
        if service != reader.service or not reader.converses:
            raise UsageError(
                f"dialog {which.handle} is an end of service {service!r}, whose messages "
                f"subscription {reader.name!r} does not receive: receive from {service!r}"
            )
        (self._shards,) = of_broker(raw, SHARDS)
        self._ends = {
            "service": service,
            "handle": which.conversation,
            "group_id": group_id if which.group is not None else None,
        }
        self._waiting: list[Waiting] = []

    def troubled(self, raw: psycopg.Connection[Any], reader: Reader) -> bool:
        """Look for messages; return whether one is to be tried alone now."""
        self._waiting = self._find(raw, reader)
        return any(one.suspect for one in self._waiting)

    def quiet(self, raw: psycopg.Connection[Any], reader: Reader) -> bool:
        """Return whether there is nothing to take or to try. Only reads."""
        return not any(one.suspect or one.plain for one in self._find(raw, reader))

    def suspects(self, raw: psycopg.Connection[Any], reader: Reader) -> list[Suspect]:
        """Return the conversations whose next message is to be tried alone now."""
        return [
            Suspect(shard=one.shard, lane=one.conversation)
            for one in self._find(raw, reader)
            if one.suspect
        ]

    def next(self, raw: psycopg.Connection[Any], reader: Reader, limit: int) -> Hand | None:
        """Take messages of the first conversation whose shard is free; see `troubled`.

        None if there is none.
        """
        for one in self._waiting:
            hand = claim.claim_shard(raw, reader, one.shard, 1) if one.plain else None
            if hand is not None:
                shard = hand.shards[one.shard]
                if one.shard in hand.failed:
                    shard.allowance = 1
                elif shard.allowance is None and one.conversation not in hand.waiting:
                    take(raw, hand, shard, one.conversation, limit)
                if hand.all or one.shard in hand.failed:
                    return hand
        return None

    def _find(self, raw: psycopg.Connection[Any], reader: Reader) -> list[Waiting]:
        conversations = [one for (one,) in fetch(raw, CONVERSATIONS, self._ends)]
        shards = [shard_of(str(one), self._shards) for one in conversations]
        params = {
            "subscription_id": reader.subscription_id,
            "service": reader.service,
            "owner": reader.owner,
            "conversations": conversations,
            "of": shards,
            "shards": sorted(set(shards)),
        }
        return [Waiting(*row) for row in fetch(raw, LOOK, params)]


def take(
    raw: psycopg.Connection[Any], hand: Hand, shard: Shard, conversation: str, limit: int
) -> None:
    """Take the next messages of a conversation in hand: first those that were delayed."""
    reader = hand.reader
    params: dict[str, Any] = {
        "subscription_id": reader.subscription_id,
        "service": reader.service,
        "shard": shard.shard,
        "conversation_id": UUID(conversation),
    }
    if shard.shard in hand.late:
        with psycopg.Cursor(raw, row_factory=tuple_row) as cursor:
            rows = cursor.execute(DELAYED, params | {"limit": limit}, binary=True).fetchall()
        for row in rows:
            hand.take(Received(row, row[PARKED_AT]), row[FATE_AT])
        limit -= len(rows)
    if limit < 1:
        return
    ((snapshot,),) = fetch(raw, SNAPSHOT)
    params |= shard.place._asdict()
    params |= {"limit": limit, "now": without(snapshot, int(hand.transaction))}
    mine = fetch(raw, MINE, params)
    if mine and not mine[0][2]:
        rows = fetch(raw, ALL, params)
        if len(rows) > MOST:
            return
        extend(shard, rows, params["now"])
        claim.move(raw, hand)
        ahead.write(raw, reader, {(shard.shard, shard.batch): shard.beyond})
        mine = [(id_, txid, True) for id_, txid, _ in mine]
    in_batch = takewhile(itemgetter(2), mine)
    ahead.take(raw, hand, [Chosen(shard.shard, txid, id_) for id_, txid, _ in in_batch])


def extend(shard: Shard, rows: Sequence[tuple[int, int, bool]], now: str) -> None:
    """Open a batch of what is left of a shard's batch, and of what has arrived up to a snapshot.

    ``rows`` are the messages that ``done`` does not show and ``now`` does: the id, the transaction,
    and whether the message is complete. At least one is not.

    >>> shard = Shard(shard=1, batch=4, done="10:10:", open="20:20:", position=100)
    >>> rows = [(99, 10, True), (105, 12, False), (104, 25, True), (110, 25, True)]
    >>> extend(shard, rows, "30:30:")
    >>> shard.batch, shard.done, shard.open, shard.position, shard.beyond
    (5, '12:12:', '30:30:', 104, '{[110,110]}')
    """
    incomplete = sorted(id_ for id_, _, complete in rows if not complete)
    first = min(txid for _, txid, complete in rows if not complete)
    was_seen = first < int(shard.done.split(":")[1])
    ranges: dict[int, list[int]] = defaultdict(list)
    for id_, _, complete in rows:
        if complete and id_ > incomplete[0]:
            ranges[bisect_left(incomplete, id_)].append(id_)
    parts = ",".join(f"[{min(ids)},{max(ids)}]" for ids in ranges.values())
    shard.extend(now, None if was_seen else first, incomplete[0] - 1, f"{{{parts}}}")
