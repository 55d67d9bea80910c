"""Invariants of the ids and transaction ids of a healthy broker.

A log is read by transaction id and by row id. Both are reliable only while the cluster assigns new
ids above the old ones. PostgreSQL's own tools can break that: a restore, logical replication
(which does not carry sequences), a copy of the storage that catches up by logical replication,
pg_resetwal, a restore over existing rows. So these statements must be true; `saf.broker.health`
lists when each process checks them:

- The broker belongs to this cluster.
- The next transaction id is above every transaction id that a cursor names, and no transaction that
  a cursor counts as complete is still in progress.
- No message was written here after the cursor that counts it as complete.
- The newest messages were not written before the transactions that they name began.
- The next id of a log is above the ids in the log, and above those that cursors, parked messages
  and dead letters name.
- No message is in its log twice, and no two messages have the same id.

The checks rest on what PostgreSQL guarantees (`tests/moves`):

- A row's xmin is the transaction that wrote the row, or one of that transaction's savepoints. A
  savepoint's number is later than that of its transaction; ``txid`` is the transaction's number. So
  ``xmin >= txid`` for each row that was written here. The reverse is no proof: rows that were
  copied here may satisfy it too.
- FREEZE, VACUUM FULL, CLUSTER, pg_upgrade and copies of the storage keep xmin. COPY, a worker of
  logical replication, ALTER TABLE with a rewrite and pg_repack write rows again, with a later xmin.
- A forwarder writes its cursor after taking the snapshot that the cursor holds. So the cursor's own
  xmin is not below the snapshot's xmax, unless the cursor was copied from elsewhere.

One statement checks a log: look-ups in the index (shard, txid) that take a few milliseconds.
Repairs also read the whole log (`COUNTED`, `TWINS`, `DOUBLED`).
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
"""Cursors whose xmin proves when the snapshot was taken; receivers may open a batch in a
transaction that began earlier."""

OTHER_CLUSTER = """
SELECT 'it was restored into another cluster, or moved there' FROM saf.broker
WHERE system_identifier <> (SELECT system_identifier FROM pg_control_system())
"""

# The transaction ids were set back, or the cursors come from a cluster with later ones
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
"""SQL: the cheap part, which a store checks with each chunk."""

IN_PROGRESS = f"""
SELECT format('transaction %s is in progress here, and its cursors count it as complete',
              min(one::text::bigint))
FROM {_READERS}, pg_snapshot_xip(pg_current_snapshot()) AS one
WHERE pg_visible_in_snapshot(one, {_NAMED}) HAVING count(*) > 0
"""

# A cursor written by the transaction that took its snapshot needs no search
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

# The two newest of each shard: one alone may be forged, which `saf doctor` names
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

# Reads the whole log
COUNTED = """
SELECT greatest((SELECT max(id) FROM saf.{log}),
    (SELECT max(position) FROM saf.cursor JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'),
    (SELECT max(id) FROM saf.parked JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'),
    (SELECT max(id) FROM saf.dead_letter JOIN saf.subscription s USING (subscription_id)
     WHERE s.log = '{log}'))
"""
# Different messages with the same id, as a sequence that was set back assigns
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
# After a backup was restored over its database, the newest rows exist twice
DOUBLED_OF_NEWEST = DOUBLED.replace("saf.{log}", "newest")


def _questions(highest: str, doubled: str, *more: str) -> str:
    """Return the statement that checks a log in one snapshot.

    The sequence is read after the snapshot is taken, so its value is above each visible id.
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
"""SQL: each broken invariant of a log, and whether the transaction ids are foreign."""
ASKED_WHOLE = _questions(COUNTED, DOUBLED, GAVE_TWINS)
"""SQL: like `ASKED`, reading the whole log."""


def asked(log: str, *, all_readers: bool = False, whole: bool = False) -> str:
    """Return the statement that reports a log's broken invariants."""
    condition = "true" if all_readers else PROVE[log]
    return (ASKED_WHOLE if whole else ASKED).format(log=log, which=condition)


def problems(
    connection: psycopg.Connection[Any], logs: tuple[str, ...] = LOGS, *, whole: bool = False
) -> list[str]:
    """Return the broken invariants of a broker, in words; none if the broker is healthy.

    Args:
        connection: to the broker, of a role that may read the logs and their sequences.
        logs: the logs to check.
        whole: also read the logs from beginning to end.
    """
    found = [what for log in logs for _, what in fetch(connection, asked(log, whole=whole))]
    return [*dict.fromkeys(found)]  # all logs have the same cursors


def foreign(connection: psycopg.Connection[Any]) -> list[str]:
    """Return why a broker's transaction ids do not fit its cluster, in words.

    Without a finding, the cursors are right for every message written so far or later, however the
    broker came here. The check covers the cursors of all readers; a receiver's cursor may look
    wrong and be right.
    """
    found = [row for log in LOGS for row in fetch(connection, asked(log, all_readers=True))]
    return [*dict.fromkeys(what for is_foreign, what in found if is_foreign)]
