"""A stream: a subscription whose reader keeps its own checkpoint, and may ask for rows again.

Its subscription is a row of saf.subscription with ``stream``. It keeps purges from rows that are
not committed, and its lag is that of its cursors, as with any other reader. All cursors move
together:

    begin      return the subscription's progress: where a checkpoint begins
    take over  raise the epoch, so that an older query of this subscription can write nothing more
    open       open = a snapshot, batch = batch + 1, durably; ``done`` stays where it is
    commit     done = the progress that the checkpoint calls complete

Rows between ``done`` and ``open`` were handed out and may be asked for again; only the checkpoint
knows how they are divided. Opening a batch is durable, so no row is handed out that the source
could still lose in a crash.

*Set-backs are noticed.* `check` compares a checkpoint with the cursors at each contact. A batch
that was handed out is recorded here for good, because it was opened durably. If a subscription
lacks the batch, the subscription was set back, together with its database. Its cursors are right
for the rows that the database has now, and a new checkpoint begins there; rows older than the
backup may come again, and nothing is left out.

A stream waits for no other process, has no lease, and keeps no session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import psycopg

from saf.database import fetch
from saf.errors import NotThisStream, StreamSetBack, StreamTakenOver
from saf.log.offset import Offset, shows_all_of
from saf.log.shards import NEWEST, THIS_ROW

# One row if all cursors are equally far
STATE = f"""
SELECT b.broker_id::text, b.incarnation, b.shards, s.subscription_id, c.epoch, c.batch,
       c.done::text, coalesce(c.open::text, ''), c.position, pg_current_snapshot()::text, c.number
FROM saf.broker b, saf.subscription s,
     (SELECT epoch, batch, done::text, open::text, position, count(*) AS number
      FROM {NEWEST} AS n GROUP BY 1, 2, 3, 4, 5) AS c
WHERE s.subscription_id = %(subscription_id)s
"""
NAMED = (
    "SELECT subscription_id, stream FROM saf.subscription WHERE (log, name) = (%(log)s, %(name)s)"
)

NOW = "SELECT pg_current_snapshot()::text"

TAKE_OVER = f"""
UPDATE saf.cursor c SET epoch = c.epoch + 1 FROM {NEWEST} AS n WHERE {THIS_ROW}
RETURNING c.epoch
"""

OPEN = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true))
UPDATE saf.cursor c SET open = %(open)s::pg_snapshot, batch = c.batch + 1, position = 0,
       opened_at = now()
FROM {NEWEST} AS n, durable
WHERE {THIS_ROW} AND c.epoch = %(epoch)s
RETURNING c.batch
"""

# If a later batch was opened since, its rows may have lower ids than the position
COMMIT = f"""
UPDATE saf.cursor c SET
    done = %(done)s::pg_snapshot,
    open = CASE WHEN c.open::text IS DISTINCT FROM %(done)s::text THEN c.open END,
    position = CASE WHEN c.open::text = %(open)s::text THEN %(position)s::bigint ELSE 0 END
FROM {NEWEST} AS n
WHERE {THIS_ROW} AND c.epoch = %(epoch)s
RETURNING c.shard
"""


@dataclass(frozen=True, kw_only=True)
class State:
    """Progress of a stream's subscription."""

    what: str
    """The broker, for errors."""
    name: str
    """The subscription's name."""
    committed: Offset
    """The offset that a new checkpoint would begin with."""
    batch: int
    """The number of the last batch that was opened."""
    end: str
    """The snapshot at which that batch ends."""
    epoch: int
    shards: int
    now: str
    """pg_snapshot as text: the transactions that are complete now."""

    def opened_after(self, start: Offset) -> Offset | None:
        """Return the end of the batch that was opened after an offset; None if none was."""
        if self.batch <= start.batch:
            return None
        return replace(start, batch=self.batch, done=self.end, open="", position=0, settled=False)

    def begins_at(self, start: Offset) -> bool:
        """Whether an offset is where a new checkpoint would begin."""
        return replace(start, settled=True) == self.committed


def find(connection: psycopg.Connection[Any], what: str, log: str, name: str) -> int | None:
    """Return the id of a stream's subscription; None if none has this name.

    Raises:
        NotThisStream: the subscription is not a stream's.
    """
    found = fetch(connection, NAMED, {"log": log, "name": name})
    if not found:
        return None
    ((subscription_id, stream),) = found
    if not stream:
        raise NotThisStream(
            f"{what}: the subscription {name!r} of the {log} is not a stream's: name another one"
        )
    return int(subscription_id)


def state(connection: psycopg.Connection[Any], what: str, name: str, subscription_id: int) -> State:
    """Return the progress of a stream's subscription. Only reads.

    Raises:
        NotThisStream: another program has moved or removed single cursors of the subscription.
    """
    rows = fetch(connection, STATE, {"subscription_id": subscription_id})
    if len(rows) != 1:
        raise NotThisStream(
            f"{what}: the cursors of the stream's subscription are not equally far, so something "
            "else has written them: saf subscription drop, and begin with a new checkpoint"
        )
    (broker, incarnation, shards, found, epoch, batch, done, open_, position, now, number) = rows[0]
    if number != shards:
        raise NotThisStream(
            f"{what}: the stream's subscription has {number} cursors for {shards} shards, so "
            "something else has removed some: saf subscription drop, and begin with a new "
            "checkpoint"
        )
    return State(
        what=what,
        name=name,
        committed=Offset(
            broker=broker,
            incarnation=incarnation,
            subscription=found,
            # an open batch that is not committed is not the batch that ends at ``done``
            batch=batch - 1 if open_ and not position else batch,
            done=done,
            open=open_ if position else "",
            position=position,
            settled=True,
        ),
        batch=batch,
        end=open_ or done,
        epoch=epoch,
        shards=shards,
        now=now,
    )


