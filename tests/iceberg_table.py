"""What is in an Iceberg table, for tests: by its list of files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import pyarrow.parquet as pq
from pyiceberg.table import Table

from saf.columns import COLUMNS, UUIDS
from saf.database import Dsn
from saf.destinations.iceberg import Iceberg
from saf.destinations.iceberg.link import Link
from saf.destinations.iceberg.marks import history


def in_postgresql(database: Dsn) -> dict[str, Any]:
    """The settings of a catalog in a database."""
    parts = database.parts
    where = urlencode({name: parts[name] for name in ("host", "port")})
    return {
        "catalog": f"postgresql:///{parts['dbname']}?{where}",
        "username": parts["user"],
        "password": parts.get("password"),
    }


def loaded(settings: Iceberg) -> Table:
    """The newest version of the table."""
    table = Link("lake", settings).load()
    assert table is not None
    return table


def messages(settings: Iceberg) -> list[Mapping[str, Any]]:
    """All messages, commit by commit, those of one commit by their ids."""
    with closing(Link("lake", settings)) as link:
        table = link.load()
    snapshot = table.current_snapshot() if table else None
    if table is None or snapshot is None:
        return []
    found: list[tuple[int, dict[str, Any]]] = []
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            with table.io.new_input(entry.data_file.file_path).open() as file:
                rows_of_file = pq.ParquetFile(file).read().to_pylist()
            found += [(entry.sequence_number or 0, row) for row in rows_of_file]
    rows = [row for _, row in sorted(found, key=lambda one: (one[0], one[1]["id"]))]
    return [{name: _value(name, row[name]) for name in COLUMNS} for row in rows]


def texts(settings: Iceberg) -> list[str]:
    """The bodies of all messages."""
    return [row["body"].decode() for row in messages(settings)]


def rows(settings: Iceberg) -> list[dict[str, Any]]:
    """All rows as readers of Iceberg see them, by their ids."""
    found: list[dict[str, Any]] = loaded(settings).scan().to_arrow().sort_by("id").to_pylist()
    return found


def snapshots(settings: Iceberg) -> list[int]:
    """The snapshots of the branch main, oldest first."""
    return [one.snapshot_id for one in history(loaded(settings).metadata)][::-1]


def roll_back(settings: Iceberg, snapshot: int) -> None:
    """Set the branch main to an older snapshot, as a person does."""
    loaded(settings).manage_snapshots().rollback_to_snapshot(snapshot).commit()


def _value(name: str, value: Any) -> Any:
    return UUID(value) if name in UUIDS and value is not None else value
