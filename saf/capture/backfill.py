"""Backfill: the rows that a captured table has already, as messages, while writers continue.

Rows are sent in chunks, in the order of the primary key. A chunk is one transaction: it locks its
rows, sends them, and moves the backfill's place, so after a kill the next run continues where this
one stopped, and sends no row twice. A row that another session has locked is not waited for: it is
left over, and the next chunk tries it again. So a backfill takes part in no deadlock, and delays a
writer by a chunk at most.

A message has ``"op": "read"`` and the header `saf.capture.code.BACKFILL`. Its row is locked when
its id is drawn. So the ids of a row's messages have the order of the row's changes: a replica
that applies them in this order equals the table, whatever writers did in between.

Rows are sent as if they had just been inserted: the capture's condition applies to them as well.
Two runs at the same time: the second one is refused, with the session that has the first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Literal

import psycopg
from psycopg.rows import tuple_row

from saf.capture import code
from saf.capture.code import Place
from saf.capture.drift import drift
from saf.capture.stored import Capture, is_expression, listed, pin
from saf.capture.table import TableFacts, find
from saf.database import fetch, reason_of
from saf.errors import ConfigurationError, Unavailable, UsageError
from saf.log.rates import per_second

State = Literal["done", "paused", "cancelled", "stopped"]

CHUNK_ROWS = 1000
MOST_CHUNK_ROWS = 100_000
LONGEST_CHUNK_SECONDS = 0.5
"""A chunk has no more rows than the rate allows in this time."""
RETRY_SECONDS = 0.2
"""Pause between chunks that find nothing but locked rows."""
STEP_SECONDS, LOOK_SECONDS = 0.1, 1.0
"""How soon a stop request, and a pause, are noticed while the rate is waited for."""

SHOWN = """
b.backfill_id, c.schema_name, c.table_name, b.condition, b.chunk_rows, b.rate, b.last_key,
       jsonb_array_length(b.left_over) AS left_over, b.messages, b.begun_at, b.chunk_at,
       b.paused_at, b.paused_by, b.ended_at, b.cancelled
"""
LIST = f"""
SELECT {SHOWN} FROM saf.backfill b JOIN saf.capture c USING (capture_id)
ORDER BY c.schema_name, c.table_name, b.backfill_id
"""
OPEN = f"""
SELECT {SHOWN} FROM saf.backfill b JOIN saf.capture c USING (capture_id)
WHERE capture_id = %(capture_id)s AND ended_at IS NULL
"""
BEGIN = """
INSERT INTO saf.backfill (capture_id, condition, chunk_rows, rate)
VALUES (%(capture_id)s, %(condition)s, %(chunk_rows)s, %(rate)s)
"""
CHANGE = """
UPDATE saf.backfill SET chunk_rows = coalesce(%(chunk_rows)s, chunk_rows),
    rate = coalesce(%(rate)s, rate)
WHERE backfill_id = %(backfill_id)s
"""
PAUSE = """
UPDATE saf.backfill SET paused_at = clock_timestamp(), paused_by = session_user
WHERE backfill_id = %(backfill_id)s AND paused_at IS NULL
"""
RESUME = """
UPDATE saf.backfill SET paused_at = NULL, paused_by = NULL WHERE backfill_id = %(backfill_id)s
"""
CANCEL = """
UPDATE saf.backfill SET ended_at = clock_timestamp(), cancelled = true
WHERE backfill_id = %(backfill_id)s AND ended_at IS NULL
"""
# The row is locked until the chunk commits: pauses and cancellations come before it or after it
TAKE = """
SELECT capture_id, condition, chunk_rows, rate, last_key, left_over, paused_at IS NOT NULL,
       ended_at IS NOT NULL
