"""Sorting a chunk: which of its messages go where, and which wait in a lane.

Pure: rows and rules in, parts out. All that goes to one destination is one part, whatever routes
it took, because the watermark there says of a whole chunk that it is stored; each part is in
order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.parking import ROUTE, SERVICE, Lane
from saf.routes import Route


@dataclass(frozen=True, kw_only=True)
class Part:
    """Messages with the same way: a destination, or None where no route leads to one."""

    lane: Lane
    destination: str | None
    quality: str | None
    rows: pa.Table


def sort(
    rows: pa.Table,
    routes: Sequence[Route],
    qualities: Mapping[str, str],
    held: Mapping[Lane, str],
) -> list[Part]:
    """The parts of a chunk whose column ``route`` says which of ``routes`` each message takes.

    ``qualities`` are the known destinations' defaults. A route to any other is none.
    """
    ways: dict[tuple[str, str] | None, list[int | None]] = defaultdict(list)
    for number in pc.unique(rows["route"]).to_pylist():
        route = None if number is None else routes[number]
        if route is None or route.destination not in qualities:
            ways[None].append(number)
        else:
            quality = route.quality or qualities[route.destination]
            ways[route.destination, quality].append(number)
    parts: list[Part] = []
    for way, numbers in ways.items():
        mine = rows
        if len(ways) > 1:
            mine = rows.filter(pc.is_in(rows["route"], pa.array(numbers, pa.int32())))
        mine = mine.drop_columns(["route"])
        parts += _unroutable(mine) if way is None else _routed(mine, *way, held)
    return parts


def route_lane(service: str, broker: UUID | None) -> Lane:
    """Where messages wait for a route.

    >>> route_lane("billing", None).lane
    'route:billing'
    """
    return Lane(lane=f"{ROUTE}{service}" + (f"@{broker}" if broker else ""))


def of_route_lane(lane: Lane) -> tuple[str, str | None]:
    """The service and broker that a lane of `route_lane` is for.

    >>> of_route_lane(route_lane("a@b", UUID(int=1)))
    ('a@b', '00000000-0000-0000-0000-000000000001')
    """
    service, _, broker = lane.lane.removeprefix(ROUTE).rpartition("@")
    try:
        return service, str(UUID(broker))
    except ValueError:
        return lane.lane.removeprefix(ROUTE), None


def service_lane(destination: str, service: str) -> Lane:
    """Where messages wait for the destination to know their service."""
    return Lane(destination=destination, lane=f"{SERVICE}{service}")


def _unroutable(rows: pa.Table) -> Iterator[Part]:
    for (service, broker), mine in _by(rows, ["to_service", "to_broker"]):
        lane = route_lane(service, UUID(bytes=broker) if broker else None)
        yield Part(lane=lane, destination=None, quality=None, rows=mine)


def _routed(
    rows: pa.Table, destination: str, quality: str, held: Mapping[Lane, str]
) -> Iterator[Part]:
    """One part, but for messages behind others of their service that wait."""
    waiting = {lane for lane in held if lane.lane.startswith((ROUTE, SERVICE))}
    if waiting:
        rest = []
        for (service, broker), mine in _by(rows, ["to_service", "to_broker"]):
            lanes = (
                route_lane(service, UUID(bytes=broker) if broker else None),
                service_lane(destination, service),
            )
            lane = next((lane for lane in lanes if lane in waiting), None)
            if lane is None:
                rest.append(service)
            else:
                yield Part(lane=lane, destination=destination, quality=quality, rows=mine)
                rows = rows.filter(pc.invert(pc.is_in(rows["id"], mine["id"].combine_chunks())))
    if rows.num_rows:
        lane = Lane(destination=destination)
        yield Part(lane=lane, destination=destination, quality=quality, rows=rows)


def _by(rows: pa.Table, columns: list[str]) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """The rows by the values of some columns; those of one in order."""
    places: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, values in enumerate(zip(*(rows[c].to_pylist() for c in columns), strict=True)):
        places[values].append(place)
    for values, mine in places.items():
        yield values, rows.take(mine)
