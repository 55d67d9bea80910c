"""A new broker_id for a copy: the copy becomes a broker separate from its original.

`CREATE DATABASE … TEMPLATE` and a copied data directory create a database with its original's
broker_id. Both number their batches alike under one name, so a destination takes the messages of
one for repeats of the other's. Nothing in the copy was set back, and `saf rebase` would not help.

`give_new_id` makes the copy another broker, in one transaction:

- Messages that wait at the copy, and that the original will send, are deleted: messages that are
  pending, parked, dead or held in the copy and that the original has, has set aside or holds, by
  their message_id. The copy's own messages stay.
- Schedules are paused: the original runs them. An operator resumes those that the copy should run.
- The marks that destinations have acknowledged to the original are deleted, and so are the marks of
  other sources at the original: nobody knows the new broker yet.
- The broker gets a new broker_id. Members of the original, which do not run here, are removed, and
  shards are free.

Messages in the copied inbox stay, and its subscriptions receive them here as well. Each end of a
dialog exists twice afterwards, and the other end knows the original's. So the copy's open dialogs
are counted, and their applications end them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from saf.database import fetch
from saf.dialogs.statements import State
from saf.errors import UsageError
from saf.log.read import left
from saf.log.shards import IS_PRESENT

AT_ONCE = 50_000
"""Messages to ask the original about at a time."""

# Waits for current writers, and keeps out all others
LOCK = """
LOCK TABLE saf.outbox, saf.cursor, saf.member, saf.parked, saf.dead_letter, saf.held,
           saf.watermark, saf.acknowledged IN ACCESS EXCLUSIVE MODE
"""
PAUSE = "UPDATE saf.schedule SET paused = true"
ALIVE = f"SELECT m.name FROM saf.member m WHERE {IS_PRESENT}"

# As `saf status` counts them, for every subscription of the outbox
WAITING = f"""
SELECT DISTINCT message_id FROM (
    SELECT o.message_id FROM saf.subscription s JOIN saf.cursor c USING (subscription_id)
    CROSS JOIN LATERAL ({left("saf.outbox")}) AS o
    WHERE s.log = 'outbox'
    UNION ALL SELECT message_id FROM saf.parked
    UNION ALL SELECT message_id FROM saf.dead_letter
    UNION ALL SELECT message_id FROM saf.held WHERE due IS NOT NULL) AS waiting
"""
# One scan for many messages; a purge of the original removes nothing that it has set aside
KNOWN = """
SELECT message_id FROM saf.outbox WHERE message_id = ANY (%(message_ids)s)
UNION SELECT message_id FROM saf.parked WHERE message_id = ANY (%(message_ids)s)
UNION SELECT message_id FROM saf.dead_letter WHERE message_id = ANY (%(message_ids)s)
UNION SELECT message_id FROM saf.held WHERE message_id = ANY (%(message_ids)s)
"""
GIVE_UP = tuple(
    f"DELETE FROM saf.{table} WHERE message_id = ANY (%(message_ids)s)"
    for table in ("outbox", "parked", "dead_letter", "held")
)
FORGET = (
    "DELETE FROM saf.backoff b WHERE paused_at IS NULL AND NOT EXISTS ("
    "SELECT FROM saf.parked p "
    "WHERE (p.subscription_id, p.destination, p.kind, p.subject, p.broker) = "
    "(b.subscription_id, b.destination, b.kind, b.subject, b.broker))",
    "DELETE FROM saf.rejecting",
    "DELETE FROM saf.taken_out",
    "DELETE FROM saf.acknowledged",
    "DELETE FROM saf.watermark",
    "UPDATE saf.cursor SET owner = NULL, epoch = epoch + 1",
    "DELETE FROM saf.member",
)
NEW_ID = "UPDATE saf.broker SET broker_id = gen_random_uuid() RETURNING broker_id"
IDENTITY = """
SELECT b.broker_id, (SELECT system_identifier FROM pg_control_system()),
       (SELECT oid FROM pg_database WHERE datname = current_database())::bigint
FROM saf.broker b
"""
DIALOGS = "SELECT count(*) FROM saf.conversation WHERE NOT monolog AND state <> ALL (%(over)s)"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A database: its broker, its cluster, and its number there."""

    broker_id: UUID
    system_identifier: int
    oid: int
    """PostgreSQL numbers databases in the order in which they are created."""

    @property
    def database(self) -> tuple[int, int]:
        """Identifies the database among all others, whatever its name is."""
        return self.system_identifier, self.oid


@dataclass(frozen=True, kw_only=True)
class Renewed:
    """Result of giving a copy a new id."""

    broker_id: UUID
    given_up: int
    """Messages that waited at the copy, and that the original will send."""
    waiting: int
    """The copy's own messages, which wait as before."""
    open_dialogs: int


def place(connection: psycopg.Connection[Any]) -> Place:
    """Return a database's broker_id, cluster and number. Only reads."""
    ((broker_id, system_identifier, oid),) = fetch(connection, IDENTITY)
    return Place(broker_id=broker_id, system_identifier=system_identifier, oid=oid)


def give_new_id(
    connection: psycopg.Connection[Any], original: psycopg.Connection[Any] | None
) -> Renewed:
    """Make a copy a separate broker.

    Args:
        connection: to the copy, in autocommit, as the owner of its schema.
        original: to the broker that was copied; None if it cannot be asked. Then all messages that
            wait at the copy count as the copy's own.

    Raises:
        UsageError: a member runs at the copy, or the other broker is not its original.
    """
    if original is not None:
        own, other = place(connection), place(original)
        if own.broker_id != other.broker_id or own.database == other.database:
            raise UsageError(
                f"database {original.info.dbname!r} is not the original of "
                f"{connection.info.dbname!r}: they are not two databases with one broker_id"
            )
    with connection.transaction():
        connection.execute(LOCK)
        if members := [name for (name,) in fetch(connection, ALIVE)]:
            raise UsageError(f"stop all forwarders and receivers first: {', '.join(members)}")
        waiting = [id_ for (id_,) in fetch(connection, WAITING)]
        known = [id_ for ids in _some(waiting) for id_ in _known(original, ids)]
        for statement in GIVE_UP:
            connection.execute(statement, {"message_ids": known})
        for statement in (*FORGET, PAUSE):
            connection.execute(statement)
        ((dialogs,),) = fetch(connection, DIALOGS, {"over": [State.CLOSED, State.ERROR]})
        ((broker_id,),) = fetch(connection, NEW_ID)
    return Renewed(
        broker_id=broker_id,
        given_up=len(known),
        waiting=len(waiting) - len(known),
        open_dialogs=dialogs,
    )


def _known(original: psycopg.Connection[Any] | None, message_ids: Sequence[UUID]) -> list[UUID]:
    """Return those messages that the original has, or has set aside."""
    if original is None:
        return []
    return [id_ for (id_,) in fetch(original, KNOWN, {"message_ids": list(message_ids)})]


def _some(message_ids: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
    for first in range(0, len(message_ids), AT_ONCE):
        yield message_ids[first : first + AT_ONCE]
