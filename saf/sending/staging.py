"""Staging: what the tasks of a job send together, once, although tasks and jobs are tried again.

Each attempt of a task writes its messages into saf.staged, in one transaction of its own. Nobody
reads them there. When the job's last task is done, `send` moves what the successful attempts have
written to the outbox, together with a mark in saf.sink, in one transaction. So either all of a
job's messages are sent or none, and an application that comes again with the same version, because
it has not heard the answer, sends nothing more.

*Order.* The ids of the messages rise in the order of the attempts that are given, and within each
attempt in the order in which its task wrote them.

*Crashes.* saf.staged is not logged: what is staged there costs half, and a crash of the server
empties it. `send` compares how many messages there are with how many the tasks have written, and
sends nothing if some are missing. What a job that died has left is an orphan, which `collect`
removes.

The functions take a psycopg connection, in autocommit.
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
"""The columns of a message that is staged; the outbox gives it its id."""

ORPHAN_SECONDS = 86400.0
"""How old, in seconds, an orphan is, which was staged and not sent: no job takes longer."""

BEGIN = "INSERT INTO saf.staging DEFAULT VALUES RETURNING attempt"

# A server whose default is off would acknowledge what a crash could still lose
DURABLE = """
SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
            THEN set_config('synchronous_commit', 'on', true) END
"""

# Of two at the same time, the second waits here for the first, and then finds its mark
MARK = """
INSERT INTO saf.sink AS s (application, version, messages)
VALUES (%(application)s, %(version)s, %(messages)s)
ON CONFLICT (application) DO UPDATE SET
    version = excluded.version, messages = excluded.messages, sent_at = now()
WHERE s.version < excluded.version
RETURNING application
"""
MARKED = "SELECT version FROM saf.sink WHERE application = %(application)s"

# By the index, in the order in which the ids are drawn
SEND = f"""
INSERT INTO saf.outbox ({", ".join(MESSAGE)})
SELECT {", ".join(f"CAST({name} AS {SENT[name]})" for name in MESSAGE)}
FROM saf.staged WHERE attempt = %(attempt)s ORDER BY number
"""
# Counted here and not by what was inserted, because a local route's trigger takes rows out
REMOVE = "DELETE FROM saf.staged WHERE attempt = ANY (%(attempts)s)"
END = "DELETE FROM saf.staging WHERE attempt = ANY (%(attempts)s)"

ORPHANS = """
SELECT array_agg(attempt) FROM saf.staging
WHERE created_at < now() - make_interval(secs => %(seconds)s)
"""
FORGET_MARKS = """
DELETE FROM saf.sink
WHERE version IS NULL AND sent_at < now() - make_interval(secs => %(seconds)s)
"""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one attempt of a task has staged."""

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
    """Send what some attempts have staged, in their order; False if it was sent already.

    Args:
        connection: to the broker.
        what: the broker, for people.
        application: whoever sends; it has versions of its own.
        version: what this sends; an earlier or equal one was sent already. None: the application
            sends only this once.
        attempts: in the order in which their messages are to be.

    Raises:
        StagedLost: some of it is not there any more; nothing was sent.
    """
    numbers = {"attempts": [one.attempt for one in attempts]}
    messages = sum(one.messages for one in attempts)
    with connection.transaction():
        connection.execute(DURABLE)
        mark = {"application": application, "version": version, "messages": messages}
        fresh = bool(fetch(connection, MARK, mark))
        if fresh:
            for one in attempts:
                connection.execute(SEND, {"attempt": one.attempt})
        removed = connection.execute(REMOVE, numbers).rowcount
        if fresh and removed != messages:
            raise StagedLost(what, messages, removed)
        connection.execute(END, numbers)
    return fresh


def sent_version(connection: psycopg.Connection[Any], application: str) -> int | None:
    """Return the last version that an application has sent; None if there is none."""
    found = fetch(connection, MARKED, {"application": application})
    return None if not found else found[0][0]


def discard(connection: psycopg.Connection[Any], attempts: Iterable[int]) -> int:
    """Remove what attempts have staged, whose job has failed; return how many messages."""
    numbers = {"attempts": list(attempts)}
    with connection.transaction():
        removed = connection.execute(REMOVE, numbers).rowcount
        connection.execute(END, numbers)
    return removed


def collect(connection: psycopg.Connection[Any], seconds: float = ORPHAN_SECONDS) -> int:
    """Remove the orphans, and marks that nobody asks for any more; return how many messages."""
    ((orphans,),) = fetch(connection, ORPHANS, {"seconds": seconds})
    connection.execute(FORGET_MARKS, {"seconds": seconds})
    return discard(connection, orphans) if orphans else 0
