"""Reading back for kinds without a server that counts: a source's messages as a table in memory.

A message takes about 100 bytes. The figures are the same as PostgreSQL's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations import Compared, Entry, Figures
from saf.destinations.marks import Known

HELD = pa.schema([
    ("message_id", pa.binary(16)), ("shard", pa.int64()), ("to_service", pa.string()),
    ("to_broker", pa.binary()), ("key", pa.string()), ("created_at", pa.timestamp("us", "UTC")),
])  # fmt: skip
"""Columns required for each message."""

Numbers = npt.NDArray[np.uint32]


class Held:
    """A source's messages, which Python reads one by one."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in HELD.names}

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a message, with the columns `HELD`."""
        for name, values in self._columns.items():
            values.append(message[name])

    def table(self) -> pa.Table:
        """Return the messages."""
        return pa.table(self._columns, schema=HELD)


@dataclass(frozen=True, kw_only=True)
class TableReading:
    """A `saf.destinations.Reading` of tables in memory."""

    name: str
    is_: UUID
    """The destination's identity."""
    read: Callable[[UUID], pa.Table]
    """Returns all messages of a source, with the columns `HELD`."""
    knows: Callable[[UUID], Known]

    def identity(self) -> UUID:
        """Return the identity."""
        return self.is_

    def purged(self) -> str | None:
        """Return None: nothing is purged."""
        return None

    def known(self, source: UUID) -> Known:
        """Return the destination's marks."""
        return self.knows(source)

    def figures(self, what: Compared) -> Iterable[Figures]:
        """Count the messages of each shard."""
        rows = self._compared(what)
        plain = np.asarray(pc.invert(_of(rows, what.topics)))
        hashes = uuid_hashes(rows["message_id"]).astype(object)
        shards = np.asarray(rows["shard"])
        for shard in np.unique(shards):
            shard_rows = shards == shard
            plain_rows = shard_rows & plain
            yield Figures(
                int(shard),
                int(shard_rows.sum()),
                int(plain_rows.sum()),
                int(hashes[plain_rows].sum()),
            )

    def stored(self, what: Compared, shards: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Yield the messages, sorted by id."""
        rows = self._compared(what)
        mask = pc.is_in(rows["shard"], pa.array(shards, pa.int64()))
        rows = rows.filter(pc.or_(mask, _of(rows, what.topics)))
        rows = rows.set_column(0, "message_id", pc.cast(rows["message_id"], pa.binary()))
        for row in rows.sort_by("message_id").to_pylist():
            yield Entry(
                message_id=row["message_id"],
                where=self.name,
                shard=row["shard"],
                id=0,
                service=row["to_service"],
                broker=row["to_broker"] and UUID(bytes=row["to_broker"]),
                key=row["key"],
                created_at=row["created_at"],
                state="stored",
            )

    def begun(self, source: UUID, topics: Collection[str]) -> Iterable[tuple[str, Any]]:
        """Return when the oldest message of each topic was created."""
        rows = self.read(source)
        oldest = rows.filter(_of(rows, topics)).group_by("to_service")
        for row in oldest.aggregate([("created_at", "min")]).to_pylist():
            yield row["to_service"], row["created_at_min"]

    def _compared(self, scope: Compared) -> pa.Table:
        rows = self.read(scope.source)
        for moment, keep in ((scope.since, pc.greater_equal), (scope.until, pc.less)):
            if moment is not None:
                bound = pa.scalar(moment, HELD.field("created_at").type)
                rows = rows.filter(keep(rows["created_at"], bound))
        return rows


def _of(rows: pa.Table, topics: Collection[str]) -> pa.ChunkedArray:
    return pc.is_in(rows["to_service"], pa.array([*topics], pa.string()))


def uuid_hashes(ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Compute PostgreSQL's ``uuid_hash_extended(id, 0)`` for 16-byte ids: Bob Jenkins' lookup3.

    >>> uuid_hashes(pa.chunked_array([pa.array([bytes(16)], pa.binary(16))])).dtype
    dtype('int64')
    """
    raw = b"".join(ids.to_pylist())
    words = np.frombuffer(raw, "<u4").reshape(-1, 4).T
    start = np.uint32(0x9E3779B9 + 16 + 3923095)
    with np.errstate(over="ignore"):
        a, b, c = _mixed(*(start + word for word in words[:3]))
        b, c = _final(a + words[3], b, c)
    return ((b.astype(np.uint64) << np.uint64(32)) | c.astype(np.uint64)).view(np.int64)


def _mixed(a: Numbers, b: Numbers, c: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    for bits in (4, 6, 8, 16, 19, 4):
        a, c = (a - c) ^ _turned(c, bits), c + b
        a, b, c = b, c, a  # rotate for the next round
    return a, b, c


def _final(a: Numbers, b: Numbers, c: Numbers) -> tuple[Numbers, Numbers]:
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - _turned(b, bits)
        a, b, c = b, c, a
    # after seven rounds: c is where b was before the last round
    return a, b


def _turned(number: Numbers, bits: int) -> Numbers:
    return (number << np.uint32(bits)) | (number >> np.uint32(32 - bits))
