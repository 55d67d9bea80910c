"""Programs of dialogs, for tests.processes: they may be killed."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import psycopg

import saf
from saf.database import Dsn
from tests.dialogs import WAREHOUSE

TABLES = """
CREATE TABLE heard (number bigint GENERATED ALWAYS AS IDENTITY, conversation uuid, body text)
"""
HEAR = "INSERT INTO heard (conversation, body) VALUES (%s, %s)"


def target(mom: Dsn, seed: int) -> None:
    """Hear all that is said and answer it, in small deliveries, some of them rolled back."""
    chance = random.Random(seed)
    while _receive(mom, chance):
        pass


def _receive(mom: Dsn, chance: random.Random) -> bool:
    with (
        suppress(ZeroDivisionError),
        saf.receive(
            mom,
            WAREHOUSE,
            max_messages=chance.choice((1, 3, 20)),
            wait_seconds=0.3,
            policy=saf.Policy(
                max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05
            ),
        ) as delivery,
    ):
        if not delivery:
            return False
        for message in delivery:
            hear(delivery.connection, message)
        if chance.random() < 0.15:
            raise ZeroDivisionError
    return True


def hear(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    """Note a message, and answer with the same."""
    assert message.dialog is not None
    connection.execute(HEAR, [message.conversation_id, message.text()])
    message.dialog.send(connection, message.text())
