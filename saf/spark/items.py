"""Items of work on their way to the tasks of a job: each goes only to its own task.

Items contain the passwords of their sources. So they must not be in a plan, which Spark shows, or
in a function, which goes to every task. Each item is in the partition of its own task.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from saf.engine.work import Work
from saf.errors import Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

ITEM = "item"
"""Name of the column with an item, where only DataFrames exist."""

Numbered = tuple[int, Work]
"""An item, and its number in receipts."""


def partitions(numbered: Sequence[Numbered]) -> list[bytes]:
    """Return the content of each item's partition."""
    return [pickle.dumps(item) for item in numbered]


def opened(handed: bytes) -> Numbered:
    """Return the item that `partitions` packed."""
    number, item = pickle.loads(handed)  # noqa: S301 - our own bytes  # nosec B301
    return number, item


def unbroken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that Spark passes to a task.

    If the stream breaks off because an evaluation failed in Spark, no message is at fault.

    Raises:
        Unavailable: the stream broke off.
    """
    try:
        yield from batches
    except Exception as error:  # of Arrow, of the socket, or of PySpark's own protocol
        raise Unavailable("Spark", f"the stream of rows to a task broke off ({error})") from error
