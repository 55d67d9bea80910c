"""What must be true of the ids and transaction ids of a healthy broker.

A log is read by transaction ids and by the ids of its rows. Both mean something only as long as the
cluster that gives new ones goes on from the old ones. PostgreSQL's own tools can break that: a
restore, logical replication (which does not carry sequences), a copy of the storage that catches up
by logical replication, pg_resetwal, a restore over what is there. So this must be true, and
`saf.broker.health` says when it is asked:

- The broker belongs to this cluster.
- The next transaction id is above every one that a cursor names, and no transaction that a cursor
  counts as complete is still in progress.
- No message was written here after the cursor that counts it as complete.
- The newest messages were not written before the transactions that they name began.
- The next id of a log is above the ids in it, and above those that cursors, parked messages and
  dead letters name.
- No message stands in its log twice, and no two have the same id.

What PostgreSQL guarantees, and what the questions rest on (`tests/moves`):

- A row's xmin is the transaction that wrote it, or a savepoint of it. A savepoint's number is later
  than that of its transaction, and ``txid`` is the transaction's. So ``xmin >= txid`` of each row
  that was written here; it is not a proof, because rows that were brought may have that too.
- FREEZE, VACUUM FULL, CLUSTER, pg_upgrade and copies of the storage keep xmin. A COPY, a worker of
  logical replication, ALTER TABLE with a rewrite and pg_repack write rows anew, with later ones.
- A forwarder's cursor is written after the snapshot that it holds was taken. So the cursor's own
  xmin is not below the snapshot's xmax, unless the cursor was brought from elsewhere.

A log is asked by one statement: look-ups in the index (shard, txid), which cost some milliseconds.
Repairs read the whole log as well (`COUNTED`, `TWINS`, `DOUBLED`).
"""

from __future__ import annotations

from typing import Any

import psycopg

from saf.database import fetch
from saf.log.shards import full

LOGS = ("outbox", "inbox")

_NAMED = "coalesce(c.open, c.done)"
_READERS = "saf.cursor c JOIN saf.subscription s USING (subscription_id)"
PROVE = {"outbox": "s.name = 'forwarder'", "inbox": "false"}
"""Receivers may open a batch in a transaction that began before: their cursors prove less."""

OTHER_CLUSTER = """
SELECT 'it was restored into another cluster, or moved there' FROM saf.broker
WHERE system_identifier <> (SELECT system_identifier FROM pg_control_system())
"""

# Its transaction ids were set back, or its cursors come from a cluster that has got farther
TO_COME = f"""
SELECT format('its cursors name transaction %s, and the next one here is %s: its transaction ids '
              'went back, or another cluster''s cursors were brought here',
              max(pg_snapshot_xmax({_NAMED})::text::bigint) - 1,
              pg_snapshot_xmax(pg_current_snapshot()))
FROM saf.cursor c
HAVING max(pg_snapshot_xmax({_NAMED})::text::bigint)
       > pg_snapshot_xmax(pg_current_snapshot())::text::bigint
"""

MOVED = f"{OTHER_CLUSTER} UNION ALL {TO_COME}"
"""SQL: the part that costs next to nothing, and that each chunk of a store is asked for."""

IN_PROGRESS = f"""
SELECT format('transaction %s is in progress here, and its cursors count it as complete',
              min(one::text::bigint))
FROM {_READERS}, pg_snapshot_xip(pg_current_snapshot()) AS one
WHERE pg_visible_in_snapshot(one, {_NAMED}) HAVING count(*) > 0
"""

# Where a cursor was written by whoever took its snapshot, there is nothing to look for
WRITTEN_AFTER = f"""
SELECT format('saf.{{log}} has %s messages, the first with id %s, which its cursors count as '
              'complete and which were written here after the cursors were', count(*), min(l.id))
FROM {_READERS} CROSS JOIN LATERAL (
    SELECT id FROM saf.{{log}} l
    WHERE l.shard = c.shard AND l.txid > ({full("c.xmin")})::text::xid8
      AND l.txid < pg_snapshot_xmax({_NAMED}) AND {full("l.xmin")} > {full("c.xmin")}) AS l
WHERE s.log = '{{log}}' AND {{which}}
  AND {full("c.xmin")} < pg_snapshot_xmax({_NAMED})::text::bigint
HAVING count(*) > 0
"""

