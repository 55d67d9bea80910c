"""Receipts, one per task and destination: all that reaches the driver of a message."""

from __future__ import annotations

from collections.abc import Iterator

from saf.engine.work import Receipt


class Receipts:
    """The receipts of one task."""

    def __init__(self, work: int) -> None:
        self._work = work
        self._by_destination: dict[str | None, Receipt] = {}

    def of(self, destination: str | None) -> Receipt:
        """The receipt for a destination; None: the one for what concerns no single destination."""
        return self._by_destination.setdefault(
            destination, Receipt(work=self._work, destination=destination)
        )

    def stored(self, destination: str, rows: int, seconds: float) -> None:
        """Note that a chunk of so many rows was stored in one transaction."""
        receipt = self.of(destination)
        receipt.chunk_seconds.add(seconds)
        receipt.chunk_messages.add(rows)

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._by_destination.values())
