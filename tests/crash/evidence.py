"""Evidence: what a round's databases held when something was found, for whoever looks into it.

A plan does not run the same way twice, so what a finding left behind may never be seen again.
`keep` writes a file for each broker, in lines such as ``["saf.inbox", {"id": 1, …}]``: each row of
each table, bodies as text. ``grep`` for a key, a message or a talk tells its story. ``commands``
has what a person's commands said, ``refusals`` what forwarders did.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from saf.database import Dsn

FOLDER = Path("build/crash")

# Partitions come with their tables
TABLES = """
SELECT nspname, relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname IN ('saf', 'public') AND (relkind = 'p' OR relkind = 'r' AND NOT relispartition)
ORDER BY 1, 2
"""


def keep(brokers: Mapping[str, Dsn], more: Mapping[str, Iterable[str]], folder: Path) -> None:
    """Write what brokers hold, and ``more`` files of lines; a broker that is away says why."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in more.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    for name, dsn in brokers.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            try:
                with psycopg.connect(dsn.conninfo, row_factory=dict_row) as connection:
                    for table, row in _rows(connection):
                        print(json.dumps([table, row], default=_as_text), file=file)
            except psycopg.OperationalError as error:
                print(json.dumps(["error", str(error)]), file=file)


def _rows(connection: psycopg.Connection[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    for table in connection.execute(TABLES).fetchall():
        schema, name = table.values()
        with connection.cursor("kept") as cursor:
            cursor.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(schema, name)))
            for row in cursor:
                yield f"{schema}.{name}", row


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