FROM saf.backfill WHERE backfill_id = %(backfill_id)s FOR UPDATE
"""
GOES_ON = """
SELECT paused_at IS NULL AND ended_at IS NULL FROM saf.backfill WHERE backfill_id = %(backfill_id)s
"""
MOVE = """
UPDATE saf.backfill SET last_key = coalesce(CAST(%(last_key)s AS jsonb), last_key),
    left_over = CAST(%(left_over)s AS jsonb), messages = messages + %(messages)s,
    chunk_at = clock_timestamp(),
    ended_at = CASE WHEN %(is_over)s THEN clock_timestamp() END
WHERE backfill_id = %(backfill_id)s
"""
TABLE_OF = "SELECT format('%%I.%%I', CAST(%(schema)s AS text), CAST(%(table)s AS text))"

# One run at a time: the lock ends with its session
LOCK = "SELECT pg_try_advisory_lock(hashtextextended('saf backfill', %(backfill_id)s))"
UNLOCK = "SELECT pg_advisory_unlock(hashtextextended('saf backfill', %(backfill_id)s))"
HOLDER = """
SELECT l.pid, a.usename::text, a.application_name, host(a.client_addr)
FROM (SELECT hashtextextended('saf backfill', %(backfill_id)s) AS number) AS k
     JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
     AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
     AND l.classid::bigint = (k.number >> 32) & 4294967295
     AND l.objid::bigint = k.number & 4294967295
     LEFT JOIN pg_stat_activity a USING (pid)
"""


@dataclass(frozen=True, kw_only=True)
class Backfill:
    """A backfill that a database has."""

    backfill_id: int
    schema_name: str
    table_name: str
    condition: str | None
    chunk_rows: int
    rate: str | None
    last_key: list[str] | None
    """Primary key up to which rows were read; None: none was read."""
    left_over: int
    """Rows before it that other sessions had locked."""
    messages: int
    begun_at: datetime
    chunk_at: datetime | None
    """Time of the last chunk."""
    paused_at: datetime | None
    paused_by: str | None
    ended_at: datetime | None
    cancelled: bool

    @property
    def called(self) -> str:
        """The table's schema and name."""
        return f"{self.schema_name}.{self.table_name}"

    @property
    def state(self) -> str:
        """Its state in one word."""
        if self.ended_at is not None:
            return "cancelled" if self.cancelled else "done"
        return "open" if self.paused_at is None else "paused"

    def as_dict(self) -> dict[str, Any]:
        """Return the backfill as a dict for JSON."""
        texts = {
            name: value.isoformat()
            for name, value in asdict(self).items()
            if isinstance(value, datetime)
        }
        return {**asdict(self), **texts, "state": self.state}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of a run; None: as the open backfill has it, or the default."""

    condition: str | None = None
    chunk_rows: int | None = None
    rate: str | None = None

    def __post_init__(self) -> None:
        if self.rate is not None:
            try:
                per_second(self.rate)
            except ValueError as error:
                raise UsageError(f"--rate {error}") from None
        if self.chunk_rows is not None and not 1 <= self.chunk_rows <= MOST_CHUNK_ROWS:
            raise UsageError(f"--chunk {self.chunk_rows}: expected 1 to {MOST_CHUNK_ROWS:,}")
        if self.condition is not None:
            is_expression(self.condition, "--where")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run did."""

    state: State
    messages: int
    """Messages that this run has sent."""
    backfill: Backfill


def backfills(connection: psycopg.Connection[Any]) -> list[Backfill]:
    """Return the backfills of a database, by table, oldest first."""
    return [_backfill(row) for row in fetch(connection, LIST)]


def open_backfill(connection: psycopg.Connection[Any], capture: Capture) -> Backfill | None:
    """Return the backfill of a capture that has not ended, if there is one."""
    found = fetch(connection, OPEN, {"capture_id": capture.capture_id})
    return _backfill(found[0]) if found else None


def pause(connection: psycopg.Connection[Any], backfill: Backfill) -> None:
    """Pause a backfill: its run ends after the chunk in hand, and no other run begins."""
    connection.execute(PAUSE, {"backfill_id": backfill.backfill_id})


