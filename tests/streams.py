"""What Spark does with a stream, without Spark: a checkpoint, micro-batches, crashes in between.

Spark writes the end of a micro-batch into its checkpoint, lets the source commit the one before,
reads, and then notes that it is complete. After a crash it reads again what is not noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable

from saf.spark.table.part import Part
from saf.spark.table.source import Messages
from saf.spark.table.stream import Stream

MOST_STEPS = 200
COLUMNS = ("id", "shard", "key", "body")


class Crash(BaseException):
    """The driver is gone."""


@dataclass(kw_only=True)
class Query:
    """A query with its checkpoint, and a sink that keeps each micro-batch once."""

    options: dict[str, str]
    offsets: list[str] = field(default_factory=list)
    """The ends of the micro-batches, as Spark writes them down."""
    complete: int = 0
    """How many of them are complete."""
    sink: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """The rows by the number of the micro-batch, each partition's in its order."""
    running: Stream | None = None

    def reader(self) -> Stream:
        """The reader of this run."""
        if self.running is None:
            source = Messages(self.options)
            self.running = source.streamReader(source.schema())
        return self.running

    def die(self) -> None:
        """What is in memory is gone."""
        self.running = None

    def start(self) -> dict[str, Any]:
        """Where the micro-batch begins that is to be read."""
        if self.complete:
            return dict(json.loads(self.offsets[self.complete - 1]))
        return through_json(self.reader().initialOffset())

    def step(self, *, limited: bool = True, crash: str = "") -> bool:
        """One trigger; whether there was anything to do, even if it was empty.

        It crashes once it has ``asked`` for the end, has ``written`` it into the checkpoint,
        has ``committed`` the one before, or has ``read``.
        """
        reader = self.reader()
        if len(self.offsets) == self.complete:
            start = self.start()
            limit = reader.getDefaultReadLimit() if limited else ReadAllAvailable()
            end = through_json(reader.latestOffset(start, limit))
            self._crash(crash == "asked")
            if end == start:
                return False
            self.offsets.append(json.dumps(end))
            self._crash(crash == "written")
            if self.complete:
                reader.commit(start)
            self._crash(crash == "committed")
        rows = self.rows(self.complete)
        self._crash(crash == "read")
        self.sink[self.complete] = rows
        self.complete += 1
        return True

    def _crash(self, now: bool) -> None:
        if now:
            self.die()
            raise Crash

    def drain(self, **how: Any) -> None:
        """Triggers until nothing is left."""
        for _ in range(MOST_STEPS):
            if not self.step(**how):
                return
        raise AssertionError("the stream does not come to its end")

    def rows(self, number: int) -> list[tuple[Any, ...]]:
        """What a micro-batch of the checkpoint has, read now."""
        start = (
            dict(json.loads(self.offsets[number - 1])) if number else self.reader().initialOffset()
        )
        planned = self.reader().partitions(start, json.loads(self.offsets[number]))
        return [row for part in planned for row in read(self.reader(), part)]

    @property
    def bodies(self) -> list[str]:
        """The bodies that the sink has."""
        return [row[3].decode() for number in sorted(self.sink) for row in self.sink[number]]

    @property
    def sizes(self) -> list[int]:
        """How many messages the micro-batches have."""
        return [len(self.sink[number]) for number in sorted(self.sink)]


def read(reader: Stream, part: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a partition, by id."""
    assert isinstance(part, Part)
    last = 0
    for batch in reader.read(part):
        assert isinstance(batch, pa.RecordBatch)
        for row in batch.select(list(COLUMNS)).to_pylist():
            assert row["id"] > last
            last = row["id"]
            yield tuple(row[name] for name in COLUMNS)


def through_json(offset: dict[str, Any]) -> dict[str, Any]:
    """Return an offset as Spark gives it back: made of numbers, texts and truth values."""
    return dict(json.loads(json.dumps(offset)))


def query(config: Path, subscription: str = "lake", **options: object) -> Query:
    """A new query, with a new checkpoint, of the broker ``app``."""
    given = {"broker": "app", "log": "outbox", "config": config, "subscription": subscription}
    return Query(options={name: str(value) for name, value in {**given, **options}.items()})
