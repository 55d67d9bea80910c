"""The application: processes that write business rows and messages in one transaction each.

A transaction counts up some accounts, under their row locks, and notes each count in ``sent``; each
is also a message, keyed by account, with the body ``account count``. So ``sent`` is the truth of
what was to arrive, and in which order.
"""

from __future__ import annotations

import logging
import os
import random
import time
from typing import Any

import psycopg

from saf import Outbox, SafError
from saf.database import Dsn
from tests.crash.plan import QUALITIES
from tests.crash.talks import talk

ACCOUNTS = [f"{service}-{number}" for service in QUALITIES for number in range(3)]

TABLES = """
CREATE TABLE account (id text PRIMARY KEY, version int NOT NULL);
CREATE TABLE sent (
    account text, n int, service text NOT NULL, poison bool NOT NULL, PRIMARY KEY (account, n));
"""
KINDS = ("commit", "commit", "commit", "rollback", "savepoint", "late", "prepared")
PADDING = "." * 400


def writer(app: Dsn, seed: str, poison: float, dialogs: bool, seconds: float) -> None:
    """Write until the time is over, whatever the server does."""
    # of a rollback on a connection that is lost
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with app.connect(role="application") as connection:
                connection.execute("SET lock_timeout = '300ms'")
                connection.commit()
                while time.monotonic() < until:
                    _transaction(connection, chance, poison, dialogs)
        except (psycopg.Error, SafError):
            time.sleep(0.05)


def _transaction(
    connection: psycopg.Connection[Any], chance: random.Random, poison: float, dialogs: bool
) -> None:
    kind = chance.choice(KINDS)
    outbox = Outbox()
    if kind == "prepared":
        connection.tpc_begin(connection.xid(0, f"{os.getpid()} {chance.random()}", "crash"))
    for account in sorted(chance.sample(ACCOUNTS, chance.randint(1, 4))):
        if kind == "savepoint":
            connection.execute("SAVEPOINT one")
            _count_up(connection, outbox, account, chance.random() < poison)
            if chance.random() < 0.5:
                connection.execute("ROLLBACK TO SAVEPOINT one")
        _count_up(connection, outbox, account, chance.random() < poison)
        if kind == "late":
            time.sleep(chance.uniform(0.0, 0.15))
    if dialogs and chance.random() < 0.5:
        talk(connection, chance)
    if kind == "prepared":
        connection.tpc_prepare()
        time.sleep(chance.uniform(0.0, 0.05))
        (connection.tpc_rollback if chance.random() < 0.3 else connection.tpc_commit)()
    elif kind == "rollback":
        connection.rollback()
    else:
        connection.commit()
    time.sleep(chance.uniform(0.0, 0.01))


def _count_up(
    connection: psycopg.Connection[Any], outbox: Outbox, account: str, poison: bool
) -> None:
    service = account.split("-", maxsplit=1)[0]
    # what goes at most once may go with its neighbours, so there is no poison among them
    poison = poison and QUALITIES[service] != "at_most_once"
    row = connection.execute(
        "UPDATE account SET version = version + 1 WHERE id = %s RETURNING version", [account]
    ).fetchone()
    assert row is not None
    connection.execute(
        "INSERT INTO sent VALUES (%s, %s, %s, %s)", [account, row[0], service, poison]
    )
    text = f"{account} {row[0]} {'poison' if poison else PADDING}"
    outbox.send(connection, service, text, key=account)
