"""Messages that no schema would take, put in as by an older one, whose logs had no bounds."""

from __future__ import annotations

import random
from typing import Any

import psycopg

from saf.database import Dsn, fetch
from tests.pipeline import connect

# At random, because indexes compress
LONG_KEY = "".join(chr(one) for one in random.Random(13).choices(range(0x4E00, 0x9FFF), k=1024))


BOUNDS = ("outbox_bounded", "inbox_bounded")


def unbounded(dsn: Dsn) -> None:
    """As before the bounds were there."""
    with connect(dsn) as connection:
        for name in BOUNDS:
            table = name.partition("_")[0]
            connection.execute(f"ALTER TABLE saf.{table} DROP CONSTRAINT IF EXISTS {name}")


def send(connection: psycopg.Connection[Any], body: str, **columns: Any) -> None:
    """By a plain INSERT."""
    row = {"to_service": "billing", "body": body.encode(), **columns}
    connection.execute(
        f"INSERT INTO saf.outbox ({', '.join(row)}) VALUES ({', '.join(['%s'] * len(row))})",
        list(row.values()),
    )


def dead(dsn: Dsn) -> list[tuple[str, str]]:
    """Body and reason of the dead letters."""
    with connect(dsn) as connection:
        return [
            (bytes(body).decode(), reason)
            for body, reason in fetch(
                connection, "SELECT body, reason FROM saf.dead_letter ORDER BY dead_letter_id"
            )
        ]


def error_of(dsn: Dsn) -> str:
    with connect(dsn) as connection:
        ((error,),) = fetch(connection, "SELECT error FROM saf.dead_letter")
    return str(error)
