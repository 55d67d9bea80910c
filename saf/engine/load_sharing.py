"""Load sharing: choose each message's route where several routes share.

Messages without a key take the routes in turn by their ids, so a batch that is read again goes the
same way. Messages with a key take the route that their key has chosen
(`saf.routing.route_choices`); a chunk asks once, with each key once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.routing.matching import Match
from saf.routing.route_choices import Asker

Choose = Callable[[Mapping[Asker, Sequence[str]]], Mapping[Asker, str]]
"""`saf.routing.route_choices.choose`, committed."""


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
