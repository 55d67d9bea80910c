"""A restored broker: noticed, refused, and repaired.

A log stores which transaction wrote each row, and a cursor which transactions were complete.

- A dump was restored into another cluster. There those numbers mean nothing: new transactions would
  count as completed long ago, and their messages would never be forwarded.
- A cluster was set back to an older backup. The transaction ids are right. But batches and the
  numbers of lanes are assigned again, and a destination has stored other messages under them.

`saf.log.lineage` notices the first; the marks of a destination show the second
(`saf.operating.repair.set_back`, and `saf.errors.Ahead` chunk by chunk). Both stop before anything
is written, and `rebase` repairs both, in one transaction:

- If the transaction ids belong to another cluster (`saf.log.lineage.foreign`), every row gets an id
  below all that this cluster will still assign. There is one id for each combination of the states
  in which subscriptions have a row. The snapshots of the cursors are rewritten with these ids. So
  each row stays completed, in hand or pending, for each subscription, and positions stay too. Rows
  that were written here since the move, by any INSERT, are pending for all subscriptions;
  `saf.operating.repair.moved` finds these rows.
- If the next id of a log is not above its ids, because its sequence was not set, the rows that were
  written with too low ids get new ids, in their order, and all sequences of saf continue after the
  existing rows.
- Duplicate rows, from a restore over existing rows, are removed.
- If a destination is ahead, then wherever one is farther, the batches and epochs of its shards, and
  the numbers of lanes, continue after those that the destination knows. Messages that the source
  had delivered after the backup was taken, and still has, are then delivered a second time, because
  they cannot be told from new ones. So are messages that were in hand or parked at the backup: some
  of them may have been set aside since, and would count as stored.
- The ends of dialogs learn that they belong to a new incarnation of this broker, and compare what
  they know with the other ends. A dialog with targets at two destinations continues with one of
  them (`saf.dialogs.set_back`).

The restored source cannot send messages again that it has lost. Those that arrived are at the
destination. `saf.operating.repair.send_again` repairs a destination that was set back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from saf.broker import whole
from saf.database import fetch
from saf.destinations.marks import Known, shards_of
from saf.dialogs.monologs import ReceivedMonolog
from saf.dialogs.set_back import Target, settle
from saf.engine.acknowledged import adopt
from saf.errors import RowsGone, UsageError
from saf.log import lineage
from saf.log.cursor import TIMES
from saf.log.shards import IS_PRESENT, full
from saf.operating.repair import moved
from saf.operating.repair.moved import MovedBy
from saf.operating.repair.set_back import SetBack, raise_incarnation, set_back
from saf.setaside.lane import FOUND
from saf.setaside.parking import PARKED_COLUMNS

__all__ = ["Rebased", "rebase"]

# Waits for current writers, and keeps out all others
LOCK = """
LOCK TABLE saf.outbox, saf.inbox, saf.cursor, saf.member, saf.parked IN ACCESS EXCLUSIVE MODE
"""

# The members came with the dump; only members of this cluster can be running.
ALIVE = f"SELECT m.name FROM saf.member m WHERE {IS_PRESENT}"
FORGET_MEMBERS = "DELETE FROM saf.member"

NEWEST = """
SELECT max(opened_at) FROM saf.cursor JOIN saf.subscription s USING (subscription_id)
WHERE s.log = 'outbox' AND NOT s.stream
"""

DISTINCT = "SELECT DISTINCT state FROM saf_states ORDER BY 1"
SUBSCRIPTIONS = "SELECT subscription_id FROM saf.subscription WHERE log = %(log)s ORDER BY 1"
RENUMBER = """
UPDATE {log} l SET txid = m.txid::text::xid8
FROM saf_states s JOIN unnest({states}::text[], {txids}::bigint[]) AS m (state, txid)
  ON m.state = s.state
WHERE (l.tableoid, l.ctid) = (s.slot, s.place)
"""
DROP = "DROP TABLE saf_states"

# Row by row, so that ids are assigned in this order
NEW_IDS = """
DO $$ DECLARE one record; new_slot oid; new_place tid; BEGIN
    FOR one IN {new} ORDER BY is_late, id LOOP
        UPDATE {log} SET id = DEFAULT WHERE tableoid = one.tableoid AND ctid = one.ctid
        RETURNING tableoid, ctid INTO new_slot, new_place;
        UPDATE saf_states SET slot = new_slot, place = new_place
        WHERE slot = one.tableoid AND place = one.ctid;
    END LOOP;
