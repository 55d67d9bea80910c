"""In step: what Spark evaluates of messages comes to the task that delivers them, as it goes on.

It is one stream of rows, in the order of the messages' numbers, of two kinds: answers of routers'
expressions, and results of transforms. Each consumer reads on to the messages in hand; what belongs
to the other one is held for it. So no more is held than about one chunk, and what comes with it.

A message of the batch has its id as its number. A parked message has a number below zero, so that
what is about parked messages comes first: the number of an answer is its parked_id, that of a
result its id in the outbox, both with a minus.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.errors import Unavailable

ENDED = "ended"
"""The column that tells rows apart: NULL in an answer, false in a result, true in the last row."""
LAST = (1 << 63) - 1
"""Greater than the number of any message: that of the last row, which is about none."""


class InStep:
    """What comes to one task."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._answers: list[pa.RecordBatch] = []
        self._results: list[pa.RecordBatch] = []
        self._last = -LAST
        """The greatest number so far."""

    def answers(self, rows: pa.Table) -> pa.Table | None:
        """Read on to some messages, of the batch or parked; return the answers about them.

        They have the column ``id``, which is the message's id, or its parked_id if it is parked.

        Raises:
            Unavailable: what is evaluated has ended early, or is not in its order.
        """
        return self._about(rows, self._answers)

    def results(self, rows: pa.Table) -> pa.Table | None:
        """Read on to some messages; return the results about them, by ids in the outbox.

        Raises:
            Unavailable: what is evaluated has ended early, or is not in its order.
        """
        return self._about(rows, self._results)

    def _about(self, rows: pa.Table, held: list[pa.RecordBatch]) -> pa.Table | None:
        parked = "parked_id" in rows.column_names
        first, last = (-LAST, -1) if parked else (rows["id"][0].as_py(), rows["id"][-1].as_py())
        while self._last <= last:  # a message may have several results
            self._read()
        held[:] = [one for one in held if one["id"][-1].as_py() >= first]
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
        for held, mine in ((self._answers, of_answers), (self._results, pc.invert(of_answers))):
            some = batch.filter(mine)
            if some.num_rows:
                held.append(some)
