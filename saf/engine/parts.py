"""Parts of a chunk: messages by destination, and messages that wait in lanes.

Pure: takes rows and rules, returns parts. All messages that go to one destination in one quality of
service are one part, whatever routes they took, because the marks there cover a whole chunk, and
each quality has its own marks. Each part is in order; messages of one key that are in different
parts are not. A topic's message is in the part of each of its destinations, and waits or is set
aside in each part separately.

Load sharing: where several routes share messages, `share` chooses one for each message, new or
parked. Messages without a key take the routes in turn by their ids, so a batch that is read again
goes the same way. Messages with a key take the route that their key has chosen
(`saf.routing.route_choices`); a chunk asks once, with each key once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.routing.matching import Match
from saf.routing.route_choices import Asker
from saf.setaside.lane import NO_BROKER, Kind, Lane
from saf.setaside.lane_columns import (
    LANE,
    either,
    found_lanes,
    has_lanes,
    in_lanes,
    is_in,
    lanes_of,
    route_lanes,
    service_lanes,
)

Choose = Callable[[Mapping[Asker, Sequence[str]]], Mapping[Asker, str]]
"""`saf.routing.route_choices.choose`, committed."""

_MAIN = {"kind": Kind.MAIN, "subject": "", "broker": NO_BROKER}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Messages that go the same way."""

    destination: str
    """Where they go, and where their lanes are; empty where no route leads to a destination."""
    quality: str | None
    rows: pa.Table
    """The messages; with the columns `LANE`, unless all are in the destination's own lane."""

    @property
    def main(self) -> bool:
        """Whether they belong in the destination's own lane, and so may go there immediately."""
        return not has_lanes(self.rows)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that the messages belong to."""
        if self.main:
            return [Lane(destination=self.destination)]
        return lanes_of(self.rows, self.destination)[0]

    @property
    def by_row(self) -> list[dict[str, Any]]:
        """The columns of each message's lane."""
        if self.main:
            return [_MAIN] * len(self.rows)
        lanes = self.rows.select(LANE).to_pylist()
        return [{**lane, "broker": UUID(bytes=lane["broker"])} for lane in lanes]

    def of(self, outputs: pa.Table) -> Part:
        """Return the part of those messages that some outputs were made of."""
        return replace(self, rows=inputs_of(self.rows, outputs))

    def but(self, outputs: pa.Table) -> Part:
        """Return the part of all messages but those that some outputs were made of."""
        return replace(self, rows=inputs_of(self.rows, outputs, but=True))

    def halves(self) -> list[Part]:
        """Return both halves, in order."""
        half = self.rows.num_rows // 2
        return [replace(self, rows=self.rows.slice(*cut)) for cut in ((0, half), (half,))]


def inputs_of(rows: pa.Table, outputs: pa.Table, *, but: bool = False) -> pa.Table:
    """Return the messages that some outputs were made of, or all ``but`` these."""
    number = _number(rows)
    found = pc.is_in(rows[number], outputs[number].combine_chunks())
    return rows.filter(pc.invert(found) if but else found)


def several_of(outputs: pa.Table) -> pa.Table:
    """Return the outputs of messages that have several."""
    numbers = outputs[_number(outputs)]
    counts = numbers.value_counts()
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    return outputs.filter(pc.is_in(numbers, several))


def split(
    rows: pa.Table,
    matches: Sequence[Match],
    qualities: Mapping[str, str],
    held: Mapping[Lane, str],
    waiting: pa.Table | None = None,
) -> list[Part]:
    """Split a chunk into parts by its column ``route``, an index into ``matches``.

    Each match has one route or belongs to a topic: load sharing is done. ``qualities`` are the
    default qualities of the known destinations. Routes to unknown destinations are ignored, except
    that a topic's message waits for the unknown destination. Messages behind others that wait for a
    route wait for one too. ``waiting`` messages cannot go anywhere now.
    """
    rows = _behind(rows, {lane for lane in held if lane.unrouted})
    numbers: dict[tuple[str, str | None], list[int | None]] = defaultdict(list)
    routes = pc.unique(rows["route"]).to_pylist()
    for number in routes:
        match = None if number is None else matches[number]
        if match is None or not (match.to_all or match.routes[0].destination in qualities):
            numbers["", None].append(number)
            continue
        for route in match.routes:
            default = qualities.get(route.destination)
            numbers[route.destination, default and (route.quality or default)].append(number)
    parts: list[Part] = []
    for (destination, quality), own in numbers.items():
        chosen = rows
        if len(own) < len(routes):
            chosen = rows.filter(pc.is_in(rows["route"], pa.array(own, pa.int32())))
        chosen = chosen.drop_columns(["route"])
        parts += _parts(chosen, destination, quality, held)
    return parts if waiting is None else [*parts, *_parts(waiting, "", None, held)]


