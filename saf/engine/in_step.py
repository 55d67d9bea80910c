"""In step: pass the values that Spark evaluates to the task that delivers, as it proceeds.

They are one stream of rows, ordered by the messages' numbers, of two kinds: answers of routers'
expressions, and results of transforms. Each consumer reads up to its current messages and holds
rows of the other kind for the other consumer. So about one chunk of rows is held at most.

A message of the batch has its id as its number. A parked message has a negative number, so that
rows about parked messages come first: minus the parked_id for an answer, minus the id in the outbox
for a result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.errors import Unavailable

ENDED = "ended"
"""Column that tells rows apart: NULL in an answer, false in a result, true in the last row."""
LAST = (1 << 63) - 1
"""Number of the last row, which belongs to no message; greater than any message's number."""


class InStep:
    """The evaluated rows of one task."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._answers: list[pa.RecordBatch] = []
        self._results: list[pa.RecordBatch] = []
        self._last = -LAST
        """The greatest number so far."""

    def answers(self, rows: pa.Table) -> pa.Table | None:
        """Read up to some messages, of the batch or parked; return the answers about them.

        The column ``id`` contains the message's id, or its parked_id if it is parked.

        Raises:
            Unavailable: the stream ended early or is out of order.
        """
        return self._about(rows, self._answers)

    def results(self, rows: pa.Table) -> pa.Table | None:
        """Read up to some messages; return the results about them, by ids in the outbox.

        Raises:
            Unavailable: the stream ended early or is out of order.
        """
        return self._about(rows, self._results)

    def _about(self, rows: pa.Table, held: list[pa.RecordBatch]) -> pa.Table | None:
        parked = "parked_id" in rows.column_names
        first, last = (-LAST, -1) if parked else (rows["id"][0].as_py(), rows["id"][-1].as_py())
        while self._last <= last:  # a message may have several results
            self._read()
        held[:] = [batch for batch in held if batch["id"][-1].as_py() >= first]
        if not held:
            return None
        found = pa.Table.from_batches(held)
        numbers = found["id"].to_numpy()
        start, end = np.searchsorted(numbers, first), np.searchsorted(numbers, last, "right")
        found = found.slice(start, end - start)
        return found.set_column(0, "id", pc.negate(found["id"])) if parked else found

    def _read(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            raise Unavailable("Spark", "the evaluated rows are incomplete")
        numbers = batch["id"].to_numpy()
        if numbers[0] < self._last or (numbers[1:] < numbers[:-1]).any():
            raise Unavailable("Spark", "the evaluated rows are out of order")
        self._last = int(numbers[-1])
        if self._last == LAST:
            batch = batch.slice(0, batch.num_rows - 1)
            if next(self._batches, None) is not None:
                raise Unavailable("Spark", "there are evaluated rows after the last")
        of_answers = pc.is_null(batch[ENDED])
        for held, mask in ((self._answers, of_answers), (self._results, pc.invert(of_answers))):
            rows = batch.filter(mask)
            if rows.num_rows:
                held.append(rows)
