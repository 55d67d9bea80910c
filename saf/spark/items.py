"""Items of work on their way to the tasks of a job: each goes to its own task only.

Items hold the passwords of their sources. So they must not be in a plan, which Spark shows, nor in
a function, which goes to every task. Each item is in the partition of its own task.
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
"""The column with an item, where only DataFrames exist."""

Numbered = tuple[int, Work]
"""An item, and the number that its receipts call it by."""


def partitions(numbered: Sequence[Numbered]) -> list[bytes]:
    """Return the content of each item's partition."""
    return [pickle.dumps(one) for one in numbered]


def opened(handed: bytes) -> Numbered:
    """Return the item that `partitions` has packed."""
    number, item = pickle.loads(handed)  # noqa: S301 - our own bytes  # nosec B301
    return number, item


def unbroken(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Give what Spark hands a task.

    If that breaks off, because what Spark evaluates has failed, then this is no message's fault.

    Raises:
        Unavailable: it has broken off.
    """
    try:
        yield from batches
    except Exception as error:  # of Arrow, of the socket, or of PySpark's own protocol
        raise Unavailable("Spark", f"the stream of rows to a task broke off ({error})") from error
