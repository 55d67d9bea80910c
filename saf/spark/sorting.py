"""Sorting a chunk: which of its messages go where, and which wait in a lane.

Pure: rows and rules in, parts out. All that goes to one destination is one part, whatever routes
it took, because the watermark there says of a whole chunk that it is stored; each part is in
order. A topic's message is in the part of each of its destinations, and each of these waits and
is set aside by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.parking import FOUND, ROUTE, SERVICE, Lane
from saf.ways import Way


@dataclass(frozen=True, kw_only=True)
class Part:
    """Messages with the same way: a destination, or None where no route leads to one."""

    lane: Lane
    destination: str | None
    quality: str | None
    rows: pa.Table


def sort(
    rows: pa.Table,
    ways: Sequence[Way],
    qualities: Mapping[str, str],
    held: Mapping[Lane, str],
) -> list[Part]:
    """The parts of a chunk whose column ``route`` says which of ``ways`` each message goes.

    None of them is shared any more. ``qualities`` are the known destinations' defaults. A route to
    any other is none; but of a topic's, whose messages wait for that destination alone. Nor is
    there one for messages behind others that still wait for it.
    """
    rows = _behind(rows, {lane for lane in held if lane.unrouted})
    numbers: dict[tuple[str, str | None] | None, list[int | None]] = defaultdict(list)
    there = pc.unique(rows["route"]).to_pylist()
    for number in there:
        way = None if number is None else ways[number]
        if way is None or not (way.to_all or way.routes[0].destination in qualities):
            numbers[None].append(number)
            continue
        for route in way.routes:
            default = qualities.get(route.destination)
            numbers[route.destination, default and (route.quality or default)].append(number)
    parts: list[Part] = []
    for there_by, mine in numbers.items():
        chosen = rows
        if len(mine) < len(there):
            chosen = rows.filter(pc.is_in(rows["route"], pa.array(mine, pa.int32())))
        chosen = chosen.drop_columns(["route"])
        parts += unroutable(chosen) if there_by is None else _routed(chosen, *there_by, held)
    return parts


def route_lane(service: str, broker: UUID | None) -> Lane:
    """Where messages wait for a route.

    >>> route_lane("billing", None).lane
    'route:billing'
    """
    return Lane(lane=f"{ROUTE}{service}" + (f"@{broker}" if broker else ""))


def of_route_lane(lane: Lane) -> tuple[str, str | None]:
    """The service and broker that a lane of `route_lane`, or what is found from it, is for.

    >>> of_route_lane(route_lane("a@b", UUID(int=1)))
    ('a@b', '00000000-0000-0000-0000-000000000001')
    """
    name = lane.lane.removeprefix(FOUND).removeprefix(ROUTE)
    service, _, broker = name.rpartition("@")
    try:
        return service, str(UUID(broker))
    except ValueError:
        return name, None


def found_lane(destination: str, lane: Lane) -> Lane:
    """Where messages that have waited for a route, and found one, wait for its destination.

    >>> found_lane("mom", route_lane("billing", None)).lane
    'found:route:billing'
    """
    return Lane(destination=destination, lane=f"{FOUND}{lane.lane}")


def service_lane(destination: str, service: str) -> Lane:
    """Where messages wait for the destination to know their service."""
    return Lane(destination=destination, lane=f"{SERVICE}{service}")


def unroutable(rows: pa.Table) -> Iterator[Part]:
    """A part for each service, and broker, whose messages wait for a route."""
    for (service, broker), mine in by_address(rows):
        lane = _route_lane(service, broker)
        yield Part(lane=lane, destination=None, quality=None, rows=mine)


def _route_lane(service: str, broker: bytes | None) -> Lane:
    return route_lane(service, UUID(bytes=broker) if broker else None)


def _behind(rows: pa.Table, unrouted: Collection[Lane]) -> pa.Table:
    """The rows without a route for those whose service, and broker, have messages waiting for one.

    Each of these finds its route with them, so that it comes to its destination after them.
    """
    if not unrouted:
        return rows
    ids = [
        mine["id"].combine_chunks()
        for address, mine in by_address(rows)
        if _route_lane(*address) in unrouted
    ]
    if not ids:
        return rows
    behind = pc.is_in(rows["id"], pa.concat_arrays(ids))
    route = pc.if_else(behind, pa.scalar(None, rows["route"].type), rows["route"])
    return rows.set_column(rows.column_names.index("route"), "route", route)


def _routed(
    rows: pa.Table, destination: str, quality: str | None, held: Mapping[Lane, str]
) -> Iterator[Part]:
    """One part, but for messages behind others of their service that wait."""
    waiting = {lane for lane in held if lane.lane.startswith((FOUND, SERVICE))}
    if waiting:
        for (service, broker), mine in by_address(rows):
            found = found_lane(destination, _route_lane(service, broker))
            unknown = service_lane(destination, service)
            lane = next((lane for lane in (found, unknown) if lane in waiting), None)
            if lane is not None:
                yield Part(lane=lane, destination=destination, quality=quality, rows=mine)
                rows = rows.filter(pc.invert(pc.is_in(rows["id"], mine["id"].combine_chunks())))
    if rows.num_rows:
        lane = Lane(destination=destination)
        yield Part(lane=lane, destination=destination, quality=quality, rows=rows)


def by_address(rows: pa.Table) -> Iterator[tuple[tuple[str, bytes | None], pa.Table]]:
    """The rows by service and broker; those of one in order."""
    places: dict[tuple[str, bytes | None], list[int]] = defaultdict(list)
    addresses = zip(rows["to_service"].to_pylist(), rows["to_broker"].to_pylist(), strict=True)
    for place, address in enumerate(addresses):
        places[address].append(place)
    for address, mine in places.items():
        yield address, rows.take(mine)
