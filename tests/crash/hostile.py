"""A hostile writer: somebody who has no more than the rights of a sender, and does what he can.

He tries what is forbidden, which has to be refused; and he writes by plain INSERT what is allowed
and odd. That has to end as any other message does, so he notes it in ``sent``, each message as an
account of its own.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from saf.broker.grants import Kind, grant
from saf.database import Dsn, fetch
from tests.crash.named import NOW
from tests.crash.plan import QUALITIES, Plan

ROLE = "crash_sender"
CREATE = f"""
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}') THEN CREATE ROLE {ROLE} LOGIN;
    END IF;
END $$
"""
FORBIDDEN = (
    "SELECT body FROM saf.outbox LIMIT 1",
    "DELETE FROM saf.outbox",
    "UPDATE saf.outbox SET body = 'mine'",
    "TRUNCATE saf.outbox",
    "LOCK TABLE saf.outbox IN ACCESS EXCLUSIVE MODE",
    "INSERT INTO saf.outbox (id, to_service, body) VALUES (1, 'orders', '')",
    "INSERT INTO saf.outbox (txid, to_service, body) VALUES ('3', 'orders', '')",
    "INSERT INTO saf.inbox (to_service, body) VALUES ('orders', '')",
    "INSERT INTO saf.parked SELECT * FROM saf.parked",
    "UPDATE saf.cursor SET position = position + 1000000, owner = NULL",
    "UPDATE saf.broker SET broker_id = gen_random_uuid()",
    "UPDATE saf.route SET destination = 'nowhere'",
    "DELETE FROM saf.member",
    "DELETE FROM saf.dead_letter",
    "SELECT setval('saf.outbox_id_seq', 1)",
    "DROP SCHEMA saf CASCADE",
    "CREATE TRIGGER mine BEFORE INSERT ON saf.outbox EXECUTE FUNCTION pg_sleep()",
    "ALTER TABLE saf.outbox ADD COLUMN mine int",
)
NOTE = "INSERT INTO sent VALUES (%s, 1, %s, %s, false, %s)"
ODD_TEXTS = ("", " ", "\n", "\x1b[2J", "é" * 60, "'; DROP TABLE saf.outbox; --", "\u202e", "NULL")
IDLE_SECONDS = 1.0
FAR = timedelta(days=300000)
EXPIRED = (0.7, 0.8)
"""The chance of a message that is of no use any more when it is sent."""


def admit(connection: psycopg.Connection[Any]) -> None:
    """Let him in at an application's database, whose cluster knows him."""
    connection.execute(f"GRANT INSERT ON sent TO {ROLE}")
    grant(connection, ROLE, [Kind.WRITER])


def hostile(app: Dsn, seed: str, plan: Plan, allowed: Path) -> None:
    """Do what he can; what he should not have been let do goes to a file."""
    chance = random.Random(seed)
    dsn = make_conninfo(app.conninfo, user=ROLE, application_name="saf hostile")
    left = plan.transactions
    while left != 0:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn) as connection:
            while left != 0:
                left = None if left is None else left - 1
                do_something(connection, chance, allowed)
                time.sleep(chance.uniform(0.0, 0.05))
        time.sleep(0.05)


def do_something(connection: psycopg.Connection[Any], chance: random.Random, allowed: Path) -> None:
    if chance.random() < 0.3:
        statement = chance.choice(FORBIDDEN)
        with contextlib.suppress(psycopg.ProgrammingError), connection.transaction():
            connection.execute(statement)
            with allowed.open("a") as file:
                file.write(f"{statement}\n")
            raise psycopg.Rollback
        return
    with contextlib.suppress(psycopg.IntegrityError, psycopg.DataError), connection.transaction():
        for _ in range(chance.randint(1, 3)):
            _send(connection, chance)
        if chance.random() < 0.1:
            time.sleep(IDLE_SECONDS)  # in a transaction, with messages that nobody sees yet


def _send(connection: psycopg.Connection[Any], chance: random.Random) -> None:
    service = chance.choice([one for one, quality in QUALITIES.items() if "at_most" not in quality])
    token = secrets.token_hex(4)
    account, fate = f"{service}-odd-{token}", chance.random()
    odd: dict[str, object] = {}
    ((now,),) = fetch(connection, NOW)  # the database's clock may have gone back
    if fate < 0.3:
        odd["key"] = chance.choice((*ODD_TEXTS, "k" * 255))
    elif fate < 0.5:
        odd["headers"] = json.dumps(
            chance.choice(({}, {"": ""}, {"a": {"b": [1, None]}}, {"n": 1e300}, {"t": "\x01"}))
        )
    elif fate < EXPIRED[0]:
        odd["message_type"] = chance.choice(("x", "é", "saf-like", "'"))
    elif fate < EXPIRED[1]:
        odd["expires_at"] = now - chance.choice((timedelta(0), timedelta(days=9999)))
    elif fate < 0.9:
        odd["expires_at"] = now + FAR
    else:
        odd["deliver_at"] = now + timedelta(milliseconds=chance.randint(-500, 500))
    connection.execute(NOTE, [account, token, service, EXPIRED[0] <= fate < EXPIRED[1]])
    row = {"to_service": service, "body": f"{account} 1 {token} odd".encode(), **odd}
    connection.execute(
        f"INSERT INTO saf.outbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
        list(row.values()),
    )