END $$
"""
# All rows that came here after the cursors. Rows that were brought come before the first message
# that was certainly written here
NEW_HERE = f"""
SELECT l.tableoid, l.ctid, l.id, coalesce({full("l.xmin")} >= first.certain, false) AS is_late
FROM {{log}} l JOIN saf_states s ON (l.tableoid, l.ctid) = (s.slot, s.place)
CROSS JOIN (
    SELECT min({full("l.xmin")}) AS certain
    FROM {{log}} l JOIN saf_states s ON (l.tableoid, l.ctid) = (s.slot, s.place)
    WHERE s.is_here AND l.xmin::text::bigint = l.txid::text::bigint & 4294967295) AS first
WHERE s.is_here
"""
# Without a move: the younger of two rows with the same id, and pending rows younger than the first
# of these, or than the message with the highest id
NEW_SINCE = """
SELECT tableoid, ctid, id, true AS is_late
FROM (SELECT *, min(txid::text::bigint) FILTER (WHERE is_twin AND is_pending) OVER () AS since
      FROM (SELECT l.tableoid, l.ctid, l.id, l.txid,
                   l.message_id <> first_value(l.message_id) OVER (
                       PARTITION BY l.id ORDER BY l.txid, l.message_id) AS is_twin,
                   s.state !~ '[ch]' AS is_pending, s.state ~ 'h' AS is_in_hand
            FROM {log} l JOIN saf_states s ON (l.tableoid, l.ctid) = (s.slot, s.place)
           ) AS looked_at) AS l
WHERE is_twin AND NOT is_in_hand
   OR is_pending AND (txid::text::bigint >= since OR id <= {last} AND {highest} > {last}
                      AND txid > (SELECT txid FROM {log} ORDER BY id DESC, txid LIMIT 1))
"""
SEQUENCES = """
SELECT c.relname, a.attname, pg_get_serial_sequence('saf.' || c.relname, a.attname)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = 'saf'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND a.attidentity <> '' AND NOT a.attisdropped
ORDER BY 1
"""
# Never back: others may remember higher numbers than this broker has
GO_ON_AFTER = """
SELECT setval({sequence}::text::regclass, {highest})
WHERE {highest} > (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END
                   FROM {of_sequence})
"""
GO_ON = "SELECT setval(%(sequence)s, %(highest)s)"
HIGHEST = "SELECT coalesce(max({column}), 0) FROM {table}"

REMOVE_DOUBLED = f"""
DELETE FROM {{log}} l USING (
    SELECT tableoid AS slot, ctid AS place, row_number() OVER (
        PARTITION BY id, message_id, txid ORDER BY {full("xmin")}, tableoid, ctid) AS number
    FROM {{log}}) AS d
WHERE d.number > 1 AND (l.tableoid, l.ctid) = (d.slot, d.place)
"""

# Transactions in progress may still write after this one is done, and so may this one itself
NOW = "SELECT pg_current_snapshot()::text, pg_current_xact_id()::text::bigint"
NO_OWNER = "owner = NULL, epoch = greatest(epoch, %(epoch)s) + 1"
REWRITE = f"""
UPDATE saf.cursor SET {NO_OWNER},
       done = %(done)s::pg_snapshot,
       open = CASE WHEN open IS NOT NULL THEN %(open)s::pg_snapshot END,
       until = NULL, cuts = NULL
WHERE subscription_id = %(subscription_id)s
"""
RAISE_EPOCH = f"UPDATE saf.cursor SET {NO_OWNER}"
TIMELINE = "UPDATE saf.timeline SET written = pg_current_xact_id()"
BELONG = """
UPDATE saf.broker SET system_identifier = (SELECT system_identifier FROM pg_control_system())
"""

# All by the same number, so that their order stays
SHIFT_BATCHES = """
UPDATE saf.cursor c SET batch = batch + %(numbers)s FROM saf.subscription s
WHERE s.subscription_id = c.subscription_id AND s.log = 'outbox' AND s.name = 'forwarder'
  AND shard = ANY (%(shards)s)
