"""What must be true of a healthy broker's numbers, and what it is told when it is not.

A log is read by transaction ids and by the ids of its rows. Both mean something only as long as the
cluster that gives new ones goes on from the old ones. PostgreSQL's own tools can break that: a
restore, logical replication (which does not carry sequences), a copy of the storage that catches up
by logical replication, pg_resetwal, a restore over what is there. So this is asked before a run
reads a source for the first time, by `saf doctor`, and at the end of each repair:

- The next transaction id is above every one that a cursor names, and no transaction that a cursor
  counts as complete is still in progress.
- No message was written here after the cursor that counts it as complete.
- The newest messages were not written before the transactions that they name began.
- The next id of a log is above the ids in it, and above those that cursors, parked messages and
  dead letters name.
- No message stands in its log twice, and no two have the same id.

`saf.broker.whole` asks whether saf's own rows are complete.

What PostgreSQL guarantees, and what the questions rest on (`tests/moves`):

- A row's xmin is the transaction that wrote it, or a savepoint of it. A savepoint's number is later
  than that of its transaction, and ``txid`` is the transaction's. So ``xmin >= txid`` of each row
  that was written here; it is not a proof, because rows that were brought may have that too.
- FREEZE, VACUUM FULL, CLUSTER, pg_upgrade and copies of the storage keep xmin. A COPY, a worker of
  logical replication, ALTER TABLE with a rewrite and pg_repack write rows anew, with later ones.
- A forwarder's cursor is written after the snapshot that it holds was taken. So the cursor's own
  xmin is not below the snapshot's xmax, unless the cursor was brought from elsewhere.

All questions are look-ups in the index (shard, txid), and cost some milliseconds. Repairs read the
whole log as well (`COUNTED`, `TWINS`, `DOUBLED`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from saf.database import fetch
from saf.errors import Restored
from saf.log.shards import full

LOGS = ("outbox", "inbox")

OTHER_CLUSTER = """
SELECT system_identifier <> (SELECT system_identifier FROM pg_control_system()) FROM saf.broker
"""

_NAMED = "coalesce(c.open, c.done)"
_READERS = "saf.cursor c JOIN saf.subscription s USING (subscription_id)"
OF_FORWARDER = "s.log = 'outbox' AND s.name = 'forwarder'"
"""Receivers may open a batch in a transaction that began before: their cursors prove less."""

# Its transaction ids were set back, or its cursors come from a cluster that has got farther
TO_COME = f"""
SELECT max(pg_snapshot_xmax({_NAMED})::text::bigint),
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM {_READERS}
HAVING max(pg_snapshot_xmax({_NAMED})::text::bigint)
       > pg_snapshot_xmax(pg_current_snapshot())::text::bigint
"""
IN_PROGRESS = f"""
SELECT min(one::text::bigint) FROM {_READERS}, pg_snapshot_xip(pg_current_snapshot()) AS one
WHERE pg_visible_in_snapshot(one, {_NAMED}) HAVING count(*) > 0
"""

# Where a cursor was written by whoever took its snapshot, there is nothing to look for
WRITTEN_AFTER = f"""
SELECT count(*), min(l.id)
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
newest AS (
    SELECT l.* FROM saf.broker b CROSS JOIN generate_series(0, b.shards - 1) AS h (shard)
    CROSS JOIN LATERAL (
        SELECT id, message_id, txid, {full("l.xmin")} AS written FROM saf.{{log}} l
        WHERE l.shard = h.shard::smallint ORDER BY txid DESC LIMIT 2) AS l)
"""
WRITTEN_BEFORE = f"""
WITH {NEWEST}
SELECT count(*), max(id) FROM newest WHERE written < txid::text::bigint
HAVING count(*) > (SELECT count(*) FROM newest WHERE written >= txid::text::bigint)
"""

LAST_ID = """
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM saf.{log}_id_seq
"""
HIGHEST_ID = f"""
WITH {NEWEST}
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
DOUBLED = """
SELECT count(*), min(id) FROM (
    SELECT id FROM saf.{log} GROUP BY id, message_id, txid HAVING count(*) > 1) AS doubled
HAVING count(*) > 0
"""


# Of a backup that was restored just now, the newest rows are there twice
DOUBLED_OF_NEWEST = f"""
WITH {NEWEST}
SELECT count(*), min(id) FROM (
    SELECT id FROM newest GROUP BY id, message_id, txid HAVING count(*) > 1) AS doubled
HAVING count(*) > 0
"""


def refuse(connection: psycopg.Connection[Any], log: str = "outbox") -> None:
    """Raise Restored if a log cannot be read, because of what has happened to its database."""
    found = [*problems(connection, (log,))]
    if found:
        raise Restored(connection.info.dbname, why=found)


def problems(
    connection: psycopg.Connection[Any], logs: tuple[str, ...] = LOGS, *, whole: bool = False
) -> Iterator[str]:
    """Say what is not true of a broker; nothing, of a healthy one.

    Args:
        connection: to the broker, of a role that may read the logs and their sequences.
        logs: the logs that are to be read.
        whole: read all of the logs, too.
    """
    if (True,) in fetch(connection, OTHER_CLUSTER):
        yield "it was restored into another cluster, or moved there"
    yield from foreign(connection, logs)
    for log in logs:
        yield from _ids(connection, log, whole=whole)


def foreign(
    connection: psycopg.Connection[Any], logs: tuple[str, ...] = LOGS, *, all_readers: bool = False
) -> Iterator[str]:
    """Say where a broker's transaction ids do not mean what they should, in its cluster.

    If there is nothing to say, its cursors are right for whatever was written by now or will be,
    however it has come here. ``all_readers``: look at receivers' cursors, too; they may look wrong
    without being it.
    """
    for named, following in fetch(connection, TO_COME):
        yield (
            f"its cursors name transaction {named - 1}, and the next one here is {following}: its "
            "transaction ids went back, or another cluster's cursors were brought here"
        )
    for (one,) in fetch(connection, IN_PROGRESS):
        yield f"transaction {one} is in progress here, and its cursors count it as complete"
    for log in logs:
        which = "true" if all_readers else OF_FORWARDER
        for count, first in fetch(connection, WRITTEN_AFTER.format(log=log, which=which)):
            yield (
                f"saf.{log} has {count} messages, the first with id {first}, which its cursors "
                "count as complete and which were written here after the cursors were"
            )
        for count, last in fetch(connection, WRITTEN_BEFORE.format(log=log)):
            yield (
                f"the newest messages of saf.{log}, such as id {last}, were written here before "
                f"the transactions that they name began ({count} of those looked at): they were "
                "brought from another cluster"
            )


def _ids(connection: psycopg.Connection[Any], log: str, *, whole: bool) -> Iterator[str]:
    # in this order: a message that is committed between the two questions has drawn its id by then
    ((highest,),) = fetch(connection, (COUNTED if whole else HIGHEST_ID).format(log=log))
    ((last,),) = fetch(connection, LAST_ID.format(log=log))
    if highest is not None and highest > last:
        yield (
            f"saf.{log} has ids up to {highest}, and its next id is {last + 1}: its sequence was "
            "set back, or was not set when the database was moved"
        )
    for count, first in fetch(connection, TWINS.format(log=log)) if whole else ():
        yield (
            f"saf.{log} gave {count} ids to several messages, the first of them {first}: its "
            "sequence was set back, or was not set when the database was moved"
        )
    doubled = DOUBLED if whole else DOUBLED_OF_NEWEST
    for count, first in fetch(connection, doubled.format(log=log)):
        yield (
            f"saf.{log} has {count} messages twice, the first with id {first}: a backup was "
            "restored over what was there"
        )
