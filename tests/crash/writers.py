"""The application: processes that write business rows and messages in one transaction each.

A transaction counts up some accounts, under their row locks, and notes each count in ``sent``; each
is also a message, keyed by account, with the body ``account count token``. So ``sent`` is the truth
of what was to arrive, and in which order. The token tells a message from another one of the same
count, which is sent after the application's database was set back.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from saf import Outbox, SafError
from saf.database import Dsn
from tests.crash import named
from tests.crash.plan import QUALITIES, Plan
from tests.crash.talks import talk

ACCOUNTS = [f"{service}-{number}" for service in QUALITIES for number in range(3)]

TABLES = (
    """
CREATE TABLE account (id text PRIMARY KEY, version int NOT NULL);
CREATE TABLE sent (
    account text, n int, token text NOT NULL, service text NOT NULL, poison bool NOT NULL,
    mortal bool NOT NULL, PRIMARY KEY (account, n));
"""
    + named.TABLES
)
KINDS = ("commit", "commit", "commit", "rollback", "savepoint", "late", "prepared")
PADDING = "." * 400
MOMENT = timedelta(milliseconds=300)
"""What is mortal expires after it."""
NO_LONGER = "SET LOCAL lock_timeout = '300ms'"


def writer(app: Dsn, seed: str, plan: Plan) -> None:
    """Write as much as the plan says, whatever the server does."""
    # of a rollback on a connection that is lost
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    chance = random.Random(seed)
    left = plan.transactions
    while left != 0:
        try:
            # as an application's, not one of saf's: a pooler may be in front
            with psycopg.connect(app.for_role("application")) as connection:
                while left != 0:
                    left = None if left is None else left - 1
                    _transaction(connection, chance, plan)
        except (psycopg.Error, SafError):
            pass
        time.sleep(0.05)


def _transaction(connection: psycopg.Connection[Any], chance: random.Random, plan: Plan) -> None:
    kind = chance.choice(KINDS)
    outbox = Outbox()
    if kind == "prepared":
        connection.tpc_begin(connection.xid(0, f"{os.getpid()} {chance.random()}", "crash"))
    connection.execute(NO_LONGER)
    for account in sorted(chance.sample(ACCOUNTS, chance.randint(1, 4))):
        if kind == "savepoint":
            connection.execute("SAVEPOINT one")
            count_up(connection, outbox, account, poison=chance.random() < plan.poison)
            if chance.random() < 0.5:
                connection.execute("ROLLBACK TO SAVEPOINT one")
        count_up(
            connection,
            outbox,
            account,
            poison=chance.random() < plan.poison,
            mortal=chance.random() < plan.mortal,
        )
        if kind == "late":
            time.sleep(chance.uniform(0.0, 0.15))
    if plan.names and chance.random() < 0.5:
        named.by_name(connection, chance, PADDING)
    if plan.dialogs and chance.random() < 0.5:
        talk(connection, chance, by_hub=plan.hubs > 0 and chance.random() < 0.5)
    if kind == "prepared":
        connection.tpc_prepare()
        time.sleep(chance.uniform(0.0, 0.05))
        (connection.tpc_rollback if chance.random() < 0.3 else connection.tpc_commit)()
    elif kind == "rollback":
        connection.rollback()
    else:
        connection.commit()
    time.sleep(chance.uniform(0.0, 0.01))


def count_up(
    connection: psycopg.Connection[Any],
    outbox: Outbox,
    account: str,
    *,
    poison: bool = False,
    mortal: bool = False,
) -> None:
    """Count up an account, and send it."""
    service = account.split("-", maxsplit=1)[0]
    # what goes at most once may go with its neighbours, so there is no poison among them
    poison = poison and QUALITIES[service] != "at_most_once"
    mortal = mortal and not poison
    row = connection.execute(
        "UPDATE account SET version = version + 1 WHERE id = %s RETURNING version", [account]
    ).fetchone()
    assert row is not None
    token = secrets.token_hex(4)
    connection.execute(
        "INSERT INTO sent VALUES (%s, %s, %s, %s, %s, %s)",
        [account, row[0], token, service, poison, mortal],
    )
    text = f"{account} {row[0]} {token} {'poison' if poison else PADDING}"
    expires_at = datetime.now(UTC) + MOMENT if mortal else None
    outbox.send(connection, service, text, key=account, expires_at=expires_at)
