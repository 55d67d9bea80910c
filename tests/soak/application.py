"""The application of a soak: it sends at a steady rate, whoever is slow.

    python -m tests.soak.application RATE

A few transactions a second, each with messages of all services, and one said in a dialog. If it was
held up, it sends what is due by then.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg

import saf
from saf.signals import stop_on_signals
from tests.soak.ledger import Said

SHARES = {"billing": 10, "totals": 5, "hooks": 5, "events": 4}
"""Messages of a transaction, by service; and one more in a dialog."""
SHOP, WAREHOUSE = "shop", "warehouse"
KEYS = {"billing": 2000, "totals": 400, "hooks": 400, "events": 400}
EACH = sum(SHARES.values()) + 1
MOST_AT_ONCE = 40
"""Transactions that are made up for at a time, before it looks whether it is to stop."""
LONGEST_TALK = 1000

COUNT_UP = """
INSERT INTO soak.sent SELECT unnest(%s::text[]), unnest(%s::text[]), 1
ON CONFLICT (service, key) DO UPDATE SET n = soak.sent.n + 1 RETURNING service, key, n
"""
TALK = "SELECT handle, conversation, n FROM soak.talk WHERE n < %s"
SAY = """
INSERT INTO soak.talk VALUES (%s, %s, %s) ON CONFLICT (handle) DO UPDATE SET n = excluded.n
"""


def send(connection: psycopg.Connection[Any], outbox: saf.Outbox, chance: random.Random) -> None:
    """One transaction."""
    with connection.transaction():
        chosen = sorted(_chosen(chance))
        services, keys = map(list, zip(*chosen, strict=True))
        counted = connection.execute(COUNT_UP, [services, keys]).fetchall()
        now = time.time()
        outbox.send_many(
            connection,
            [
                saf.Message(service=service, body=Said(key=key, n=n, at=now).body, key=key)
                for service, key, n in counted
            ],
        )
        say(connection, now)


def _chosen(chance: random.Random) -> Iterator[tuple[str, str]]:
    for service, share in SHARES.items():
        for number in chance.sample(range(KEYS[service]), share):
            yield service, f"{service} {number}"


def say(connection: psycopg.Connection[Any], now: float) -> None:
    """Say the next number in the dialog, or begin another one; the last is marked as such."""
    found: Any = connection.execute(TALK, [LONGEST_TALK]).fetchone()
    if found is None:
        dialog = saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
        conversation, before = str(dialog.conversation_id), 0
    else:
        handle, conversation, before = found
        dialog = saf.open_dialog(connection, UUID(str(handle)))
    n = before + 1
    connection.execute(COUNT_UP, [[WAREHOUSE], [conversation]])
    connection.execute(SAY, [dialog.handle, conversation, n])
    kind = "last" if n == LONGEST_TALK else "said"
    dialog.send(connection, Said(key=conversation, n=n, at=now).body, message_type=kind)


def run(dsn: str, rate: float, stopping: threading.Event) -> None:
    """Send until it is told to stop."""
    chance, outbox = random.Random(), saf.Outbox(from_service=SHOP)
    every = EACH / rate
    with psycopg.connect(dsn, application_name="application") as connection:
        began, done = time.monotonic(), 0
        while not stopping.is_set():
            due = int((time.monotonic() - began) / every) - done
            for _ in range(min(due, MOST_AT_ONCE)):
                send(connection, outbox, chance)
                done += 1
            stopping.wait(max(began + (done + 1) * every - time.monotonic(), 0))


if __name__ == "__main__":
    stop = threading.Event()
    with stop_on_signals(stop.set):
        run(os.environ["SOAK_APP"], float(sys.argv[1]), stop)
