"""The ring: old messages leave a log a whole slot at a time, never row by row.

A log is partitioned into eight slots, and its ids walk through them. A slot that they have left is
purged by TRUNCATE, once every subscription of the log has completed each of its rows and the newest
row is older than the retention. Nothing is deleted, so no dead rows need a vacuum, and a long
transaction that holds the xmin horizon delays nothing.

Why no message is lost, whatever is written and read at the same time:

- A row that is not committed has its transaction's lock on the slot, even in a prepared
  transaction. ACCESS EXCLUSIVE is granted only after all such transactions have ended, and nobody
  writes while it is held. An id that was drawn and not inserted yet is a row that comes after the
  TRUNCATE.
- Under that lock, with a snapshot taken after it, the purge searches for any row that some cursor
  does not have in ``done``. An open batch counts as not done, so it never loses a row. A
  subscription created at that time reads nothing of the slot before the TRUNCATE, so its batches
  never change.
- Facts found before the lock, because they take reading the whole slot (its age, its copy in an
  archive), are true of one snapshot. That snapshot is checked in the same way as a cursor's
  ``done``: if it does not show every row, the slot is kept.

Both checks are look-ups in the index (shard, txid), so the lock is held for milliseconds. The purge
waits for the lock no longer than a short lock_timeout, and does not lock a slot that is empty or
needed. A slot that cannot be purged now is reported; the next purge tries again.

A quiet application never leaves its slot. So the slot is *rotated*: the rest of its ids are drawn
and thrown away (0.4 s, 3 MB of WAL). Drawing uses nextval, so no id is assigned twice and ids never
decrease, even if others draw at the same time. ALTER SEQUENCE … RESTART would do it in one write,
but it needs the sequence's owner, and waits for every open transaction that has sent something,
while all other senders wait behind it.

TRUNCATE is not MVCC: a transaction with an older snapshot that reads the slot only afterwards finds
it empty. A transaction that has read the log holds a lock on each slot, which keeps the slots.

The current slot is never purged, nor is an inbox without subscriptions, because it is unknown then
which messages are still wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql

from saf.database import fetch
from saf.log.read import BY_INDEX, since

SLOTS = 8
SLOT_ROWS = 1 << 20

LOCK_TIMEOUT_SECONDS = 0.2
"""Seconds to wait for a lock; few, because readers of the log queue behind it."""

AGE_COLUMN = {"outbox": "created_at", "inbox": "received_at"}
"""For each log, the column with a row's time, for its age."""

State = Literal[
    "empty",  # contains nothing; was not locked
    "current",  # in use: new messages go here
    "rotated",  # was current; new messages go to the next one
    "retained",  # a message is younger than the retention
    "unread",  # the log has no subscription, so the messages still wanted are unknown
    "needed",  # a subscription has not completed all of its messages
    "locked",  # a transaction has written or read it, and did not end in time
    "changed",  # a message was added while the slot was read
    "purged",
    "purgeable",  # "purged" of a dry run
    "rotatable",  # "rotated" of a dry run
]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot of a log's ring, and what a purge did with it."""

    log: str
    number: int
    state: State
    subscription: str | None = None
    """A subscription that needs the slot; others may need it too."""
    messages: int | None = None
    """Messages that were purged, or would be."""
    archive: Path | str | None = None
    """The file or table that now contains the messages."""

    @property
    def table(self) -> str:
        """The partition's name, in the schema saf."""
        return f"{self.log}_{self.number}"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a slot at one moment."""

    slot: Slot
    snapshot: str
    """The moment, as the text of a pg_snapshot."""
    messages: int
    first_id: int | None
    last_id: int | None
    age_seconds: float | None
    """Age of the newest message."""


Archive = Callable[[Contents], Path | str | None]
"""Writes a slot's messages to a file or a table, durably, and returns its name; None if the
messages have changed. Messages that are archived already are not written again. See
`saf.log.archive`."""

NEXT_ID = "SELECT last_value + is_called::int FROM {sequence}"
SEQUENCE = "SELECT pg_get_serial_sequence('saf.' || %(log)s, 'id')"

# TRUNCATE leaves a file of length 0, and the first row, committed or not, makes it longer. So
# finding an empty slot takes no read of its rows.
SIZES = """
SELECT slot, pg_relation_size(('saf.' || %(log)s || '_' || slot)::regclass) = 0
FROM generate_series(0, %(slots)s - 1) AS slot ORDER BY slot
"""

# A shard without a cursor has completed nothing.
READERS = """
SELECT s.name, coalesce(c.done, '1:1:')::text AS done, array_agg(shard)
FROM saf.subscription s CROSS JOIN saf.broker b CROSS JOIN generate_series(0, b.shards - 1) AS shard
LEFT JOIN saf.cursor c USING (subscription_id, shard)
WHERE s.log = %(log)s
GROUP BY 1, 2 ORDER BY 1, 2
"""

BEHIND = "(SELECT {name} WHERE EXISTS ({since}))"

# The age of each shard's newest (or oldest) transaction, by the index. Another row may be younger
# (or older) still, if a transaction was long or a sender set the time itself.
AGE = """
SELECT extract(epoch FROM clock_timestamp() - {pick}(one.written))::float
FROM saf.broker b CROSS JOIN generate_series(0, b.shards - 1) AS number
CROSS JOIN LATERAL (
    SELECT {written} AS written FROM {slot} AS slot WHERE slot.shard = number::smallint
    ORDER BY txid {order} LIMIT 1) AS one
