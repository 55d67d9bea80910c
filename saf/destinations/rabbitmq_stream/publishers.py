"""Publishers: the numbers of a connection's publishers, and their messages as frames.

A connection has 256 numbers, two for marks. If a chunk has more publishers, they take
turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.packed import BYTES, fixed
from saf.destinations.rabbitmq_stream.connection import Connection
from saf.destinations.rabbitmq_stream.protocol import VERSION, Command

MOST = 254
"""Numbers for publishers of messages; the rest are for marks."""
HEAD = np.dtype([
    ("size", ">u4"), ("command", ">u2"), ("version", ">u2"), ("publisher", "u1"),
    ("count", ">u4"), ("id", ">u8"), ("bytes", ">u4"),
])  # fmt: skip
"""Header of a message's frame."""


class Publishers:
    """Publishers of one connection; at most `MOST` at a time."""

    head = HEAD.itemsize

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def publish(
        self,
        publishers: Sequence[tuple[str, str]],
        which: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        bodies: pa.Array,
        at_once: int,
    ) -> int:
        """Send messages, and wait until all are confirmed; return the number of new ones.

        Args:
            publishers: the name and stream of each publisher.
            which: for each message, the index of its publisher.
            ids: the publishing ids.
            bodies: the messages.
            at_once: messages to send before waiting for those sent earlier.
        """
        new = 0
        for first in range(0, len(publishers), MOST):
            batch = publishers[first : first + MOST]
            numbers, last = self._declared(batch)
            index = which - first
            if len(publishers) > MOST:
                mask = (index >= 0) & (index < len(batch))
                index = np.where(mask, index, 0)
            else:
                mask = np.ones(len(ids), bool)
            mask &= (ids > last[index]) | ~np.array([bool(name) for name, _ in batch])[index]
            new += self._send(numbers[index], ids, bodies, mask, at_once)
            for place, publisher in enumerate(batch):
                sent = ids[mask & (index == place)] if publisher[0] else ids[:0]
                if len(sent):
                    self._last[publisher] = int(sent[-1])
        return new

    def _declared(
        self, publishers: Sequence[tuple[str, str]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the numbers of publishers, and their last publishing ids."""
        new = [publisher for publisher in publishers if publisher not in self._numbers]
        if len(self._numbers) + len(new) > MOST:
            self._connection.forget([*self._numbers.values()])
            self._numbers, self._last = {}, {}
            new = [*publishers]
        free = iter(sorted({*range(MOST)} - {*self._numbers.values()}))
        declared = dict(zip(free, new, strict=False))
        for number, last in self._connection.declare(declared).items():
            self._numbers[declared[number]] = number
            self._last[declared[number]] = last
        return (
            np.array([self._numbers[publisher] for publisher in publishers], np.int64),
            np.array([self._last[publisher] for publisher in publishers], np.int64),
        )

    def _send(
        self,
        numbers: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        bodies: pa.Array,
        mask: npt.NDArray[np.bool_],
        at_once: int,
    ) -> int:
        """Send the messages that ``mask`` selects as frames."""
        if not mask.all():
            numbers, ids, bodies = numbers[mask], ids[mask], bodies.filter(pa.array(mask))
        count = len(ids)
        if not count:
            return 0
        sizes = np.asarray(pc.binary_length(bodies))
        heads = np.zeros(count, HEAD)
        heads["size"] = sizes + HEAD.itemsize - 4
        heads["command"], heads["version"], heads["count"] = Command.PUBLISH, VERSION, 1
        heads["publisher"], heads["id"], heads["bytes"] = numbers, ids, sizes
        frames = pc.binary_join_element_wise(fixed(heads), bodies, pa.scalar(b"", BYTES))
        ends = np.frombuffer(frames.buffers()[1], np.int64)[frames.offset :][: count + 1]
        data = memoryview(frames.buffers()[2])
        start = target = self._connection.confirmed
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            self._connection.send(data[ends[first] : ends[last]])
            self._connection.confirm(target)
            target = start + last
        self._connection.confirm(start + count)
        return count
