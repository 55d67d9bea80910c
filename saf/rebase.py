"""A restored broker: noticed, refused, and repaired.

A log says which transaction wrote each row, and a cursor which transactions were complete. In
another cluster, into which a dump was restored, those numbers mean nothing: new transactions
would count as completed long ago, and their messages would never be forwarded. In a cluster that
was set back to an older backup they are right, but batches are numbered again that a destination
has stored already under the same numbers.

`refuse` notices the first; a destination notices the second (`saf.errors.Ahead`). Both stop before
anything is written, and `rebase` repairs both, in one transaction:

- every row gets a transaction id below all that this cluster will still give, one for each way in
  which the subscriptions have or have not completed it, and the cursors' snapshots are written
  anew in these ids. So each row stays completed, in hand or pending, for each subscription, as it
  was; ids and positions stay;
- where a destination is ahead, batches and epochs go on after those that it knows. What the source
  had delivered after the backup was taken, and has still, is then delivered a second time, and a
  batch in hand may be as well: that cannot be told from new;
- the ends of dialogs learn that they are of a new incarnation of this broker, and compare what they
  know with the other ends (`saf.dialogs.comparing`).

What the restored source does not have any more cannot be sent again; its messages that arrived
are at the destination.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from saf.database import fetch
from saf.dialogs.comparing import announce
from saf.errors import Restored, UsageError
from saf.shards import IS_PRESENT

# The cursors' snapshots are ahead of the cluster where its transaction ids went back but the
# cursors did not, as after pg_resetwal or into a database of the same cluster.
IS_RESTORED = """
SELECT system_identifier <> (SELECT system_identifier FROM pg_control_system())
    OR EXISTS (
        SELECT FROM saf.cursor
        WHERE pg_snapshot_xmax(coalesce(open, done)) > pg_snapshot_xmax(pg_current_snapshot()))
FROM saf.broker
"""

# Waits for those who write, and keeps all out
LOCK = "LOCK TABLE saf.outbox, saf.inbox, saf.cursor, saf.member IN ACCESS EXCLUSIVE MODE"

# The members came with the dump; only one of this cluster can be at work.
ALIVE = f"SELECT m.name FROM saf.member m WHERE {IS_PRESENT}"
FORGET_MEMBERS = "DELETE FROM saf.member"

# For each row, one letter a subscription: c completed, h in hand, p pending
STATES = """
CREATE TEMPORARY TABLE saf_states ON COMMIT DROP AS
SELECT l.id, string_agg(
    CASE WHEN pg_visible_in_snapshot(l.txid, c.done) THEN 'c'
         WHEN c.open IS NOT NULL AND pg_visible_in_snapshot(l.txid, c.open) THEN 'h'
         ELSE 'p' END, '' ORDER BY c.subscription_id) AS state
FROM {log} l
LEFT JOIN (saf.cursor c JOIN saf.subscription s ON s.subscription_id = c.subscription_id
           AND s.log = {name}) ON c.shard = l.shard
GROUP BY l.id
"""
DISTINCT = "SELECT DISTINCT coalesce(state, '') FROM saf_states ORDER BY 1"
SUBSCRIPTIONS = "SELECT subscription_id FROM saf.subscription WHERE log = %(log)s ORDER BY 1"
RENUMBER = """
UPDATE {log} l SET txid = m.txid::text::xid8
FROM saf_states s JOIN unnest({states}::text[], {txids}::bigint[]) AS m (state, txid)
  ON m.state = coalesce(s.state, '')
WHERE l.id = s.id
"""
DROP = "DROP TABLE saf_states"
# What is in progress now may write when we are done, and so may this transaction
NOW = "SELECT pg_current_snapshot()::text, pg_current_xact_id()::text::bigint"
REWRITE = """
UPDATE saf.cursor SET owner = NULL, epoch = greatest(epoch, %(epoch)s) + 1,
       batch = greatest(batch, %(batch)s),
       done = %(done)s::pg_snapshot,
       open = CASE WHEN open IS NOT NULL THEN %(open)s::pg_snapshot END,
       until = NULL, cuts = NULL
WHERE subscription_id = %(subscription_id)s
"""
BELONG = """
UPDATE saf.broker SET system_identifier = (SELECT system_identifier FROM pg_control_system()),
       incarnation = incarnation + 1
