"""What is in a Delta table, for tests: by its log, commit by commit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq
from deltalake import DeltaTable

from saf.columns import COLUMNS, UUIDS

Action = Mapping[str, Any]


def commits(table: Path) -> Iterator[Sequence[Action]]:
    """The actions of each version, oldest first; the log must be whole."""
    for file in sorted((table / "_delta_log").glob("*.json")):
        yield [json.loads(line) for line in file.read_text().splitlines()]


def messages(table: Path) -> list[Mapping[str, Any]]:
    """All messages, commit by commit, those of one commit by their ids."""
    found: list[Mapping[str, Any]] = []
    for actions in commits(table):
        added: list[dict[str, Any]] = []
        for action in actions:
            add = action.get("add")
            if add and add["dataChange"]:  # else it was compacted
                rows = pq.ParquetFile(table / add["path"]).read().to_pylist()
                added += [{**add["partitionValues"], **row} for row in rows]
        found += sorted(added, key=lambda row: row["id"])
    return [{name: _value(name, row[name]) for name in COLUMNS} for row in found]


def texts(table: Path) -> list[str]:
    """The bodies of all messages."""
    return [row["body"].decode() for row in messages(table)]


def rows(table: Path) -> list[dict[str, Any]]:
    """All rows as readers of Delta see them, by their ids."""
    found: list[dict[str, Any]] = DeltaTable(table).to_pyarrow_table().sort_by("id").to_pylist()
    return found


def _value(name: str, value: Any) -> Any:
    return UUID(value) if name in UUIDS and value is not None else value
