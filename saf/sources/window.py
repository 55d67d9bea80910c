"""Window: the ids of the messages that were stored last, for a topic without places.

A queue delivers a message again if it got no acknowledgement: after a crash of either side, or if
the acknowledgement was lost. Its broker tells nothing else by which the message could be
recognised. So the transaction that stores a chunk also stores the chunk's ids as one row of
saf.source_window, and removes the rows that the bounds no longer keep. One row a chunk costs little
to write and to remove, and no index of ids grows.

The process that owns the partition reads all rows once, and keeps the ids in memory. The
transaction that stores checks the owner, so no other process has added any.

A message counts as stored before if its message_id is in the window. Rows are removed only when new
messages are stored, so the messages of a crash are recognised however long nothing ran.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from saf.sources.settings import WindowBounds


class Window:
    """Ids of the last messages of a partition, oldest first."""

    def __init__(self, bounds: WindowBounds, ids: Iterable[bytes] = ()) -> None:
        self.bounds = bounds
        self._ids = dict.fromkeys(ids)

    def fresh(self, rows: pa.Table, after: int) -> pa.Table:
        """Return the rows that were not seen yet, numbered after ``after``; they count as seen.

        >>> window = Window(WindowBounds(messages=2, seconds=60))
        >>> rows = pa.table({"message_id": [b"a", b"b", b"a"], "id": [0, 0, 0]})
        >>> window.fresh(rows, 7).to_pylist()
        [{'message_id': b'a', 'id': 8}, {'message_id': b'b', 'id': 9}]
        >>> window.fresh(rows.slice(0, 1), 9).num_rows
        0

        Only the newest ids are kept:

        >>> other = pa.table({"message_id": [b"c"], "id": [0]})
        >>> window.fresh(other, 9).num_rows, window.fresh(rows.slice(0, 1), 10).num_rows
        (1, 1)
        """
        if self.bounds.messages:
            rows = rows.filter(pa.array([self._add(id_) for id_ in rows["message_id"].to_pylist()]))
        numbers = pa.array(range(after + 1, after + 1 + rows.num_rows), pa.int64())
        return rows.set_column(rows.column_names.index("id"), "id", numbers)

    def _add(self, id_: bytes) -> bool:
        """Add an id; return whether it is new."""
        if id_ in self._ids:
            return False
        self._ids[id_] = None
        if len(self._ids) > self.bounds.messages:
            del self._ids[next(iter(self._ids))]
        return True
