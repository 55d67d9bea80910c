"""Reading back a folder of JSON lines, provided that all of its files still exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa

from saf.destinations.jsonl.folder import draft_of, file_of
from saf.destinations.jsonl.state import INSIDE, known_of, read_identity, read_state
from saf.destinations.reading import Reading
from saf.destinations.tables import HELD, TableReading
from saf.errors import CannotReadBack
from saf.log.disk import unavailable_if_lost


@contextmanager
def read(name: str, folder: Path) -> Iterator[Reading]:
    """Open all files of all sources for reading.

    Raises:
        CannotReadBack: some files are gone.
    """
    destination = f"destination {name!r}"
    identity = read_identity(destination, folder)
    with unavailable_if_lost(destination):
        for state in sorted((folder / INSIDE).glob("*.json")):
            _files(name, folder, UUID(state.stem))
    yield TableReading(
        name=name,
        is_=identity,
        read=cache(lambda source: _held(name, folder, source)),
        knows=lambda source: known_of(destination, folder, source),
    )


def _files(name: str, folder: Path, source: UUID) -> list[Path]:
    """Return the files of a source. The last one may not have its name yet."""
    last = read_state(f"destination {name!r}", folder, source).number
    files = [file_of(folder, source, number) for number in range(1, last + 1)]
    if files and (draft := draft_of(folder, source, last)).exists():
        files[-1] = draft
    missing = [file for file in files if not file.exists()]
    if missing:
        raise CannotReadBack(
            name, f"{len(missing):,} of its files are gone, such as {missing[0].name} of {source}"
        )
    return files


def _held(name: str, folder: Path, source: UUID) -> pa.Table:
    with unavailable_if_lost(f"destination {name!r}"):
        tables = [_table(file) for file in _files(name, folder, source)]
    return pa.concat_tables([HELD.empty_table(), *tables])


def _table(file: Path) -> pa.Table:
    """Return the columns required for each line. Python reads the lines one by one."""
    columns: dict[str, list[Any]] = {name: [] for name in HELD.names}
    with file.open("rb") as lines:
        for line in lines:
            message = json.loads(line)
            to_broker = message.get("to_broker")
            columns["message_id"].append(UUID(message["message_id"]).bytes)
            columns["shard"].append(message["shard"])
            columns["to_service"].append(message["to_service"])
            columns["to_broker"].append(to_broker and UUID(to_broker).bytes)
            columns["key"].append(message.get("key"))
            columns["created_at"].append(datetime.fromisoformat(message["created_at"]))
    return pa.table(columns, schema=HELD)
