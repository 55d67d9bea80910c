"""Routing: which way each message of a chunk goes, inside the task that delivers it.

By look-ups of Arrow in hash tables of what the routes name, so that a thousand routes cost what one
does: some 10 ns a message. (In Spark, a CASE over 1,000 conditions takes minutes to compile, and a
literal map or a broadcast join of 1,000 costs half a µs a message.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.routing.ways import Named, Routes, Way, distinct_ways


class Wayfinder:
    """The ways of one set of routes."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.ways: list[Way] = distinct_ways(routes)
        """What the numbers in the column ``route`` mean."""
        number = {way: place for place, way in enumerate(self.ways)}
        self._for_any = _Table(routes.ways, number)
        self._to_known = _Table(routes.ways_to_known, number)
        self._to_unknown = _Table(routes.ways_to_unknown, number)

    def route(self, rows: pa.Table) -> pa.Table:
        """The rows with a column ``route``: the number of each one's way, or null."""
        services, brokers = rows["to_service"], rows["to_broker"]
        route = pc.coalesce(self._for_any.by_service(services), self._for_any.any)
        if brokers.null_count < len(brokers):
            of_broker = pc.coalesce(
                self._to_known.by_both(services, brokers),
                self._to_known.by_broker(brokers),
                self._to_unknown.by_both(services, brokers),
                self._to_unknown.by_service(services),
                self._to_unknown.by_broker(brokers),
                self._to_unknown.any,
            )
            route = pc.if_else(pc.is_valid(brokers), of_broker, route)
        return rows.append_column("route", route)


class _Table:
    """The numbers of ways, by what routes name."""

    def __init__(self, ways: Mapping[Named, Way], number: Mapping[Way, int]) -> None:
        self._services: dict[str, int] = {}
        self._brokers: dict[bytes, int] = {}
        self._both: dict[tuple[str, bytes], int] = {}
        self.any = pa.scalar(None, pa.int32())
        for (service, broker), way in ways.items():
            there = UUID(broker).bytes if broker is not None else None
            if service is not None and there is not None:
                self._both[service, there] = number[way]
            elif service is not None:
                self._services[service] = number[way]
            elif there is not None:
                self._brokers[there] = number[way]
            else:
                self.any = pa.scalar(number[way], pa.int32())

    def by_service(self, services: pa.ChunkedArray) -> pa.ChunkedArray:
        """Of each service the number of its way, or null."""
        return _looked_up(services, pa.array(self._services, pa.string()), self._services.values())

    def by_broker(self, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Of each broker the number of its way, or null."""
        return _looked_up(brokers, pa.array(self._brokers, pa.binary()), self._brokers.values())

    def by_both(self, services: pa.ChunkedArray, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Of each service at a broker the number of its way, or null."""
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
