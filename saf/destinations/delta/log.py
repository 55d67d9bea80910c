"""Application transactions: saf's marks and epochs, in the log of a Delta table.

An application transaction has a name, and a number that a commit may change. saf's names:

    saf:SOURCE:7:epoch:              the epoch of shard 7 of a source: in each commit for the shard
    saf:SOURCE:7:batch:LANE          how far shard 7 is stored in a lane,
    saf:SOURCE:7:position:LANE       as in `saf.destinations.marks.Mark`
    saf:SOURCE:7:opened_at:LANE      microseconds since 1970
    saf:SOURCE:7:set_aside_at:LANE   microseconds since 1970

A commit fails if another commit has set one of its numbers since the version that it was made for.
So each commit writes the epoch, whether it changes or not: if two commits concern the same shard,
the second one fails, reads again, and finds itself fenced or its messages stored.

deltalake returns only the number of a transaction whose name is known. So `Log` finds all of saf's
transactions as of one version. A checkpoint contains those of all versions before it; the files of
later versions contain the rest. Each file is read once. A file that is missing or cannot be read
raises `OSError`. This module writes nothing: `saf.destinations.delta.appending` commits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import pyarrow.parquet as pq

from saf.destinations.delta.files import Files
from saf.destinations.lake.state import State, mark_of, numbers_of
from saf.destinations.marks import Mark, Place

OURS = "saf:"
"""Prefix of the names of saf's application transactions."""
LOG = "_delta_log"
"""Folder of the log below the table's address."""
CHECKPOINT = re.compile(
    r"(?P<version>\d{20})\.checkpoint(\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.[0-9a-f-]{36})?"
    r"\.(parquet|json)"
)


class Log:
    """A table's log; the versions given to `at` must never go down."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._version = -1
        self._numbers: dict[str, int] = {}

    def at(self, version: int) -> Mapping[str, int]:
        """Return the number of each of saf's transactions, as of a version.

        Raises:
            OSError: a file of the log is missing or cannot be read.
        """
        if self._version < 0:
            self._version, checkpoint = self._checkpoint(version)
            for path in checkpoint:
                self._numbers |= self._of_checkpoint(path)
        while self._version < version:
            text = self._files.content(file_of(self._version + 1))
            self._numbers |= _of_lines(text)
            self._version += 1
        return self._numbers

    def _checkpoint(self, version: int) -> tuple[int, list[str]]:
        """Return the version and files of the newest complete checkpoint; -1 without one."""
        checkpoints: dict[int, list[str]] = {}
        counts: dict[int, int] = {}
        for name in self._files.names(LOG):
            if (match := CHECKPOINT.fullmatch(name)) and int(match["version"]) <= version:
                checkpoints.setdefault(int(match["version"]), []).append(f"{LOG}/{name}")
                counts[int(match["version"])] = int(match["parts"] or 1)
        complete = [number for number, paths in checkpoints.items() if len(paths) >= counts[number]]
        newest = max(complete, default=-1)
        return newest, checkpoints.get(newest, [])

    def _of_checkpoint(self, path: str) -> dict[str, int]:
        if path.endswith(".json"):
            return _of_lines(self._files.content(path))
        column = pq.read_table(self._files.readable(path), columns=["txn"])["txn"]
        return _ours(action for action in column.drop_null().to_pylist())


def _of_lines(content: bytes) -> dict[str, int]:
    r"""Return saf's transactions in a file of the log.

    >>> _of_lines(b'{"add":{}}\n{"txn":{"appId":"saf:a","version":7}}\n')
    {'saf:a': 7}
    """
    lines = (json.loads(line) for line in content.splitlines() if OURS.encode() in line)
    return _ours(action["txn"] for action in lines if "txn" in action)


def _ours(actions: Iterator[Mapping[str, Any]]) -> dict[str, int]:
    return {
        action["appId"]: action["version"] for action in actions if action["appId"].startswith(OURS)
    }


def state_of(source: UUID, numbers: Mapping[str, int]) -> State:
    """Return a source's state from the numbers of transactions.

    >>> from datetime import UTC, datetime
    >>> source, at = UUID(int=7), datetime(2026, 1, 31, tzinfo=UTC)
    >>> mark = Mark(batch=2, position=70, opened_at=at, acknowledged=True)
    >>> numbers = dict(transactions(source, {("", 7): mark}, {7: 3}))
    >>> state_of(source, numbers) == State(marks={("", 7): mark}, epochs={7: 3})
    True
    """
    prefix = f"{OURS}{source}:"
    epochs: dict[int, int] = {}
    places: dict[Place, dict[str, int]] = {}
    for name, number in numbers.items():
        if name.startswith(prefix):
            shard, column, lane = name.removeprefix(prefix).split(":", 2)
            if column == "epoch":
                epochs[int(shard)] = number
            else:
                places.setdefault((lane, int(shard)), {})[column] = number
    marks = {place: mark_of(place[0], **values) for place, values in places.items()}
    return State(marks=marks, epochs=epochs)


def transactions(
    source: UUID, moved: Mapping[Place, Mark], epochs: Mapping[int, int]
) -> Iterator[tuple[str, int]]:
    """Yield the transactions that store marks and epochs."""
    for shard, epoch in epochs.items():
        yield f"{OURS}{source}:{shard}:epoch:", epoch
    for (lane, shard), mark in moved.items():
        for column, number in numbers_of(mark).items():
            yield f"{OURS}{source}:{shard}:{column}:{lane}", number


def file_of(version: int) -> str:
    """Return the path of a version's file in the log."""
    return f"{LOG}/{version:020}.json"


def checkpoint_of(version: int) -> str:
    """Return the path of the checkpoint that deltalake may have written for a version."""
    return f"{LOG}/{version:020}.checkpoint.parquet"
