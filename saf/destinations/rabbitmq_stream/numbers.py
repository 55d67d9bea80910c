"""Numbers: the publishing id of each message, and the name of its publisher.

The server keeps the last publishing id of each publisher of a stream, and drops messages that are
not above it. So the id is a function of the message's place, batch and row id only: every process,
with any chunk and any epoch, gives a message the same publisher and the same id. If an old and
a new owner both send first, they number their messages alike.

Row ids do not rise across batches, so the batch has the higher bits of the id:

    publisher   SOURCE/SHARD/LANE/GENERATION      the generation is the batch / 2**15
    id          the batch % 2**15, and in the 48 bits below it the row's id
"""

from __future__ import annotations

from hashlib import sha256
from uuid import UUID

import numpy as np
import numpy.typing as npt

from saf.destinations.marks import Place

ROW_BITS, BATCH_BITS = 48, 15
LONGEST = 255
"""Longest name of a publisher that a server accepts, in bytes."""


def publisher(source: UUID, place: Place, generation: int) -> str:
    """Return the name of a publisher, with a hash if the lane's name is too long.

    >>> publisher(UUID(int=7), ("retry", 3), 0)
    '00000000-0000-0000-0000-000000000007/3/retry/0'
    >>> len(publisher(UUID(int=7), ("route:" + "ü" * 200, 3), 0))
    106
    """
    lane, shard = place
    name = f"{source}/{shard}/{lane}/{generation}"
    if len(name.encode()) <= LONGEST:
        return name
    return f"{source}/{shard}/#{sha256(lane.encode()).hexdigest()}/{generation}"  # no lane has a #


def generation(batch: int) -> int:
    """Return the generation of a batch."""
    return batch >> BATCH_BITS


def publishing_ids(
    batches: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the id of each message.

    >>> low, high = publishing_ids(np.array([1, 2]), np.array([900, 3]))
    >>> bool(low < high)
    True

    Raises:
        OverflowError: a row's id has more than 48 bits.
    """
    if len(rows) and rows.max() >> ROW_BITS:
        raise OverflowError(f"row {rows.max():,} has more than {ROW_BITS} bits")
    return ((batches & ((1 << BATCH_BITS) - 1)) << ROW_BITS) | rows


def is_of(publishing_id: int, batch: int) -> bool:
    """Return True if ``publishing_id`` belongs to ``batch`` or later, in the same generation.

    >>> last = int(publishing_ids(np.array([5]), np.array([900]))[0])
    >>> is_of(last, 5), is_of(last, 6), is_of(0, 1)
    (True, False, False)
    """
    return publishing_id >> ROW_BITS >= batch & ((1 << BATCH_BITS) - 1) and publishing_id > 0