"""
OF_THESE = """
shard = ANY (%(shards)s) AND subscription_id IN (
    SELECT subscription_id FROM saf.subscription WHERE log = 'outbox' AND name = 'forwarder')
"""
SHIFT_PARKED = f"""
UPDATE saf.parked SET batch = batch + %(numbers)s WHERE {OF_THESE}
"""
# Times at which messages were set aside that destinations know and the broker has forgotten
REMEMBER_SET_ASIDE = f"""
UPDATE saf.cursor c SET set_aside_at = ARRAY(
    SELECT at FROM (SELECT unnest(c.set_aside_at) AS at UNION SELECT unnest(m.times)
                    ORDER BY at DESC LIMIT {TIMES}) AS newest ORDER BY at)
FROM (SELECT shard, array_agg(at) AS times
      FROM unnest(%(shards)s::smallint[], %(times)s::timestamptz[]) AS u (shard, at)
      GROUP BY shard) AS m,
     saf.subscription s
WHERE s.subscription_id = c.subscription_id AND s.log = 'outbox' AND s.name = 'forwarder'
  AND c.shard = m.shard
"""
# In their previous order. The identity never assigns a number twice
MOVE_FOUND = f"""
WITH found AS (DELETE FROM saf.parked WHERE {OF_THESE} AND kind = ANY (%(found)s) RETURNING *)
INSERT INTO saf.parked ({", ".join(PARKED_COLUMNS)}, parked_at)
SELECT {", ".join(PARKED_COLUMNS)}, parked_at FROM found ORDER BY parked_id
"""
RAISE_SEQUENCE = """
SELECT setval(pg_get_serial_sequence(%(table)s, %(column)s),
              (SELECT last_value FROM {sequence}) + %(by)s)
