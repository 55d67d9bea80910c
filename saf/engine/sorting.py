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

from saf.destinations.places import LANE
from saf.routing.matching import Match
from saf.setaside.parking import FOUND, MAIN, ROUTE, SERVICE, Lane


@dataclass(frozen=True, kw_only=True)
class Part:
    """Messages with the same way: a destination, or None where no route leads to one."""

    destination: str | None
    quality: str | None
    rows: pa.Table
    """With a column `LANE`, unless they all are the destination's own (`MAIN`)."""
    waits_at: str
    """The destination whose lanes these are; empty for none's."""

    @property
    def main(self) -> bool:
        """They belong in the destination's own lane, and so may go there at once."""
        return LANE not in self.rows.column_names

    @property
    def lanes(self) -> list[Lane]:
        """Those that the messages belong to."""
        names = [MAIN] if self.main else pc.unique(self.rows[LANE]).to_pylist()
        return [Lane(destination=self.waits_at, lane=name) for name in names]

    @property
    def by_row(self) -> pa.ChunkedArray:
        """The name of each message's lane."""
        return pa.chunked_array([pa.repeat(MAIN, len(self.rows))]) if self.main else self.rows[LANE]


def sort(
    rows: pa.Table,
    matches: Sequence[Match],
    qualities: Mapping[str, str],
    held: Mapping[Lane, str],
) -> list[Part]:
    """The parts of a chunk whose column ``route`` says which of ``matches`` each message has.

    None of them is shared any more. ``qualities`` are the known destinations' defaults. A route to
    any other is none; but of a topic's, whose messages wait for that destination alone. Nor is
    there one for messages behind others that still wait for it.
    """
    rows = _behind(rows, {lane for lane in held if lane.unrouted})
    numbers: dict[tuple[str, str | None] | None, list[int | None]] = defaultdict(list)
    there = pc.unique(rows["route"]).to_pylist()
    for number in there:
        match = None if number is None else matches[number]
        if match is None or not (match.to_all or match.routes[0].destination in qualities):
            numbers[None].append(number)
            continue
        for route in match.routes:
            default = qualities.get(route.destination)
            numbers[route.destination, default and (route.quality or default)].append(number)
    parts: list[Part] = []
    for there_by, mine in numbers.items():
        chosen = rows
        if len(mine) < len(there):
            chosen = rows.filter(pc.is_in(rows["route"], pa.array(mine, pa.int32())))
        chosen = chosen.drop_columns(["route"])
        if there_by is None:
            parts.append(unroutable(chosen))
        else:
            parts += _routed(chosen, *there_by, held)
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


def route_lanes(rows: pa.Table) -> pa.ChunkedArray:
    """The names of the lanes of `route_lane`, for the services and brokers of messages."""
    lanes = pc.binary_join_element_wise(ROUTE, rows["to_service"], "")
    brokers = rows["to_broker"]
    if brokers.null_count == len(brokers):
        return lanes
    encoded = brokers.combine_chunks().dictionary_encode()
    texts = [f"@{UUID(bytes=one)}" for one in encoded.dictionary.to_pylist()]
    of_each = pc.fill_null(pa.array(texts, pa.string()).take(encoded.indices), "")
    return pc.binary_join_element_wise(lanes, of_each, "")


def found_lanes(names: pa.ChunkedArray) -> pa.ChunkedArray:
    """The names of the lanes of `found_lane`, for those of other lanes."""
    return pc.binary_join_element_wise(FOUND, names, "")


def service_lanes(rows: pa.Table) -> pa.ChunkedArray:
    """The names of the lanes of `service_lane`, for the services of messages."""
    return pc.binary_join_element_wise(SERVICE, rows["to_service"], "")


def in_lanes(rows: pa.Table, names: pa.ChunkedArray) -> pa.Table:
    """The rows, with the names of their lanes."""
    if LANE in rows.column_names:
        return rows.set_column(rows.column_names.index(LANE), LANE, names)
    return rows.append_column(LANE, names)


def unroutable(rows: pa.Table) -> Part:
    """Messages that wait for a route: those for each service, and broker, in a lane of theirs."""
    rows = in_lanes(rows, route_lanes(rows))
    return Part(destination=None, quality=None, rows=rows, waits_at="")


def _behind(rows: pa.Table, unrouted: Collection[Lane]) -> pa.Table:
    """The rows without a route for those whose service, and broker, have messages waiting for one.

    Each of these finds its route with them, so that it comes to its destination after them.
    """
    if not unrouted:
        return rows
    behind = _is_in(route_lanes(rows), unrouted)
    route = pc.if_else(behind, pa.scalar(None, rows["route"].type), rows["route"])
    return rows.set_column(rows.column_names.index("route"), "route", route)


def _routed(
    rows: pa.Table, destination: str, quality: str | None, held: Mapping[Lane, str]
) -> Iterator[Part]:
    """One part, and another for messages behind others of their service that wait."""
    mine = [lane for lane in held if lane.destination == destination and lane.of_service]
    if mine:
        found, unknown = found_lanes(route_lanes(rows)), service_lanes(rows)
        nothing = pa.scalar(None, pa.string())
        names = pc.coalesce(
            *(pc.if_else(_is_in(one, mine), one, nothing) for one in (found, unknown))
        )
        behind = in_lanes(rows.filter(names.is_valid()), names.filter(names.is_valid()))
        if behind.num_rows:
            yield Part(destination=destination, quality=quality, rows=behind, waits_at=destination)
            rows = rows.filter(names.is_null())
    if rows.num_rows:
        yield Part(destination=destination, quality=quality, rows=rows, waits_at=destination)


def _is_in(names: pa.ChunkedArray, lanes: Collection[Lane]) -> pa.ChunkedArray:
    return pc.is_in(names, pa.array([lane.lane for lane in lanes], pa.string()))