def unroutable(rows: pa.Table) -> Part:
    """Return the part of messages that wait for a route, in a lane per service and broker."""
    rows = in_lanes(rows, route_lanes(rows))
    return Part(destination="", quality=None, rows=rows)


def _behind(rows: pa.Table, unrouted: Collection[Lane]) -> pa.Table:
    """Remove the route from rows behind messages for the same service and broker that wait for one.

    Such a row finds its route together with these messages, so it is delivered after them.
    """
    if not unrouted:
        return rows
    mask = is_in(route_lanes(rows), unrouted)
    route = pc.if_else(mask, pa.scalar(None, rows["route"].type), rows["route"])
    return rows.set_column(rows.column_names.index("route"), "route", route)


def _parts(
    rows: pa.Table, destination: str, quality: str | None, held: Mapping[Lane, str]
) -> Iterator[Part]:
    """Yield a part, and another for messages behind waiting ones of their service."""
    if not destination:
        yield unroutable(rows)
        return
    lanes = [lane for lane in held if lane.destination == destination and lane.of_service]
    if lanes:
        found, unknown = found_lanes(route_lanes(rows)), service_lanes(rows)
        in_found = is_in(found, lanes)
        waits = pc.or_(in_found, is_in(unknown, lanes))
        behind = in_lanes(rows, either(in_found, found, unknown)).filter(waits)
        if behind.num_rows:
            yield Part(destination=destination, quality=quality, rows=behind)
            rows = rows.filter(pc.invert(waits))
    if rows.num_rows:
        yield Part(destination=destination, quality=quality, rows=rows)


def share(rows: pa.Table, matches: Sequence[Match], choose: Choose) -> pa.Table:
    """Give each row one route in the column ``route``, in place of several that share."""
    shared = [
        n for n in pc.unique(rows["route"]).to_pylist() if n is not None and matches[n].shared
    ]
    if not shared:
        return rows
    single = {
        match.routes[0]: number for number, match in enumerate(matches) if len(match.routes) == 1
    }
    route = rows["route"].to_numpy(zero_copy_only=False)
    taken = pc.fill_null(rows["route"], -1).to_numpy().copy()
    keyed = pc.is_valid(rows["key"]).to_numpy()
    first, indices = _distinct(rows.select(["to_service", "to_broker", "key"]))
    among = {
        place: matches[int(route[row])]
        for place, row in enumerate(first)
        if keyed[row] and route[row] in shared
    }
    askers = dict(zip(among, _askers(rows.take(first[list(among)])), strict=True))
    chosen = choose({askers[p]: match.destinations for p, match in among.items()}) if among else {}
    numbers = np.full(len(first), -1)
    for place, match in among.items():
        member = match.destinations.index(chosen[askers[place]])
        numbers[place] = single[match.routes[member]]
    for number in shared:
        mask = taken == number
        members = np.array([single[member_route] for member_route in matches[number].routes])
        taken = np.where(mask & ~keyed, members[rows["id"].to_numpy() % len(members)], taken)
        taken = np.where(mask & keyed, numbers[indices], taken)
    column = pa.array(taken.astype(np.int32), mask=taken < 0)
    return rows.set_column(rows.column_names.index("route"), "route", column)


def _distinct(columns: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first row of each distinct value, in order, and each row's index among them."""
    codes = np.zeros(columns.num_rows, np.int64)
    for column in columns.columns:
        if column.null_count < len(column):
            encoded = column.combine_chunks().dictionary_encode()
            numbers = pc.fill_null(encoded.indices, -1).to_numpy() + 1
            codes = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)[
                1
            ]
    _, first, indices = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[indices]


def _askers(rows: pa.Table) -> list[Asker]:
    brokers = [str(UUID(bytes=item)) if item else None for item in rows["to_broker"].to_pylist()]
    named = zip(rows["to_service"].to_pylist(), brokers, rows["key"].to_pylist(), strict=True)
    return [Asker(*item) for item in named]


def _number(rows: pa.Table) -> str:
    return "parked_id" if "parked_id" in rows.column_names else "id"
