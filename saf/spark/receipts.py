"""Receipts, one per task and destination: all that reaches the driver of a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

import pyarrow as pa

from saf.spark.work import Receipt

_COLUMNS = {
    "work": "int",
    "destination": "string",
    "messages": "long",
    "dropped": "long",
    "parked": "long",
    "dead": "long",
    "complete": "boolean",
    "stopped": "boolean",
    "error_kind": "string",
    "error": "string",
}
_TYPES = {"int": pa.int32(), "long": pa.int64(), "string": pa.string(), "boolean": pa.bool_()}
RECEIPT_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in _COLUMNS.items())
_ARROW = pa.schema([(name, _TYPES[kind]) for name, kind in _COLUMNS.items()])


class Receipts:
    """Those of one task."""

    def __init__(self, work: int) -> None:
        self._work = work
        self._by_destination: dict[str | None, Receipt] = {}

    def of(self, destination: str | None) -> Receipt:
        """The one for a destination, or for what concerns no single one."""
        return self._by_destination.setdefault(
            destination, Receipt(work=self._work, destination=destination)
        )

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._by_destination.values())


def as_arrow(receipts: Iterable[Receipt]) -> pa.RecordBatch:
    """A row each, of `RECEIPT_SCHEMA`."""
    return pa.RecordBatch.from_pylist([asdict(receipt) for receipt in receipts], schema=_ARROW)