def resume(connection: psycopg.Connection[Any], backfill: Backfill) -> None:
    """End a pause; the next run continues."""
    connection.execute(RESUME, {"backfill_id": backfill.backfill_id})


def cancel(connection: psycopg.Connection[Any], backfill: Backfill) -> None:
    """End a backfill before it is complete; messages that were sent stay."""
    connection.execute(CANCEL, {"backfill_id": backfill.backfill_id})


def run(
    connection: psycopg.Connection[Any],
    capture: Capture,
    wanted: Wanted,
    stopping: Callable[[], bool] = lambda: False,
) -> Ran:
    """Begin a backfill, or continue the open one, until it is done, paused, cancelled or stopped.

    ``connection`` is in autocommit.

    Raises:
        ConfigurationError: the capture differs from the table, the backfill is paused, or its
            condition is another one; or another session runs it.
        Unavailable: another session runs the backfill.
    """
    for found in drift(connection, capture):
        if found.misses or found.fails:
            raise ConfigurationError(
                f"table {capture.called!r} is not captured as written, so a backfill would be "
                f"overtaken: {found.what}. `saf capture show {capture.called}` has the repair"
            )
    backfill = _opened(connection, capture, wanted)
    with_id = {"backfill_id": backfill.backfill_id}
    ((taken,),) = fetch(connection, LOCK, with_id)
    if not taken:
        raise Unavailable(f"backfill of {capture.called}", _holder(connection, backfill))
    try:
        return _run(connection, backfill, stopping)
    finally:
        if not connection.broken and not connection.closed:
            connection.execute(UNLOCK, with_id)


def _opened(connection: psycopg.Connection[Any], capture: Capture, wanted: Wanted) -> Backfill:
    """Return the open backfill, with the wanted rate; begin one if there is none."""
    with connection.transaction():
        found = open_backfill(connection, capture)
        if found is None:
            where = wanted.condition
            where = where if where is None else is_expression(where, "--where")
            _check(connection, capture, where)
            params = {
                "capture_id": capture.capture_id,
                "condition": where,
                "chunk_rows": wanted.chunk_rows or CHUNK_ROWS,
                "rate": wanted.rate,
            }
            connection.execute(BEGIN, params)
        else:
            _may_continue(found, wanted)
            connection.execute(
                CHANGE,
                {
                    "backfill_id": found.backfill_id,
                    "chunk_rows": wanted.chunk_rows,
                    "rate": wanted.rate,
                },
            )
        return _backfill(fetch(connection, OPEN, {"capture_id": capture.capture_id})[0])


def _may_continue(found: Backfill, wanted: Wanted) -> None:
    if found.paused_at is not None:
        raise ConfigurationError(
            f"the backfill of {found.called!r} was paused by {found.paused_by!r} at "
            f"{found.paused_at:%Y-%m-%d %H:%M:%S%z}: `saf backfill resume {found.called}`"
        )
    if wanted.condition is not None and wanted.condition.strip() != found.condition:
        raise ConfigurationError(
            f"the backfill of {found.called!r} that is open has --where "
            f"{found.condition or 'of no rows left out'!r}: leave --where out to continue it, or "
            f"`saf backfill cancel {found.called}`"
        )


def _check(connection: psycopg.Connection[Any], capture: Capture, where: str | None) -> None:
    """Try the statement of a chunk, without rows, and roll it back."""
    try:
        with connection.transaction():
            pin(connection)
            table = _table(connection, capture)
            _chunk(connection, capture, table, Place(where=where, limit=0, backfill_id=0))
            raise psycopg.Rollback
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
        raise ConfigurationError(
            f"table {capture.called!r} cannot be read"
            + (f" with --where {where!r}" if where else "")
            + f": {reason_of(error)}"
        ) from None


