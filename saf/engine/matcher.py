"""The matcher: finds each message's match, inside the task that delivers the message.

It looks services and brokers up in Arrow hash tables built from the names in the routes. So a
thousand routes cost as much as one: some 10 ns per message. (In Spark, a CASE over 1,000 conditions
takes minutes to compile, and a literal map or a broadcast join of 1,000 costs half a µs per
message.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.routing.matching import Match, Named, Routes, distinct_matches


class Matcher:
    """The matches of one set of routes."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self.matches: list[Match] = distinct_matches(routes)
        """The matches that the numbers in the column ``route`` stand for."""
        number = {match: place for place, match in enumerate(self.matches)}
        self._for_any = _Table(routes.matches, number)
        self._to_known = _Table(routes.matches_of_known, number)
        self._to_unknown = _Table(routes.matches_of_unknown, number)

    def route(self, rows: pa.Table) -> pa.Table:
        """Add the column ``route``: the number of each row's match, or null."""
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

    def quality(self, rows: pa.Table, destination: str) -> pa.ChunkedArray:
        """Return for each row the quality of service that its route to a destination names, or
        null."""
        named = [
            next((r.quality for r in match.routes if r.destination == destination), None)
            for match in self.matches
        ]
        return pa.array(named, pa.string()).take(self.route(rows)["route"])


class _Table:
    """The numbers of matches, by the service and broker that routes name."""

    def __init__(self, matches: Mapping[Named, Match], number: Mapping[Match, int]) -> None:
        self._services: dict[str, int] = {}
        self._brokers: dict[bytes, int] = {}
        self._both: dict[tuple[str, bytes], int] = {}
        self.any = pa.scalar(None, pa.int32())
        for (service, broker), match in matches.items():
            broker_id = UUID(broker).bytes if broker is not None else None
            if service is not None and broker_id is not None:
                self._both[service, broker_id] = number[match]
            elif service is not None:
                self._services[service] = number[match]
            elif broker_id is not None:
                self._brokers[broker_id] = number[match]
            else:
                self.any = pa.scalar(number[match], pa.int32())

    def by_service(self, services: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of each service's match, or null."""
        return _looked_up(services, pa.array(self._services, pa.string()), self._services.values())

    def by_broker(self, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of each broker's match, or null."""
        return _looked_up(brokers, pa.array(self._brokers, pa.binary()), self._brokers.values())

    def by_both(self, services: pa.ChunkedArray, brokers: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the number of the match of each service at a broker, or null."""
        service = pa.array(dict.fromkeys(service for service, _ in self._both), pa.string())
        broker = pa.array(dict.fromkeys(broker for _, broker in self._both), pa.binary())
        width = np.int64(len(broker))

        def code(services: pa.Array, brokers: pa.Array) -> pa.Array:
            index = pc.index_in(services, value_set=service).cast(pa.int64())
            return pc.add(pc.multiply(index, width), pc.index_in(brokers, value_set=broker))

        named = list(zip(*self._both, strict=True)) or [(), ()]
        codes = code(pa.array(named[0], pa.string()), pa.array(named[1], pa.binary()))
        return _looked_up(code(services, brokers), codes, self._both.values())


def _looked_up(column: pa.ChunkedArray, names: pa.Array, numbers: Iterable[int]) -> pa.ChunkedArray:
    """Return the number of each value's name, or null."""
    places = pc.index_in(column, value_set=names, skip_nulls=True)
    return pa.array(numbers, pa.int32()).take(places)
