"""The lanes of messages as columns of Arrow: `KIND`, ``subject`` and ``broker`` of each message.

Python touches no single message: lanes are computed column by column, and only the distinct ones
become a `saf.setaside.lane.Lane`. All messages of a table have the same destination.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.setaside.lane import FOUND, NO_BROKER, Kind, Lane

KIND = "kind"
LANE = (KIND, "subject", "broker")
"""The columns of a lane; a table that has the first one has them all."""

_NOBODY = pa.scalar(NO_BROKER.bytes, pa.binary())


def has_lanes(rows: pa.Table) -> bool:
    """Whether a table has each message's lane."""
    return KIND in rows.column_names


def lanes_of(rows: pa.Table, destination: str = "") -> tuple[list[Lane], npt.NDArray[np.int64]]:
    """Return the distinct lanes, in order of appearance, and each message's index among them."""
    encoded = _keys(rows).combine_chunks().dictionary_encode()
    indices = encoded.indices.to_numpy().astype(np.int64)
    _, first = np.unique(indices, return_index=True)
    lanes = [
        lane_of(row, destination) for row in rows.select(LANE).take(pa.array(first)).to_pylist()
    ]
    return lanes, indices


def in_lanes(rows: pa.Table, lanes: pa.Table) -> pa.Table:
    """Put messages into these lanes, whatever lanes they were in."""
    if has_lanes(rows):
        rows = rows.drop_columns(list(LANE))
    for name in LANE:
        rows = rows.append_column(name, lanes[name])
    return rows


def route_lanes(rows: pa.Table) -> pa.Table:
    """Return the lanes in which messages wait for a route, by their services and brokers."""
    return _lanes(Kind.ROUTE, rows["to_service"], pc.fill_null(rows["to_broker"], _NOBODY))


def found_lanes(lanes: pa.Table) -> pa.Table:
    """Return the lanes that messages without a destination move to once they have a route."""
    before = pa.array([str(kind) for kind in FOUND], pa.string())
    after = pa.array([str(kind) for kind in FOUND.values()], pa.string())
    kinds = after.take(pc.index_in(lanes[KIND], value_set=before))
    return lanes.set_column(lanes.column_names.index(KIND), KIND, kinds)


def service_lanes(rows: pa.Table) -> pa.Table:
    """Return the lanes in which messages wait for their destination to know their services."""
    no_broker = pa.chunked_array([pa.repeat(_NOBODY, rows.num_rows)])
    return _lanes(Kind.SERVICE, rows["to_service"], no_broker)


def either(which: pa.ChunkedArray, one: pa.Table, other: pa.Table) -> pa.Table:
    """Choose one of two lanes for each row."""
    return pa.table({name: pc.if_else(which, one[name], other[name]) for name in LANE})


def same(one: pa.Table, other: pa.Table) -> pa.ChunkedArray:
    """Return for each row whether its two lanes are the same."""
    kind, subject, broker = (pc.equal(one[name], other[name]) for name in LANE)
    return pc.and_(pc.and_(kind, subject), broker)


def is_in(rows: pa.Table, lanes: Collection[Lane]) -> pa.ChunkedArray:
    """Return for each row whether its lane is one of these, at any destination."""
    wanted = pa.array([_key(lane) for lane in lanes], pa.binary())
    return pc.is_in(_keys(rows), value_set=wanted)


def given_of(rows: pa.Table) -> dict[str, list[Any]]:
    """Return each message's lane as columns for a statement; see `saf.setaside.lane.GIVEN`."""
    return {
        "kinds": rows[KIND].to_pylist(),
        "subjects": rows["subject"].to_pylist(),
        "brokers": [UUID(bytes=broker) for broker in rows["broker"].to_pylist()],
    }


def lane_of(row: Mapping[str, Any], destination: str = "") -> Lane:
    """Return the lane that a row with the columns `LANE` is in."""
    broker = UUID(bytes=row["broker"])
    return Lane(
        destination=destination,
        kind=row["kind"],
        subject=row["subject"],
        broker=None if broker == NO_BROKER else broker,
    )


def _lanes(kind: Kind, subjects: pa.ChunkedArray, brokers: pa.ChunkedArray) -> pa.Table:
    kinds = pa.chunked_array([pa.repeat(pa.scalar(str(kind), pa.string()), len(subjects))])
    return pa.table({KIND: kinds, "subject": subjects, "broker": brokers})


def _keys(lanes: pa.Table) -> pa.ChunkedArray:
    """Return a column that identifies the lanes of a table; `_key` is its form for one lane."""
    kinds, subjects = (lanes[name].cast(pa.binary()) for name in (KIND, "subject"))
    return pc.binary_join_element_wise(kinds, lanes["broker"], subjects, b"\0")


def _key(lane: Lane) -> bytes:
    broker = lane.broker or NO_BROKER
    return b"\0".join((lane.kind.encode(), broker.bytes, lane.subject.encode()))
