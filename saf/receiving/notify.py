"""Notifications: a receiver learns of new messages immediately, instead of at its next poll.

Both ends are optional. An inbox notifies, once for each statement that stores messages, if `switch`
has enabled its trigger. A receiver listens if it is told to. Messages that become due later
(``deliver_at``, another attempt) are found by polling in any case.

The cost: PostgreSQL lets transactions that notify commit only one after the other, in the whole
database, and wakes each listening session each time. This is little for the chunks of a forwarder,
but not for applications that fill an inbox one row at a time. LISTEN needs a session of its own,
not a pooler's.
"""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import psycopg

from saf.database import fetch
from saf.database.poolers import refuse_pooler
from saf.errors import ConfigurationError

TICK_SECONDS = 0.2
"""Longest time until a listening receiver notices that it must stop, in seconds."""

LISTEN, UNLISTEN = "LISTEN saf_inbox", "UNLISTEN saf_inbox"

SWITCH = {
    True: "ALTER TABLE saf.inbox ENABLE TRIGGER inbox_notify",
    False: "ALTER TABLE saf.inbox DISABLE TRIGGER inbox_notify",
}
IS_ON = """
SELECT tgenabled <> 'D' FROM pg_trigger
WHERE tgrelid = 'saf.inbox'::regclass AND tgname = 'inbox_notify'
"""


def switch(connection: psycopg.Connection[Any], on: bool) -> None:
    """Turn the inbox's notifications on or off; waits for transactions that fill the inbox."""
    connection.execute(SWITCH[on])


def listen(connection: psycopg.Connection[Any]) -> None:
    """Make the inbox wake this session, from the next commit on.

    Raises:
        ConfigurationError: the inbox does not notify, or the connection goes through a pooler.
    """
    refuse_pooler(connection)
    ((notifies,),) = fetch(connection, IS_ON)
    if not notifies:
        raise ConfigurationError(
            f"database {connection.info.dbname!r}: its inbox sends no notifications, so listening "
            "is useless. Run `saf inbox notify on`, or do not listen"
        )
    connection.execute(LISTEN)


def listen_if_it_notifies(connection: psycopg.Connection[Any]) -> bool:
    """Make the inbox wake this session if it notifies; return whether it does."""
    ((notifies,),) = fetch(connection, IS_ON)
    connection.execute(LISTEN if notifies else UNLISTEN)
    return bool(notifies)


def forget(connection: psycopg.Connection[Any]) -> None:
    """Discard received notifications before looking for messages: psycopg would keep them all."""
    for _ in connection.notifies(timeout=0):
        pass


def wait(connection: psycopg.Connection[Any], seconds: float, stopping: Event) -> None:
    """Wait outside a transaction for a notification, for ``seconds`` or until told to stop."""
    deadline = time.monotonic() + seconds
    while not stopping.is_set() and (left := deadline - time.monotonic()) > 0:
        if list(connection.notifies(timeout=min(left, TICK_SECONDS), stop_after=1)):
            return
