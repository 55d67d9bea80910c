"""Notifications: a receiver learns of new messages at once, instead of when it polls next.

Optional at both ends: an inbox notifies if `switch` has turned its trigger on, once for each
statement that stores messages, and a receiver listens if it is told to. What has become due
(``deliver_at``, another attempt) is found by polling all the same.

The cost: PostgreSQL lets transactions that notify commit one after the other, in the whole
database, and each listening session is woken each time. For the chunks of a forwarder that is
little; for applications that fill an inbox one row at a time it is not. LISTEN needs a session of
its own: not through a pooler.
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
"""How soon a wish to stop is noticed while a receiver listens."""

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
    """Let the inbox notify, or no longer. Waits for the transactions that are filling it."""
    connection.execute(SWITCH[on])


def listen(connection: psycopg.Connection[Any]) -> None:
    """Be woken by the inbox from now on, after the commit.

    Raises:
        ConfigurationError: the inbox does not notify, or a pooler is in between.
    """
    refuse_pooler(connection)
    ((on,),) = fetch(connection, IS_ON)
    if not on:
        raise ConfigurationError(
            f"database {connection.info.dbname!r}: its inbox notifies nobody, so there is nothing "
            "to listen for. `saf inbox notify on` lets it; or do not listen"
        )
    connection.execute(LISTEN)


def wait(connection: psycopg.Connection[Any], seconds: float, stopping: Event) -> None:
    """Wait for a notification, outside of a transaction, or until told to stop."""
    until = time.monotonic() + seconds
    while not stopping.is_set() and (left := until - time.monotonic()) > 0:
        if list(connection.notifies(timeout=min(left, TICK_SECONDS), stop_after=1)):
            return
