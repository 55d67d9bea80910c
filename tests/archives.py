"""Archives of both forms, for tests: what they hold, and slots that a purge may take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable

from saf.database import Dsn
from saf.log.ring import SLOT_ROWS
from saf.spark.table import archived_rows, part
from saf.spark.table.archived import Archived
from saf.spark.table.source import Messages
from tests.pipeline import connect, run, send

FORMS = ("folder", "table")
DONE = "UPDATE saf.cursor SET done = pg_current_snapshot()"
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
        self._query = part.Query(asked=schema)
        self.parts = source.reader(schema).partitions()

    def texts(self) -> list[str]:
        """The bodies that its tasks give, sorted."""
        found: list[str] = []
        for one in self.parts:
            read: Any = archived_rows.read if isinstance(one, Archived) else part.read
            for rows in read(one, self._query):
                found += [body.decode() for body in rows["body"].to_pylist()]
        return sorted(found)


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
