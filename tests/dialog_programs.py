"""Programs of dialogs, for tests.processes: they may be killed."""

from __future__ import annotations

from typing import Any

import psycopg

import saf
from saf.database import Dsn
from tests.dialogs import WAREHOUSE
from tests.receivers import consume

TABLES = """
CREATE TABLE heard (number bigint GENERATED ALWAYS AS IDENTITY, conversation uuid, body text)
"""
HEAR = "INSERT INTO heard (conversation, body) VALUES (%s, %s)"


def target(mom: Dsn, seed: int) -> None:
    """Hear all that is said and answer it, in small deliveries, some of them rolled back."""
    consume(mom, seed, WAREHOUSE, hear)


def hear(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    """Note a message, and answer with the same."""
    assert message.dialog is not None
    connection.execute(HEAR, [message.conversation_id, message.text()])
    message.dialog.send(connection, message.text())