"""

LOWEST_TXID = 10
"""Assigned while a cluster is created, so no row of a log has it."""


@dataclass(frozen=True, kw_only=True)
class Rebased:
    """Result of a rebase."""

    rows: int
    destinations_ahead: tuple[str, ...]
    """Destinations that knew later batches: messages may be delivered to them twice."""
    remembered_until: datetime | None
    """When the newest batch was opened that the broker itself remembers."""
    second_targets: int = 0
    """Targets of dialogs that got an Error, because their dialogs continue with other targets."""
    why: tuple[str, ...] = ()
    """Problems that the broker had."""
    here: int = 0
    """Messages that counted as written here since the move, and so as pending."""
    new_ids: int = 0
    """Messages that got new ids."""
    doubled: int = 0
    """Duplicate rows of a log that were removed."""


def rebase(
    connection: psycopg.Connection[Any],
    known: Mapping[str, Known],
    *,
    force: bool = False,
    moved_by: MovedBy | None = None,
    dry_run: bool = False,
    monologs: Callable[[], Iterable[ReceivedMonolog]] = tuple,
    targets: Callable[[], Iterable[Target]] = tuple,
) -> Rebased | None:
    """Repair a restored broker; return None if there is nothing to repair.

    All forwarders and receivers must be stopped.

    Args:
        connection: to the broker, in autocommit, as the owner of its schema.
        known: by destination, what each destination that keeps marks knows of the broker.
        force: rebase even if nothing looks restored.
        moved_by: how the broker was moved, if its rows do not show it; see
        `saf.operating.repair.moved`.
        dry_run: return what would be done, and change nothing.
        monologs: returns how far destinations have received this broker's monologs; called only if
            there is something to repair.
        targets: returns which targets destinations have of this broker's dialogs with services
            whose routes share; called only if there is something to repair.

    Raises:
        UsageError: a member is still running, the role may not repair, the rows do not show how the
            broker was moved, or it would not be healthy afterwards.
    """
    if gone := whole.missing(connection):
        raise RowsGone(connection.info.dbname, gone)
    if not (force or _wrong(connection, known)):
        return None  # without having locked anything
    received, all_targets = [*monologs()], [*targets()]
    with connection.transaction(force_rollback=dry_run):
        connection.execute(LOCK)
        wrong = _wrong(connection, known)
        if not (force or wrong):
            return None
        why = tuple(lineage.problems(connection, whole=True))
        members = [name for (name,) in fetch(connection, ALIVE)]
        if members:
            raise UsageError(f"stop all forwarders and receivers first: {', '.join(members)}")
        ((newest,),) = fetch(connection, NEWEST)
        differ = _ahead(connection, known)
        ahead: dict[str, SetBack] = {}
        if any(item.ahead for item in differ.values()):
            ahead = {name: item for name, item in differ.items() if item.farther}
        highest = max((e for item in known.values() for e in item.epochs.values()), default=0)
        doubled = sum(_remove_doubled(connection, log) for log in lineage.LOGS)
        with whole.updatable_logs(connection):
            foreign = bool(lineage.foreign(connection))
            how = moved.by(connection, moved_by) if foreign else moved_by
            rows = here = new_ids = 0
            for log in lineage.LOGS:
                here += moved.states(connection, log, how if foreign else None)
                new_ids += _new_ids(connection, log, is_moved=foreign)
                if foreign or force:
                    rows += _rebase_log(connection, log, highest)
                connection.execute(DROP)
            # only now: this writes the members' cursors, whose xmin shows which rows were written
            # here since
            connection.execute(FORGET_MEMBERS)
            if not (foreign or force):
                connection.execute(RAISE_EPOCH, {"epoch": highest})
            _let_sequences_go_on(connection)
            if ahead:
                _go_on_after(connection, [known[name] for name in ahead], list(ahead.values()))
            connection.execute(BELONG)
            connection.execute(TIMELINE)
            raise_incarnation(connection, _newest(known, ahead), received)
            second_targets = settle(connection, all_targets)
        for wrong_still in lineage.problems(connection, whole=True):
            raise UsageError(f"not repaired, nothing was changed: {wrong_still}")
    return Rebased(
        rows=rows,
        destinations_ahead=tuple(ahead),
        remembered_until=newest,
        second_targets=second_targets,
        why=why,
        here=here,
        new_ids=new_ids,
        doubled=doubled,
    )


def _wrong(connection: psycopg.Connection[Any], known: Mapping[str, Known]) -> bool:
    return bool(lineage.problems(connection, whole=True)) or any(
        comparison.ahead for comparison in _ahead(connection, known).values()
    )


def _ahead(connection: psycopg.Connection[Any], known: Mapping[str, Known]) -> dict[str, SetBack]:
    return {name: set_back(connection, name, record) for name, record in known.items()}


def _newest(known: Mapping[str, Known], ahead: Mapping[str, SetBack]) -> datetime | None:
    """Return when the newest batch was opened that a destination knows and its source does not."""
    marks = (
        known[name].marks.get(place)
        for name, comparison in ahead.items()
        for place in comparison.ahead
    )
    return max((m.opened_at for m in marks if m is not None and m.opened_at), default=None)


def _go_on_after(
    connection: psycopg.Connection[Any], known: Sequence[Known], ahead: Sequence[SetBack]
) -> None:
    """Let the numbers of shards continue after those that destinations know.

    A mark does not tell which numbers its lane uses: a destination's own lane uses batches,
    messages sent again use audit_id, and messages that have found a route use parked_id. So all
    three continue after the highest number of any mark. The times of messages set aside are kept,
    too.
    """
    marks = [mark for record in known for mark in record.marks.values()]
    numbers = max((mark.batch for mark in marks), default=0)
    places = max((mark.position for mark in marks), default=0)
    params = {
        "shards": shards_of(place for comparison in ahead for place in comparison.farther),
        "numbers": numbers,
        "found": [str(kind) for kind in FOUND.values()],
    }
    for table, column, by in (("audit", "audit_id", numbers), ("parked", "parked_id", places)):
        query = sql.SQL(RAISE_SEQUENCE).format(
            sequence=sql.Identifier("saf", f"{table}_{column}_seq")
        )
        fetch(connection, query, {"table": f"saf.{table}", "column": column, "by": by})
    connection.execute(SHIFT_BATCHES, params)
    connection.execute(SHIFT_PARKED, params)
    connection.execute(MOVE_FOUND, params)
    times = [
        (shard, mark.set_aside_at)
        for record in known
        for (_, shard), mark in record.marks.items()
        if mark.set_aside_at
    ]
    connection.execute(
        REMEMBER_SET_ASIDE,
        {"shards": [shard for shard, _ in times], "times": [at for _, at in times]},
    )
    for record, comparison in zip(known, ahead, strict=True):
        adopt(connection, record.destination, record.marks, comparison.farther)


def _remove_doubled(connection: psycopg.Connection[Any], log: str) -> int:
    if not fetch(connection, lineage.DOUBLED.format(log=log)):
        return 0
    query = sql.SQL(REMOVE_DOUBLED).format(log=sql.Identifier("saf", log))
    with whole.deletable_doubles(connection):
        return connection.execute(query).rowcount


def _new_ids(connection: psycopg.Connection[Any], log: str, *, is_moved: bool) -> int:
    """Give new ids to messages whose ids were assigned before; return how many."""
    ((last,),) = fetch(connection, lineage.LAST_ID.format(log=log))
    ((highest,),) = fetch(connection, lineage.COUNTED.format(log=log))
    is_behind = highest is not None and highest > last
    if not (is_behind or fetch(connection, lineage.TWINS.format(log=log))):
        return 0
    parts = {
        "log": sql.Identifier("saf", log),
        "last": sql.Literal(last),
        "highest": sql.Literal(highest),
    }
    new = sql.SQL(NEW_HERE if is_moved else NEW_SINCE).format(**parts)
    ((count,),) = fetch(connection, sql.SQL("SELECT count(*) FROM ({}) AS new").format(new))
    if is_behind:
        fetch(connection, GO_ON, {"sequence": f"saf.{log}_id_seq", "highest": highest})
    connection.execute(sql.SQL(NEW_IDS).format(new=new, **parts))
    return int(count)


def _let_sequences_go_on(connection: psycopg.Connection[Any]) -> None:
    for table, column, sequence in fetch(connection, SEQUENCES):
        query = sql.SQL(HIGHEST).format(
            column=sql.Identifier(column), table=sql.Identifier("saf", table)
        )
        ((highest,),) = fetch(connection, query)
        fetch(
            connection,
            sql.SQL(GO_ON_AFTER).format(
                sequence=sql.Literal(sequence),
                of_sequence=sql.SQL(sequence),  # quoted by the server
                highest=sql.Literal(highest),
            ),
        )


def _rebase_log(connection: psycopg.Connection[Any], log: str, epoch: int) -> int:
    """Rewrite the transaction ids of a log and its cursors, by `.moved.states`."""
    parts: dict[str, sql.Composable] = {"log": sql.Identifier("saf", log)}
    states = [state for (state,) in fetch(connection, DISTINCT)]
    txids = {state: LOWEST_TXID + number for number, state in enumerate(states)}
    ((now, own),) = fetch(connection, NOW)
    # no complete row keeps a transaction id beyond this transaction's
    xmin, xmax = (min(int(limit), own) for limit in now.split(":")[:2])
    in_progress = [txid for txid in now.split(":")[2].split(",") if txid and int(txid) < xmax]
    if states and max(txids.values()) >= xmin:
        raise UsageError(
            f"saf.{log} has {len(states)} combinations of subscriptions and states, more than "
            "this new cluster has transaction ids to tell them by: drop unused subscriptions"
        )
    parts |= {"states": sql.Literal(states), "txids": sql.Literal(list(txids.values()))}
    rows = connection.execute(sql.SQL(RENUMBER).format(**parts)).rowcount if states else 0
    subscriptions = fetch(connection, SUBSCRIPTIONS, {"log": log})
    for place, (subscription_id,) in enumerate(subscriptions):

        def snapshot(letters: str, place: int = place) -> str:
            numbers = [str(t) for state, t in txids.items() if state and state[place] in letters]
            listed = [*numbers, *in_progress]
            return f"{listed[0] if numbers else xmin}:{xmax}:{','.join(listed)}"

        connection.execute(
            REWRITE,
            {
                "subscription_id": subscription_id,
                "epoch": epoch,
                "done": snapshot("hp"),
                "open": snapshot("p"),
            },
        )
    return rows