# Of each shard the two newest: one alone may be forged, which `saf doctor` names
NEWEST = f"""
SELECT l.* FROM saf.broker b CROSS JOIN generate_series(0, b.shards - 1) AS h (shard)
CROSS JOIN LATERAL (
    SELECT id, message_id, txid, {full("l.xmin")} AS written FROM saf.{{log}} l
    WHERE l.shard = h.shard::smallint ORDER BY txid DESC LIMIT 2) AS l
"""
WRITTEN_BEFORE = """
SELECT format('the newest messages of saf.{log}, such as id %s, were written here before the '
              'transactions that they name began (%s of those looked at): they were brought from '
              'another cluster', max(id), count(*))
FROM newest WHERE written < txid::text::bigint
HAVING count(*) > (SELECT count(*) FROM newest WHERE written >= txid::text::bigint)
"""

LAST_ID = """
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM saf.{log}_id_seq
"""
HIGHEST_ID = f"""
SELECT greatest((SELECT max(id) FROM newest),
                (SELECT max(position) FROM {_READERS} WHERE s.log = '{{log}}'))
"""

# Reads all of them
COUNTED = """
SELECT greatest((SELECT max(id) FROM saf.{log}),
    (SELECT max(position) FROM saf.cursor JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'),
    (SELECT max(id) FROM saf.parked JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'),
    (SELECT max(id) FROM saf.dead_letter JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'))
"""
# Different messages with the same id, which a sequence that was set back gives
TWINS = """
SELECT count(*), min(id) FROM (
    SELECT id FROM saf.{log} GROUP BY id HAVING count(DISTINCT message_id) > 1) AS twins
HAVING count(*) > 0
"""
GAVE_TWINS = f"""
SELECT format('saf.{{log}} gave %s ids to several messages, the first of them %s: its sequence was '
              'set back, or was not set when the database was moved', twins, first)
FROM ({TWINS}) AS t (twins, first)
"""
DOUBLED = """
SELECT count(*), min(id) FROM (
    SELECT id FROM saf.{log} GROUP BY id, message_id, txid HAVING count(*) > 1) AS doubled
HAVING count(*) > 0
"""
# Of a backup that was restored just now, the newest rows are there twice
DOUBLED_OF_NEWEST = DOUBLED.replace("saf.{log}", "newest")


def _questions(highest: str, doubled: str, *more: str) -> str:
    """Return the statement that asks a log, in one snapshot.

    What is committed after the snapshot is not in it. So the sequence, which is read later than the
    snapshot is taken, is above each id that is seen.
    """
    ids = f"""
SELECT format('saf.{{log}} has ids up to %s, and its next id is %s: its sequence was set back, or '
              'was not set when the database was moved', highest, last + 1)
FROM ({highest}) AS h (highest), ({LAST_ID}) AS l (last) WHERE highest > last
"""
    twice = f"""
SELECT format('saf.{{log}} has %s messages twice, the first with id %s: a backup was restored over '
              'what was there', messages, first)
FROM ({doubled}) AS d (messages, first)
"""
    brought = (TO_COME, IN_PROGRESS, WRITTEN_AFTER, WRITTEN_BEFORE)
    return f"""
WITH newest AS ({NEWEST})
SELECT false AS is_foreign, what FROM ({OTHER_CLUSTER}) AS other (what)
UNION ALL
SELECT true, what FROM ({" UNION ALL ".join(brought)}) AS brought (what)
UNION ALL
SELECT false, what FROM ({" UNION ALL ".join((ids, *more, twice))}) AS given (what)
"""


ASKED = _questions(HIGHEST_ID, DOUBLED_OF_NEWEST)
"""SQL: what is not true of a log, and whether its transaction ids are foreign; no row if all is."""
ASKED_WHOLE = _questions(COUNTED, DOUBLED, GAVE_TWINS)
"""SQL: the same, of all that the log has."""


def asked(log: str, *, all_readers: bool = False, whole: bool = False) -> str:
    """Return the statement that asks a log what is not true of it."""
    which = "true" if all_readers else PROVE[log]
    return (ASKED_WHOLE if whole else ASKED).format(log=log, which=which)


def problems(
    connection: psycopg.Connection[Any], logs: tuple[str, ...] = LOGS, *, whole: bool = False
) -> list[str]:
    """Return what is not true of a broker; nothing, of a healthy one.

    Args:
        connection: to the broker, of a role that may read the logs and their sequences.
        logs: the logs that are to be read.
        whole: read all of the logs, too.
    """
    found = [what for log in logs for _, what in fetch(connection, asked(log, whole=whole))]
    return [*dict.fromkeys(found)]  # all logs have the same cursors


def foreign(connection: psycopg.Connection[Any]) -> list[str]:
    """Return where a broker's transaction ids do not mean what they should, in its cluster.

    If there is nothing to say, its cursors are right for whatever was written by now or will be,
    however it has come here. Cursors of all readers are looked at; those of receivers may look
    wrong without being it.
    """
    found = [row for log in LOGS for row in fetch(connection, asked(log, all_readers=True))]
    return [*dict.fromkeys(what for is_foreign, what in found if is_foreign)]
