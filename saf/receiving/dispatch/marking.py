"""Marking: the results of many messages, written in one transaction.

The cursors come first. The statement finds them by owner, epoch and batch, and locks them, so that
no other member can take the shards over before the rest is written. If another member already has,
nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import psycopg

from saf.database import fetch
from saf.errors import Fenced
from saf.failpoints import fail_point
from saf.outbox import Outbox
from saf.received import Received
from saf.receiving import settlement
from saf.receiving.ahead import REMEMBER
from saf.receiving.arrival import Arrival
from saf.receiving.dispatch import replies, talking
from saf.receiving.dispatch.progress import Mark
from saf.receiving.dispatch.replies import Answer
from saf.receiving.dispatch.window import Marks, dead
from saf.receiving.hand import Reader
from saf.receiving.summary import SetAside
from saf.setaside.isolation import said

UNSIGNED = Outbox(max_bytes=replies.MOST)

# Runs before anything that depends on the owners of shards
LOCK = """
SELECT c.shard
FROM unnest(%(shard)s::smallint[], %(epoch)s::bigint[], %(batch)s::bigint[])
     AS m (shard, epoch, batch)
JOIN saf.cursor c USING (shard, epoch, batch)
WHERE c.subscription_id = %(subscription_id)s AND c.owner = %(owner)s
ORDER BY c.shard FOR UPDATE OF c
"""

MOVE = """
UPDATE saf.cursor c SET
    done = CASE WHEN m.closed THEN c.open ELSE c.done END,
    open = CASE WHEN m.closed THEN NULL ELSE c.open END,
    position = m.position
FROM unnest(%(shard)s::smallint[], %(epoch)s::bigint[], %(batch)s::bigint[],
            %(position)s::bigint[], %(closed)s::boolean[])
     AS m (shard, epoch, batch, position, closed)
WHERE c.subscription_id = %(subscription_id)s AND c.shard = m.shard AND c.batch = m.batch
  AND c.owner = %(owner)s AND c.epoch = m.epoch
RETURNING c.shard
"""

NOTE = """
INSERT INTO saf.attempt (subscription_id, message_id, key, status, seconds, outcome, error)
SELECT %(subscription_id)s, n.*
FROM unnest(%(message_id)s::uuid[], %(key)s::text[], %(status)s::smallint[],
            %(seconds)s::real[], %(outcome)s::text[], %(error)s::text[]) AS n
"""


def mark(
    connection: psycopg.Connection[Any],
    reader: Reader,
    marks: Marks,
    outbox: Outbox = UNSIGNED,
    one_reply: Collection[str] = (),
) -> SetAside:
    """Write marks in a transaction of its own, and send the replies.

    Dialogs under the contracts ``one_reply`` end with the reply. Return the counts of messages set
    aside.

    Raises:
        Fenced: another member has taken over some of the shards; nothing is written.
    """
    aside = SetAside()
    batches = {cursor.shard: cursor.batch for cursor in marks.cursors}
    with connection.transaction():
        if talked := marks.talked:
            _lock(connection, reader, marks.cursors)
            # messages are read relative to the cursors' positions before the move
            aside = talking.settle(connection, reader, batches, talked, one_reply)
        _move(connection, reader, marks.cursors)
        _reply(connection, outbox, marks)
        fail_point("dispatch_marking")
        outcomes = marks.outcomes
        settlement.write(
            connection,
            talking.in_hand(reader, batches, late=marks.timed),
            outcomes,
            arrival=Arrival(raw=connection),
            waiting=marks.waiting,
            counted=marks.counted.values(),
            succeeded=marks.succeeded,
        )
        if marks.attempts:
            connection.execute(NOTE, _noted(reader, marks.attempts))
    return aside + settlement.counted(outcomes)


def _reply(connection: psycopg.Connection[Any], outbox: Outbox, marks: Marks) -> None:
    """Send the replies; a message whose reply is refused becomes a dead letter."""
    replied = {walk.message: walk for walk in marks.ended if walk.reply is not None}
    to_send = [(message, walk.reply) for message, walk in replied.items() if walk.reply is not None]
    for message, error in replies.send(connection, outbox, to_send):
        replied[message].outcome = dead("failed", error)


def _lock(connection: psycopg.Connection[Any], reader: Reader, cursors: list[Mark]) -> None:
    found = {shard for (shard,) in fetch(connection, LOCK, _columns(reader, cursors))}
    lost = sorted({cursor.shard for cursor in cursors} - found)
    if lost:
        raise Fenced(f"subscription {reader.name!r}", lost)


def _move(connection: psycopg.Connection[Any], reader: Reader, cursors: Iterable[Mark]) -> None:
    moved = sorted(cursors, key=lambda cursor: cursor.shard)
    params = _columns(reader, moved)
    found = connection.execute(MOVE, params).fetchall()
    if len(found) < len(moved):
        lost = {cursor.shard for cursor in moved} - {row[0] for row in found}
        raise Fenced(f"subscription {reader.name!r}", sorted(lost))
    new = [cursor for cursor in moved if cursor.new]
    if new:
        connection.execute(REMEMBER, _columns(reader, new))


def _columns(reader: Reader, cursors: list[Mark]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: [getattr(cursor, name) for cursor in cursors]
        for name in ("shard", "epoch", "batch", "position", "closed", "ids")
    }
    return columns | {"subscription_id": reader.subscription_id, "owner": reader.owner}


def _noted(reader: Reader, attempts: Iterable[tuple[Received, Answer]]) -> dict[str, Any]:
    rows = list(attempts)
    return {
        "subscription_id": reader.subscription_id,
        "message_id": [message.message_id for message, _ in rows],
        "key": [message.key for message, _ in rows],
        "status": [answer.status for _, answer in rows],
        "seconds": [answer.seconds for _, answer in rows],
        "outcome": [str(answer.meaning) for _, answer in rows],
        "error": [said(answer.error) for _, answer in rows],
    }
