"""Staging: the tasks of a job send together and once, although tasks and jobs may be retried.

Each attempt of a task writes its messages into saf.staged, in its own transaction. Nobody reads
them there. When the job's last task is done, `send` moves the messages of the successful attempts
to the outbox, together with a mark in saf.sink, in one transaction. So all messages of a job are
sent, or none. An application that sends the same version again, because the answer was lost, sends
nothing more.

*Attempts.* The number of an attempt contains the time of its beginning, so the messages of old
attempts are a range of the primary key, and no list of attempts is needed. The rest of the number
is random. If two attempts drew the same number, the primary key would fail the second.

*Order.* Message ids rise in the given order of the attempts, and within an attempt in the order in
which its task wrote the messages.

*Crashes.* saf.staged is unlogged: staging costs half as much, and a crash of the server empties the
table. `send` compares the number of messages with the number that the tasks have written, and sends
nothing if some are missing. Messages of a job that died are orphans, which `collect` removes.

Functions take a psycopg connection in autocommit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from saf.columns import SENT
from saf.database import fetch
from saf.errors import StagedLost

MESSAGE = tuple(name for name in SENT if name != "message_id")
"""Columns of a staged message; the outbox assigns its id."""

ORPHAN_SECONDS = 86400.0
"""Age, in seconds, at which unsent staged messages are orphans: no job takes longer."""

# {moment}, in seconds, is the higher half; the lower one has 31 bits
NUMBERS_FROM = "CAST(extract(epoch FROM {moment}) AS bigint) << 31"
BEGIN = f"SELECT ({NUMBERS_FROM.format(moment='now()')}) + CAST(random() * 2147483647 AS bigint)"

# A server whose default is off would acknowledge commits that a crash could still lose
DURABLE = """
SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
            THEN set_config('synchronous_commit', 'on', true) END
"""

# Of two concurrent sends, the second waits here for the first, and then finds its mark
MARK = """
INSERT INTO saf.sink AS s (application, version, messages)
VALUES (%(application)s, %(version)s, %(messages)s)
ON CONFLICT (application) DO UPDATE SET
    version = excluded.version, messages = excluded.messages, sent_at = now()
WHERE s.version < excluded.version
RETURNING application
"""
MARKED = "SELECT version FROM saf.sink WHERE application = %(application)s"

# In index order, so that ids are drawn in that order
SEND = f"""
INSERT INTO saf.outbox ({", ".join(MESSAGE)})
SELECT {", ".join(f"CAST({name} AS {SENT[name]})" for name in MESSAGE)}
FROM saf.staged WHERE attempt = %(attempt)s ORDER BY number
"""
# The count comes from here and not from the INSERT, because a local route's trigger diverts rows
REMOVE = "DELETE FROM saf.staged WHERE attempt = ANY (%(attempts)s)"

LONG_AGO = "now() - make_interval(secs => %(seconds)s)"
FORGET_ORPHANS = f"""
DELETE FROM saf.staged WHERE attempt < {NUMBERS_FROM.format(moment=LONG_AGO)}
"""
FORGET_MARKS = f"DELETE FROM saf.sink WHERE version IS NULL AND sent_at < {LONG_AGO}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Messages that one attempt of a task has staged."""

    attempt: int
    messages: int


def begin(connection: psycopg.Connection[Any]) -> int:
    """Return the number of a new attempt."""
    ((attempt,),) = fetch(connection, BEGIN)
    return int(attempt)


def send(
    connection: psycopg.Connection[Any],
    what: str,
    application: str,
    version: int | None,
    attempts: Sequence[Attempt],
) -> bool:
    """Send the staged messages of some attempts, in order; False if they were already sent.

    Args:
        connection: to the broker.
        what: the broker's name in errors.
        application: the sender, which has its own sequence of versions.
        version: the version to send; a version that is not higher than the last was already sent.
            None: the application sends only once.
        attempts: in the order in which their messages are to be sent.

    Raises:
        StagedLost: some staged messages are gone; nothing was sent.
    """
    numbers = {"attempts": [attempt.attempt for attempt in attempts]}
    messages = sum(attempt.messages for attempt in attempts)
    with connection.transaction():
        connection.execute(DURABLE)
        mark = {"application": application, "version": version, "messages": messages}
        fresh = bool(fetch(connection, MARK, mark))
        if fresh:
            for attempt in attempts:
                connection.execute(SEND, {"attempt": attempt.attempt})
        removed = connection.execute(REMOVE, numbers).rowcount
        if fresh and removed != messages:
            raise StagedLost(what, messages, removed)
    return fresh


def sent_version(connection: psycopg.Connection[Any], application: str) -> int | None:
    """Return the last version that an application has sent; None without one."""
    found = fetch(connection, MARKED, {"application": application})
    return None if not found else found[0][0]


def discard(connection: psycopg.Connection[Any], attempts: Iterable[int]) -> int:
    """Remove staged messages of a failed job's attempts; return how many."""
    return connection.execute(REMOVE, {"attempts": list(attempts)}).rowcount


def collect(connection: psycopg.Connection[Any], seconds: float = ORPHAN_SECONDS) -> int:
    """Remove orphans and old marks of single sends; return how many messages were removed."""
    connection.execute(FORGET_MARKS, {"seconds": seconds})
    return connection.execute(FORGET_ORPHANS, {"seconds": seconds}).rowcount