"""
LATEST = "SELECT batch, opened_at FROM saf.cursor ORDER BY batch DESC LIMIT 1"
KNOWN = """
SELECT batch, max(epoch) OVER () AS epoch, opened_at FROM saf.watermark
WHERE source = %(source)s AND lane = '' ORDER BY batch DESC LIMIT 1
"""

LOWEST_TXID = 10
"""Given out while a cluster is created, so no row of ours has it."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a destination knows of a source: its latest batch, and when that was opened."""

    batch: int = 0
    epoch: int = 0
    opened_at: datetime | None = None

    def is_ahead(self, batch: int, opened_at: datetime | None) -> bool:
        """Whether a source whose latest batch is the given one has never opened this one.

        >>> Known(batch=7).is_ahead(6, None), Known(batch=6).is_ahead(6, None)
        (True, False)
        """
        other = None not in (self.opened_at, opened_at) and self.opened_at != opened_at
        return self.batch > batch or (self.batch == batch and other)


@dataclass(frozen=True, kw_only=True)
class Rebased:
    """What a rebase did."""

    rows: int
    destinations_ahead: tuple[str, ...]
    """They knew later batches: messages may be delivered twice."""


def refuse(connection: psycopg.Connection[Any]) -> None:
    """Raise Restored if the logs' transaction ids are not this cluster's."""
    if (True,) in fetch(connection, IS_RESTORED):
        raise Restored(connection.info.dbname)


def known_at(connection: psycopg.Connection[Any], source: UUID) -> Known:
    """What a destination knows of a source."""
    with psycopg.Cursor(connection, row_factory=class_row(Known)) as cursor:
        return cursor.execute(KNOWN, {"source": source}).fetchone() or Known()


def rebase(
    connection: psycopg.Connection[Any], known: Mapping[str, Known], *, force: bool = False
) -> Rebased | None:
    """Make the logs' transaction ids this cluster's; None where there is nothing to repair.

    ``known`` is what each destination answers to `known_at`. All forwarders and receivers are
    stopped; ``force`` rebases even if nothing looks restored.

    Raises:
        UsageError: a member is still at work, or the role may not do it.
    """
    with connection.transaction():
        connection.execute(LOCK)
        restored = (True,) in fetch(connection, IS_RESTORED)
        ((batch, opened_at),) = fetch(connection, LATEST)
        ahead = [name for name, theirs in known.items() if theirs.is_ahead(batch, opened_at)]
        if not (restored or ahead or force):
            return None
        alive = [name for (name,) in fetch(connection, ALIVE)]
        if alive:
            raise UsageError(f"stop all forwarders and receivers first: {', '.join(alive)}")
        connection.execute(FORGET_MEMBERS)
        newest = max(theirs.batch for theirs in known.values()) + 1 if ahead else 0
        highest = max((theirs.epoch for theirs in known.values()), default=0)
        rows = sum(_rebase_log(connection, log, newest, highest) for log in ("outbox", "inbox"))
        connection.execute(BELONG)
        opened = [theirs.opened_at for name, theirs in known.items() if name in ahead]
        announce(connection, max(filter(None, opened), default=None))
    return Rebased(rows=rows, destinations_ahead=tuple(ahead))


def _rebase_log(connection: psycopg.Connection[Any], log: str, batch: int, epoch: int) -> int:
    parts: dict[str, sql.Composable] = {"log": sql.Identifier("saf", log), "name": sql.Literal(log)}
    connection.execute(sql.SQL(STATES).format(**parts))
    states = [state for (state,) in fetch(connection, DISTINCT)]
    txids = {state: LOWEST_TXID + number for number, state in enumerate(states)}
    ((now, own),) = fetch(connection, NOW)
    # beyond it, nothing that is complete has a row that keeps its transaction id
    xmin, xmax = (min(int(limit), own) for limit in now.split(":")[:2])
    in_progress = [one for one in now.split(":")[2].split(",") if one and int(one) < xmax]
    if states and max(txids.values()) >= xmin:
        raise UsageError(
            f"saf.{log} has {len(states)} combinations of subscriptions and states, more than "
            "this new cluster has transaction ids to tell them by: drop unused subscriptions"
        )
    parts |= {"states": sql.Literal(states), "txids": sql.Literal(list(txids.values()))}
    rows = connection.execute(sql.SQL(RENUMBER).format(**parts)).rowcount if states else 0
    connection.execute(DROP)
    subscriptions = fetch(connection, SUBSCRIPTIONS, {"log": log})
    for place, (subscription_id,) in enumerate(subscriptions):

        def snapshot(unseen: str, place: int = place) -> str:
            mine = [str(t) for state, t in txids.items() if state and state[place] in unseen]
            listed = [*mine, *in_progress]
            return f"{listed[0] if mine else xmin}:{xmax}:{','.join(listed)}"

        connection.execute(
            REWRITE,
            {
                "subscription_id": subscription_id,
                "batch": batch,
                "epoch": epoch,
                "done": snapshot("hp"),
                "open": snapshot("p"),
            },
        )
    return rows
