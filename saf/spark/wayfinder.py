"""Routing: which way each message of a chunk goes, inside the task that delivers it.

By look-ups of Arrow in hash tables of what the routes name, so that a thousand routes cost what one
does: some 10 ns a message. (In Spark, a CASE over 1,000 conditions takes minutes to compile, and a
literal map or a broadcast join of 1,000 costs half a µs a message.)
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.ways import Routes, Way, distinct_ways


class Wayfinder:
    """The ways of one set of routes."""

    def __init__(self, routes: Routes) -> None:
        self.ways: list[Way] = distinct_ways(routes)
        """What the numbers in the column ``route`` mean."""
        number = {way: place for place, way in enumerate(self.ways)}
        self._services: dict[str, int] = {}
        self._brokers: dict[bytes, int] = {}
        self._both: dict[tuple[str, bytes], int] = {}
        self._any: int | None = None
        for (service, broker), way in routes.ways.items():
            there = UUID(broker).bytes if broker is not None else None
            if service is not None and there is not None:
                self._both[service, there] = number[way]
            elif service is not None:
                self._services[service] = number[way]
            elif there is not None:
                self._brokers[there] = number[way]
            else:
                self._any = number[way]

    def route(self, rows: pa.Table) -> pa.Table:
        """The rows with a column ``route``: the number of each one's way, or null."""
        services, brokers = rows["to_service"], rows["to_broker"]
        found = []
        if brokers.null_count < len(brokers):
            found.append(self._by_both(services, brokers))
        found.append(
            _looked_up(services, pa.array(self._services, pa.string()), self._services.values())
        )
        if brokers.null_count < len(brokers):
            found.append(
                _looked_up(brokers, pa.array(self._brokers, pa.binary()), self._brokers.values())
            )
        found.append(pa.scalar(self._any, pa.int32()))
        return rows.append_column("route", pc.coalesce(*found))

    def _by_both(self, services: pa.ChunkedArray, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        service = pa.array(dict.fromkeys(service for service, _ in self._both), pa.string())
        broker = pa.array(dict.fromkeys(broker for _, broker in self._both), pa.binary())
        width = np.int64(len(broker))

        def code(services: pa.Array, brokers: pa.Array) -> pa.Array:
            which = pc.index_in(services, value_set=service).cast(pa.int64())
            return pc.add(pc.multiply(which, width), pc.index_in(brokers, value_set=broker))

        named = list(zip(*self._both, strict=True)) or [(), ()]
        codes = code(pa.array(named[0], pa.string()), pa.array(named[1], pa.binary()))
        return _looked_up(code(services, brokers), codes, self._both.values())


def _looked_up(column: pa.ChunkedArray, names: pa.Array, numbers: Iterable[int]) -> pa.ChunkedArray:
    """Of each value the number that its name has, or null."""
    places = pc.index_in(column, value_set=names, skip_nulls=True)
    return pa.array(numbers, pa.int32()).take(places)
