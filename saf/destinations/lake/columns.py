"""A row of a table: the columns of a message, as in `saf.columns.IN_TABLES`, and more.

    id, shard         the message's number and shard at its source: ids give each key's order
    headers           JSON text
    source            the broker_id of its source
    received_at       when the row was stored, by the clock of the forwarder
    day               the date of created_at in UTC, in Delta tables partitioned by day
    amount, …         members of bodies that are JSON objects, as promoted by the settings

Arrow makes the columns. Promoted members are the exception: Python reads the bodies one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from saf.columns import IN_TABLES, SPARK
from saf.destinations.lake.state import DAY
from saf.destinations.texts import uuids, whole
from saf.log.columns import OF_SPARK

PROMOTED = {
    "string": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": OF_SPARK["timestamp"],
}


def schema(promote: Mapping[str, str], *, day: bool = False) -> pa.Schema:
    """Return the columns that a table must have; ``day``: including the day of created_at."""
    fields = [(name, OF_SPARK[SPARK[type_]]) for name, type_ in IN_TABLES.items()]
    if day:
        fields.append((DAY, pa.date32()))
    fields += [(name, PROMOTED[type_]) for name, type_ in promote.items()]
    return pa.schema(fields)


def rows_of(
    messages: pa.Table, source: UUID, promote: Mapping[str, str], *, day: bool = False
) -> pa.Table:
    """Return messages as rows, with the columns of `schema`."""
    messages = messages.combine_chunks()
    count, columns = messages.num_rows, {}
    constants = {"source": str(source), "received_at": datetime.now(UTC)}
    for name, type_ in IN_TABLES.items():
        if name in constants:
            columns[name] = pa.repeat(pa.scalar(constants[name]), count)
        elif type_ == "uuid":
            columns[name] = uuids(whole(messages[name]))
        else:
            columns[name] = whole(messages[name])
    if day:
        columns[DAY] = whole(messages["created_at"]).cast(pa.timestamp("us")).cast(pa.date32())
    columns |= promoted(whole(messages["body"]), promote)
    target = schema(promote, day=day)
    return pa.table({name: columns[name].cast(target.field(name).type) for name in target.names})


def promoted(bodies: pa.Array, fields: Mapping[str, str]) -> dict[str, pa.Array]:
    """Return a column for each member: NULL where it is missing, or has another type.

    >>> bodies = pa.array([b'{"amount": 7}', b'{"amount": "7"}', b"amount"])
    >>> promoted(bodies, {"amount": "double"})["amount"].to_pylist()
    [7.0, None, None]
    """
    if not fields:
        return {}
    objects = [_object(body) for body in bodies.to_pylist()]
    return {
        name: pa.array([AS[type_](one.get(name)) for one in objects], PROMOTED[type_])
        for name, type_ in fields.items()
    }


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.isascii() else _encodable(value)


def _encodable(value: object) -> str | None:
    """Return a text that UTF-8 can encode; JSON may escape halves of characters."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _long(value: object) -> int | None:
    whole_number = isinstance(value, int) and not isinstance(value, bool)
    return value if whole_number and -(2**63) <= value < 2**63 else None  # type: ignore[operator,return-value]


def _double(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _moment(value: object) -> datetime | None:
    """Parse a time in RFC 3339; without a zone, it is UTC."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment and moment.tzinfo is None else moment


AS: Mapping[str, Callable[[object], object]] = {
    "string": _text,
    "long": _long,
    "double": _double,
    "boolean": lambda value: value if isinstance(value, bool) else None,
    "timestamp": _moment,
}
