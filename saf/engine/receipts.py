"""Receipts, one per task and destination: all that the driver learns about messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from saf.engine.work import Receipt, add_services


class Receipts:
    """The receipts of one task."""

    def __init__(self, work: int) -> None:
        self._work = work
        self._by_destination: dict[str | None, Receipt] = {}

    def of(self, destination: str | None) -> Receipt:
        """Return the receipt of a destination; None: for counts of no single destination."""
        return self._by_destination.setdefault(
            destination, Receipt(work=self._work, destination=destination)
        )

    def stored(self, destination: str, rows: int, seconds: float) -> None:
        """Note that a chunk of ``rows`` messages was stored in one transaction."""
        receipt = self.of(destination)
        receipt.chunk_seconds.add(seconds)
        receipt.chunk_messages.add(rows)

    def delivered(self, destination: str, rows: pa.Table) -> None:
        """Note that a destination now has these rows."""
        add_services(self.of(destination).services, _by_service(rows))

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._by_destination.values())


def _by_service(rows: pa.Table) -> Counter[str]:
    """Count rows by service; Python sees no message."""
    counts = rows["to_service"].value_counts()
    return Counter(
        dict(zip(*(counts.field(name).to_pylist() for name in ("values", "counts")), strict=True))
    )
