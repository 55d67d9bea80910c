"""Archives of both forms, for tests: what they hold, and slots that a purge may take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
from deltalake import DeltaTable
from psycopg.rows import dict_row

from saf.database import Dsn
from saf.log.ring import SLOT_ROWS
from saf.spark.table import archived, part
from saf.spark.table.archived import Archived
from saf.spark.table.query import Query
from saf.spark.table.source import Messages
from tests.pipeline import connect, run, send

FORMS = ("folder", "table")
DONE = "UPDATE saf.cursor SET done = pg_current_snapshot()"
EVERYTHING = """
INSERT INTO saf.inbox (from_service, to_service, to_broker, key, conversation_id, from_initiator,
                       sequence, message_type, headers, body, deliver_at, expires_at, source)
SELECT 'shop', 'billing', gen_random_uuid(), 'Zürich', gen_random_uuid(), true, n, 'order',
       '{"a": [1, null]}', decode('00ff', 'hex'), now(), now() + interval '1 day',
       gen_random_uuid()
FROM generate_series(1, 3) AS n
"""
READER = """
WITH s AS (INSERT INTO saf.subscription (name, log) VALUES ('reader', 'inbox') RETURNING *)
INSERT INTO saf.cursor (subscription_id, shard, done)
SELECT subscription_id, generate_series(0, 63), pg_current_snapshot() FROM s
"""
LEAVE_INBOX = "SELECT setval('saf.inbox_id_seq', %(slot)s, false)"
NEXT_SLOT = """
SELECT setval('saf.outbox_id_seq', (last_value / %(slot)s + 1) * %(slot)s, false)
FROM saf.outbox_id_seq
"""


def place(form: str, folder: Path) -> str:
    """What `saf purge --archive` is told."""
    return f"{folder}/archive" if form == "folder" else f"delta:{folder}/archive"


def rows(where: str, log: str = "outbox") -> list[dict[str, Any]]:
    """All that an archive has of a log."""
    if where.startswith("delta:"):
        folder = where.removeprefix("delta:")
        if not (Path(folder) / "_delta_log").is_dir():
            return []
        table = DeltaTable(folder).to_pyarrow_table()
        return [row for row in table.to_pylist() if row["log"] == log]
    files = Path(where).glob(f"*/{log}-*.parquet")
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def texts(where: str) -> list[str]:
    """The bodies of all that an archive has of an outbox, sorted."""
    return sorted(row["body"].decode() for row in rows(where))


class Reading:
    """A read in two steps, as Spark makes it: the plan, and then its tasks."""

    def __init__(self, options: Mapping[str, str]) -> None:
        source = Messages({"partitions": "2", **options})
        schema = source.schema()
        self._query = Query(asked=schema)
        self.parts = source.reader(schema).partitions()

    def texts(self) -> list[str]:
        """The bodies that its tasks give, sorted."""
        found: list[str] = []
        for one in self.parts:
            read: Any = archived.read if isinstance(one, Archived) else part.read
            for rows in read(one, self._query):
                found += [body.decode() for body in rows["body"].to_pylist()]
        return sorted(found)


def read_inbox(mom: Dsn) -> list[dict[str, Any]]:
    """An inbox whose messages have all that a message may, and one that has next to nothing.

    A reader has completed them, and ids have left their slot. Returns its rows as they were.
    """
    with connect(mom) as connection:
        connection.execute(EVERYTHING)
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES ('sparse', '')")
        with psycopg.Cursor(connection, row_factory=dict_row) as cursor:
            there = cursor.execute(
                "SELECT *, txid::text::bigint AS txid FROM saf.inbox ORDER BY id"
            ).fetchall()
        connection.execute(READER)
        connection.execute(LEAVE_INBOX, {"slot": SLOT_ROWS})
    return there


def fill(app: Dsn, *texts: str) -> None:
    """Messages in the outbox, some of a key."""
    with connect(app) as connection:
        for number, text in enumerate(texts):
            send(connection, text, key=f"key {number % 3}")


def may_go(app: Dsn, mom: Dsn) -> None:
    """All messages are forwarded, and ids have left their slot."""
    run(app, mom=mom)
    next_slot(app)


def next_slot(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute(NEXT_SLOT, {"slot": SLOT_ROWS})


def in_log(app: Dsn) -> list[str]:
    """The bodies in the outbox, sorted."""
    with connect(app) as connection:
        found = connection.execute("SELECT body FROM saf.outbox").fetchall()
    return sorted(bytes(body).decode() for (body,) in found)