def check(given: Offset, known: State) -> None:
    """Check that a checkpoint's offset belongs to this subscription, and can still be read.

    Raises:
        NotThisStream: it belongs to another broker or subscription; or it is older than the
            committed progress.
        StreamSetBack: the database has less than it had when the offset was handed out.
    """
    own, what, name = known.committed, known.what, known.name
    if given.broker != own.broker:
        raise NotThisStream(
            f"{what}: the checkpoint was made with broker {given.broker}, and this is "
            f"{own.broker}: fix the name in saf.toml, or begin with a new checkpoint"
        )
    if given.incarnation != own.incarnation:
        raise StreamSetBack(what, name, "was repaired after it was set back")
    if given.subscription != own.subscription:
        raise NotThisStream(
            f"{what}: the subscription {name!r} is not the checkpoint's subscription: that was "
            "dropped, and messages that it had not committed may be purged. Begin with a new "
            "checkpoint"
        )
    if given.batch > known.batch:
        raise StreamSetBack(
            what, name, f"knows {known.batch:,} batches, and the checkpoint {given.batch:,}"
        )
    if (given.batch == known.batch and given.end != known.end) or not (
        shows_all_of(known.end, given.end) and shows_all_of(known.now, given.end)
    ):
        raise StreamSetBack(what, name, f"has another batch {given.batch:,} than the checkpoint")
    if not shows_all_of(given.done, own.done) or (
        given.open and given.open == own.open and given.position < own.position
    ):
        raise NotThisStream(
            f"{what}: the stream {name!r} has committed more than the checkpoint holds, and what "
            "lies between may be purged: another query has this subscription, or the checkpoint "
            "was set back. Give each query a subscription of its own, or begin with a new "
            "checkpoint"
        )


def take_over(connection: psycopg.Connection[Any], known: State) -> int:
    """Become the only query of a subscription; return the epoch that all writes name.

    Raises:
        NotThisStream: the subscription was dropped in the meantime.
    """
    subscription_id = known.committed.subscription
    while True:
        with connection.transaction() as transaction:
            rows = fetch(connection, TAKE_OVER, {"subscription_id": subscription_id})
            if len(rows) == known.shards:
                return int(rows[0][0])
            # it has waited for an older query that opened a batch, so the cursors are newer now
            raise psycopg.Rollback(transaction)
        state(connection, known.what, known.name, subscription_id)


def now(connection: psycopg.Connection[Any]) -> str:
    """Return the current snapshot, in which all complete transactions are visible."""
    ((snapshot,),) = fetch(connection, NOW)
    return str(snapshot)


def open_batch(connection: psycopg.Connection[Any], known: State, epoch: int, end: str) -> Offset:
    """Open a batch that ends at a snapshot, durably; return the offset of its end.

    Raises:
        StreamTakenOver: a newer query has the subscription.
    """
    params = {"subscription_id": known.committed.subscription, "epoch": epoch, "open": end}
    rows = fetch(connection, OPEN, params)
    if len(rows) != known.shards:
        raise StreamTakenOver(known.what, known.name)
    return Offset(
        broker=known.committed.broker,
        incarnation=known.committed.incarnation,
        subscription=known.committed.subscription,
        batch=int(rows[0][0]),
        done=end,
    )


def commit(connection: psycopg.Connection[Any], known: State, epoch: int, end: Offset) -> None:
    """Mark an offset's rows complete: a purge may remove them from now on.

    Raises:
        StreamTakenOver: a newer query has the subscription.
    """
    params = {
        "subscription_id": end.subscription,
        "epoch": epoch,
        "done": end.done,
        "open": end.open,
        "position": end.position,
    }
    if len(fetch(connection, COMMIT, params)) != known.shards:
        raise StreamTakenOver(known.what, known.name)


Start = Literal["beginning", "now"]

CREATE = """
INSERT INTO saf.subscription (name, log, stream) VALUES (%(name)s, %(log)s, true)
ON CONFLICT DO NOTHING RETURNING subscription_id
"""
CURSORS = """
INSERT INTO saf.cursor (subscription_id, shard, done)
SELECT %(subscription_id)s, generate_series(0, shards - 1),
       CASE WHEN %(start)s = 'now' THEN pg_current_snapshot() ELSE '1:1:' END
FROM saf.broker
"""
LOGS = "SELECT log FROM saf.subscription WHERE name = %(name)s AND stream ORDER BY log DESC"
DROP = """
DELETE FROM saf.subscription WHERE name = %(name)s AND log = %(log)s AND stream RETURNING log
"""


def create(
    connection: psycopg.Connection[Any], what: str, log: str, name: str, start: Start
) -> bool:
    """Register a stream; return False if it already exists.

    Raises:
        NotThisStream: a subscription of this name is not a stream's.
    """
    with connection.transaction():
        created = fetch(connection, CREATE, {"name": name, "log": log})
        if not created:
            find(connection, what, log, name)
            return False
        connection.execute(CURSORS, {"subscription_id": created[0][0], "start": start})
        return True


def logs(connection: psycopg.Connection[Any], name: str) -> list[str]:
    """Return the logs that have a stream of this name. Only reads."""
    return [log for (log,) in fetch(connection, LOGS, {"name": name})]


def drop(connection: psycopg.Connection[Any], log: str, name: str) -> bool:
    """Remove a stream, so that no rows are kept for it any more. Return whether it existed."""
    return bool(fetch(connection, DROP, {"log": log, "name": name}))