def _holder(connection: psycopg.Connection[Any], backfill: Backfill) -> str:
    found = fetch(connection, HOLDER, {"backfill_id": backfill.backfill_id})
    if not found:
        return "another session runs it; try again"
    ((pid, user, application, address), *_) = found
    who = ", ".join(str(part) for part in (user, application, address) if part)
    return f"another session runs it: pid {pid} ({who})"


def _run(
    connection: psycopg.Connection[Any],
    backfill: Backfill,
    stopping: Callable[[], bool],
) -> Ran:
    sent = 0
    state: State | None = None
    free_at = time.monotonic()
    while state is None:
        if stopping():
            state = "stopped"
            break
        state, messages, rows, rate = _step(connection, backfill)
        sent += messages
        if rate is not None:
            # a slow time saves little for later
            free_at = max(free_at, time.monotonic() - LONGEST_CHUNK_SECONDS) + rows / rate
        if rows == 0:
            free_at = max(free_at, time.monotonic() + RETRY_SECONDS)
        if state is None:
            _wait(connection, backfill, free_at, stopping)
    found = {item.backfill_id: item for item in backfills(connection)}
    return Ran(state=state, messages=sent, backfill=found.get(backfill.backfill_id, backfill))


def _wait(
    connection: psycopg.Connection[Any],
    backfill: Backfill,
    until: float,
    stopping: Callable[[], bool],
) -> None:
    """Wait for the rate, or until the next step would end the run."""
    look_at = time.monotonic() + LOOK_SECONDS
    while not stopping() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, STEP_SECONDS))
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_SECONDS
            if fetch(connection, GOES_ON, {"backfill_id": backfill.backfill_id}) != [(True,)]:
                return


def _step(
    connection: psycopg.Connection[Any], backfill: Backfill
) -> tuple[State | None, int, int, float | None]:
    """Send one chunk; return the state if it is the end, messages, rows read, and the rate."""
    with connection.transaction():
        found = fetch(connection, TAKE, {"backfill_id": backfill.backfill_id})
        if not found:
            return "cancelled", 0, 0, None  # its capture was removed
        ((capture_id, where, chunk_rows, rate_text, last_key, left_over, paused, ended),) = found
        if ended or paused:
            return ("cancelled" if ended else "paused"), 0, 0, None
        (capture,) = (item for item in listed(connection) if item.capture_id == capture_id)
        rate = None if rate_text is None else per_second(rate_text)
        if rate is not None:
            chunk_rows = max(1, min(chunk_rows, int(rate * LONGEST_CHUNK_SECONDS)))
        pin(connection)
        place = Place(
            where=where,
            limit=max(0, chunk_rows - len(left_over)),
            backfill_id=backfill.backfill_id,
            last_key=last_key,
            left_over=left_over,
        )
        messages, rows, last, still = _chunk(
            connection, capture, _table(connection, capture), place
        )
        is_over = place.limit > 0 and rows < place.limit and not still
        connection.execute(
            MOVE,
            {
                "backfill_id": backfill.backfill_id,
                "last_key": None if last is None else json.dumps(last),
                "left_over": json.dumps(still),
                "messages": messages,
                "is_over": is_over,
            },
        )
    return ("done" if is_over else None), messages, rows, rate


def _chunk(
    connection: psycopg.Connection[Any], capture: Capture, table: TableFacts, place: Place
) -> tuple[int, int, list[str] | None, list[list[str]]]:
    # binary, and so in the extended protocol, which takes one statement only
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(code.chunk(capture, table, place), binary=True)
        ((messages, rows, last, still),) = cursor.fetchall()
    return messages, rows, last, still


def _table(connection: psycopg.Connection[Any], capture: Capture) -> TableFacts:
    return find(connection, capture.quoted)


def _backfill(row: tuple[Any, ...]) -> Backfill:
    names = [field.name for field in fields(Backfill)]
    return Backfill(**dict(zip(names, row, strict=True)))
