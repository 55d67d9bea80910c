"""Messages by name: held, replaced, moved to another time and taken back, while all else fails.

``sent`` has a message that is held, until the transaction that takes it back or replaces it. So the
checker needs no words about names: a message that was taken back and sent as well is one that was
not to arrive, and one that was neither is lost.
"""

from __future__ import annotations

import random
import secrets
from datetime import timedelta
from typing import Any

import psycopg

from saf import Outbox
from saf.database import fetch

SERVICE = "orders"
NAMES = 6
"""Names for which all writers compete."""

TABLES = """
CREATE TABLE named (
    number bigint GENERATED ALWAYS AS IDENTITY, message_id uuid PRIMARY KEY, name text NOT NULL,
    account text NOT NULL);
"""
KNOWN = "SELECT FROM named WHERE message_id = %(id)s"
TAKE_OUT = """
DELETE FROM sent WHERE account = (
    SELECT account FROM named WHERE name = %s ORDER BY number DESC LIMIT 1)
"""
NOW = "SELECT clock_timestamp()"
SOON = "UPDATE saf.held SET due = clock_timestamp() WHERE due > clock_timestamp()"
"""When writers have ended, what is held is due: a clock that has gone back would take an hour."""


def by_name(connection: psycopg.Connection[Any], chance: random.Random, padding: str) -> None:
    """Do one thing with a name, in the transaction of the connection."""
    outbox, name = Outbox(), f"name {chance.randrange(NAMES)}"
    ((now,),) = fetch(connection, NOW)
    due = now + timedelta(seconds=chance.uniform(-0.1, 0.4))
    match chance.choice(("skip", "skip", "replace", "later", "cancel", "reschedule")):
        case "cancel":
            if outbox.cancel(connection, SERVICE, name):
                connection.execute(TAKE_OUT, [name])
        case "reschedule":
            outbox.reschedule(connection, SERVICE, name, due)
        case if_there:
            token = secrets.token_hex(4)
            account = f"{SERVICE}-{name.replace(' ', '-')}-{token}"
            sent = outbox.send(
                connection,
                SERVICE,
                f"{account} 1 {token} {padding}",
                name=name,
                deliver_at=due,
                if_there=if_there,
                once_for=timedelta(seconds=chance.choice((0.0, 0.2))),
            )
            if fetch(connection, KNOWN, {"id": sent}):
                return  # the other one is there
            if not sent.is_new:
                connection.execute(TAKE_OUT, [name])
            connection.execute(
                "INSERT INTO named (message_id, name, account) VALUES (%s, %s, %s)",
                [sent, name, account],
            )
            connection.execute(
                "INSERT INTO sent VALUES (%s, 1, %s, %s, false, false)", [account, token, SERVICE]
            )