"""
NEWEST = {"pick": sql.SQL("max"), "order": sql.SQL("DESC")}
OLDEST = {"pick": sql.SQL("min"), "order": sql.SQL("ASC")}

SURVEY = """
SELECT pg_current_snapshot()::text, count(*), min(id), max(id),
       extract(epoch FROM clock_timestamp() - max({written}))::float
FROM {slot}
"""

# READ COMMITTED, so that each statement after the lock sees all earlier commits
BEGIN_TO_LOCK = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
LOCK_TIMEOUT = "SELECT set_config('lock_timeout', %(milliseconds)s, true)"
LOCK = "LOCK TABLE ONLY {slot} IN ACCESS EXCLUSIVE MODE"
TRUNCATE = "TRUNCATE ONLY {slot}"

DRAW = "SELECT max(nextval(%(sequence)s::regclass)) FROM generate_series(1, %(ids)s)"


def purge(
    connection: psycopg.Connection[Any],
    log: str,
    *,
    retention_seconds: float,
    archive: Archive | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    dry_run: bool = False,
) -> list[Slot]:
    """Empty each slot of a log that can be purged; return all slots with their states.

    A slot that cannot be archived does not stop the others: its error is raised at the end.
    """
    current = slot_of(_next_id(connection, log))
    slots = []
    not_archived: Exception | None = None
    for number, empty in fetch(connection, SIZES, {"log": log, "slots": SLOTS}):
        state: State = "current" if number == current else "empty"
        slot = Slot(log=log, number=number, state=state)
        if number != current and not empty:
            try:
                slot = _purge_slot(
                    connection,
                    slot,
                    retention_seconds=retention_seconds,
                    archive=archive,
                    lock_timeout_seconds=lock_timeout_seconds,
                    dry_run=dry_run,
                )
            except psycopg.Error:
                raise
            except Exception as error:  # the archive's
                not_archived = not_archived or error
        slots.append(slot)
    if not_archived is not None:
        raise not_archived
    return slots


def rotate(
    connection: psycopg.Connection[Any],
    log: str,
    *,
    rotate_after_seconds: float,
    dry_run: bool = False,
) -> bool:
    """Leave the current slot if it has a message of that age and the next slot is empty.

    Blocks no writer, and is safe while others rotate or write.
    """
    next_id = _next_id(connection, log)
    current = slot_of(next_id)
    sizes = dict(fetch(connection, SIZES, {"log": log, "slots": SLOTS}))
    if sizes[current] or not sizes[(current + 1) % SLOTS]:
        return False
    age = _age(connection, Slot(log=log, number=current, state="current"), OLDEST)
    if age is None or age < rotate_after_seconds:
        return False
    if not dry_run:
        left = SLOT_ROWS - next_id % SLOT_ROWS
        fetch(connection, DRAW, {"sequence": _sequence(connection, log), "ids": left})
    return True


def _purge_slot(
    connection: psycopg.Connection[Any],
    slot: Slot,
    *,
    retention_seconds: float,
    archive: Archive | None,
    lock_timeout_seconds: float,
    dry_run: bool,
) -> Slot:
    youngest = _age(connection, slot, NEWEST)
    if youngest is not None and youngest < retention_seconds:
        return replace(slot, state="retained")
    with connection.transaction():
        obstacle = _obstacle(connection, slot)
    if obstacle:
        return obstacle
    try:
        if not dry_run:
            # Fail here if a long transaction holds the slot, before reading the whole slot.
            with _exclusively(connection, slot, lock_timeout_seconds):
                pass
        contents = _survey(connection, slot)
        if contents.age_seconds is not None and contents.age_seconds < retention_seconds:
            return replace(slot, state="retained")
        if dry_run:
            return replace(slot, state="purgeable", messages=contents.messages)
        return _truncate(connection, contents, archive, lock_timeout_seconds)
    except psycopg.errors.LockNotAvailable:
        return replace(slot, state="locked")


def _truncate(
    connection: psycopg.Connection[Any],
    contents: Contents,
    archive: Archive | None,
    lock_timeout_seconds: float,
) -> Slot:
    """Archive ``contents``, then empty the slot if it contains nothing else."""
    slot, file = contents.slot, None
    if archive and contents.messages:
        file = archive(contents)
        if file is None:
            return replace(slot, state="changed")
    with _exclusively(connection, slot, lock_timeout_seconds):
        obstacle = _obstacle(connection, slot, contents)
        if obstacle:
            return obstacle
        connection.execute(_compose(TRUNCATE, slot))
    return replace(slot, state="purged", messages=contents.messages, archive=file)


def _obstacle(
    connection: psycopg.Connection[Any], slot: Slot, contents: Contents | None = None
) -> Slot | None:
    """Return the reason why a slot has to stay now, or None. Call it in a transaction.

    A row that is not in ``contents`` is a reason too.
    """
    connection.execute(BY_INDEX)
    readers = fetch(connection, READERS, {"log": slot.log})
    if not readers:
        return replace(slot, state="unread")
    subscription = _behind(connection, slot, readers)
    if subscription:
        return replace(slot, state="needed", subscription=subscription)
    shards = [shard for _, _, numbers in readers for shard in numbers]
    if contents and _behind(connection, slot, [("", contents.snapshot, shards)]) is not None:
        return replace(slot, state="changed")
    return None


def _behind(
    connection: psycopg.Connection[Any], slot: Slot, readers: Sequence[tuple[str, str, list[int]]]
) -> str | None:
    """Find a reader whose snapshot does not show every row of the slot, in one round trip."""
    query = sql.SQL(" UNION ALL ").join(
        sql.SQL(BEHIND).format(name=sql.Literal(name), since=since(slot.table, shards, done))
        for name, done, shards in readers
    )
    found = fetch(connection, query + sql.SQL(" LIMIT 1"))
    return found[0][0] if found else None


@contextmanager
def _exclusively(
    connection: psycopg.Connection[Any], slot: Slot, lock_timeout_seconds: float
) -> Iterator[None]:
    """Run the block in a transaction that has locked the slot against all readers and writers.

    Raises:
        psycopg.errors.LockNotAvailable: the lock was not free within the timeout.
    """
    with connection.transaction():
        connection.execute(BEGIN_TO_LOCK)
        # 0 would mean no timeout
        milliseconds = max(1, round(lock_timeout_seconds * 1000))
        connection.execute(LOCK_TIMEOUT, {"milliseconds": str(milliseconds)})
        connection.execute(_compose(LOCK, slot))
        yield


def _survey(connection: psycopg.Connection[Any], slot: Slot) -> Contents:
    """Read the whole slot, without a lock."""
    ((snapshot, messages, first_id, last_id, age),) = fetch(connection, _compose(SURVEY, slot))
    return Contents(
        slot=slot,
        snapshot=snapshot,
        messages=messages,
        first_id=first_id,
        last_id=last_id,
        age_seconds=age,
    )


def _age(
    connection: psycopg.Connection[Any], slot: Slot, columns: dict[str, sql.SQL]
) -> float | None:
    """Return the approximate age of a slot's newest or oldest message; None if empty."""
    with connection.transaction():
        connection.execute(BY_INDEX)
        ((age,),) = fetch(connection, _compose(AGE, slot, **columns))
    return None if age is None else float(age)


def _compose(statement: str, slot: Slot, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(statement).format(
        slot=sql.Identifier("saf", slot.table),
        written=sql.Identifier(AGE_COLUMN[slot.log]),
        **parts,
    )


def slot_of(id_: int) -> int:
    """Return the slot of an id, as the tables are partitioned.

    >>> slot_of(1), slot_of((1 << 20) - 1), slot_of(1 << 20), slot_of(8 << 20)
    (0, 0, 1, 0)
    """
    return id_ // SLOT_ROWS % SLOTS


def _next_id(connection: psycopg.Connection[Any], log: str) -> int:
    """Return the id that the next message gets."""
    sequence = sql.SQL(_sequence(connection, log))  # quoted by the server
    ((next_id,),) = fetch(connection, sql.SQL(NEXT_ID).format(sequence=sequence))
    return int(next_id)


def _sequence(connection: psycopg.Connection[Any], log: str) -> str:
    ((sequence,),) = fetch(connection, SEQUENCE, {"log": log})
    return str(sequence)
