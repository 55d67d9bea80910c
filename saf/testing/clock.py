"""Letting time pass: move back all times at which something becomes due.

SQL decides when something is due, by the database's clock, which no test can set. So to let an hour
pass, everything that saf has stored is moved an hour into the past, and becomes due an hour
earlier:

    outbox, inbox           created_at, deliver_at, expires_at; the inbox also received_at
    held                    created_at, due, expires_at, forget_at
    parked, dead_letter     created_at, deliver_at, expires_at
    backoff                 since; next_attempt_at, unless it waits for an operator or a handler
    member                  joined_at, lease_until
    conversation            created_at, changed_at, expires_at
    schedule                next_run, last_run, anchor

Everything else stays: the application's tables, except for named columns; uncommitted rows; and the
times that tell batches apart (``opened_at``, and ``parked_at`` and ``dead_letter_at``, which are
compared with it). Whether a message in an open batch of the outbox has expired depends on the time
at which the batch was opened. That time does not move, and neither does the message's
``expires_at``: a batch that is read again has the same messages. A signed message with
``deliver_at`` or ``expires_at`` is refused if time passes while it waits, because it was signed
with other times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import groupby

from psycopg import sql

from saf.database import Dsn
from saf.errors import UsageError
from saf.setaside.parking import BLOCKED
from saf.testing.databases import Database

MESSAGE = ("created_at", "deliver_at", "expires_at")
MOVED = {
    "outbox": MESSAGE,
    "inbox": (*MESSAGE, "received_at"),
    "held": ("created_at", "due", "expires_at", "forget_at"),
    "parked": MESSAGE,
    "dead_letter": MESSAGE,
    "backoff": ("next_attempt_at", "since"),
    "member": ("joined_at", "lease_until"),
    "conversation": ("created_at", "changed_at", "expires_at"),
    "schedule": ("next_run", "last_run", "anchor"),
}
"""Columns of the schema saf that move, by table."""

# The time at which their batch was opened decides about these rows
IN_HAND = """
EXISTS (SELECT FROM saf.cursor c JOIN saf.subscription s USING (subscription_id)
        WHERE s.log = 'outbox' AND c.shard = outbox.shard AND c.open IS NOT NULL
          AND pg_visible_in_snapshot(outbox.txid, c.open)
          AND NOT pg_visible_in_snapshot(outbox.txid, c.done))
"""

EXPIRY = sql.Identifier("saf", "outbox"), "expires_at"

LATER = "UPDATE {} SET {}"
EARLIER = (
    "{column} = CASE WHEN {column} < {never} AND NOT {stays} THEN {column} - {by} ELSE {column} END"
)


class Clock:
    """The time of a test's databases; see `saf.testing.clock`."""

    def __init__(self, databases: list[Database]) -> None:
        self._databases = databases

    def move(
        self,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        columns: Iterable[str] = (),
    ) -> None:
        """Let time pass in every database of the test.

        Args:
            days, hours, minutes, seconds: the time that passes, in total; must be positive.
            columns: columns of the application's tables to move, too, e.g. ``"orders.due_at"``,
                with a schema in front if needed. Each database must have them.

        Raises:
            UsageError: time would not go forward, a column is named without its table, or Django
                never commits the test.
        """
        by = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        for database in self._databases:
            database.require_commits("saf_clock")
            let_time_pass(database.dsn, by, columns)


def let_time_pass(dsn: Dsn, by: timedelta, columns: Iterable[str] = ()) -> None:
    """Move the times in one database back, in one transaction; see `Clock.move`."""
    if by <= timedelta(0):
        raise UsageError(f"time goes forward only, and not by {by}")
    own = [("saf", table, column) for table, names in MOVED.items() for column in names]
    extra = sorted(map(_parts, columns))
    with dsn.connect(role="test") as connection:
        for table, names in _by_table([*own, *extra]):
            earlier = [
                sql.SQL(EARLIER).format(
                    column=sql.Identifier(name),
                    by=sql.Literal(by),
                    never=sql.Literal(BLOCKED),
                    stays=sql.SQL(IN_HAND if (table, name) == EXPIRY else "false"),
                )
                for name in names
            ]
            connection.execute(sql.SQL(LATER).format(table, sql.SQL(", ").join(earlier)))


def _parts(column: str) -> tuple[str, ...]:
    parts = tuple(column.split("."))
    if len(parts) not in (2, 3) or not all(parts):
        raise UsageError(f"column {column!r}: expected TABLE.COLUMN or SCHEMA.TABLE.COLUMN")
    return parts


def _by_table(
    columns: Iterable[tuple[str, ...]],
) -> Iterator[tuple[sql.Identifier, list[str]]]:
    for table, group in groupby(columns, key=lambda parts: parts[:-1]):
        yield sql.Identifier(*table), [parts[-1] for parts in group]
