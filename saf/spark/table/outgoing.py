"""Rows of a DataFrame as messages: the allowed columns, and a check that each row can be sent.

The columns match the arguments of `saf.Outbox.send`; ``service`` and ``body`` are required:

    service, message_type, from_service, to_broker    string
    key                        string; or an integer, which becomes its digits
    body                       binary; or string, which becomes a text in UTF-8
    headers                    map<string,string>; or string, a JSON object
    deliver_at, expires_at     timestamp

Arrow checks a whole batch of rows in one pass. This only shows whether a row is wrong;
`saf.message.encode` then names the error in the first such row. So a row is rejected for the same
reasons, and in the same words, as a message that an application sends. Headers, if any, are encoded
one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from saf.config import did_you_mean
from saf.errors import ConfigurationError, InvalidMessage
from saf.message import (
    DEFAULT_MAX_BYTES,
    FIRST_MOMENT,
    LAST_DAY,
    MAX_KEY,
    MAX_NAME,
    OUT_OF_CALENDAR,
    Message,
    check_headers,
    encode,
    encode_body,
    encode_headers,
)
from saf.spark.table.query import same_type

TEXTS = {"service": MAX_NAME, "key": MAX_KEY, "message_type": MAX_NAME, "from_service": MAX_NAME}
"""The text columns, with their maximum sizes in bytes."""
TIMES = ("deliver_at", "expires_at")
TYPES: dict[str, tuple[DataType, ...]] = {
    **dict.fromkeys(TEXTS, (StringType(),)),
    "key": (StringType(), LongType(), IntegerType(), ShortType()),
    "to_broker": (StringType(),),
    "body": (BinaryType(), StringType()),
    "headers": (MapType(StringType(), StringType()), StringType()),
    **dict.fromkeys(TIMES, (TimestampType(),)),
}
NEEDED = ("service", "body")
IN_OUTBOX = {"service": "to_service"}


def check_columns(schema: StructType) -> None:
    """Check that a DataFrame has columns of messages, and no others.

    Raises:
        ConfigurationError: the error names the column.
    """
    for number, field in enumerate(schema.fields):
        if field.name in schema.fieldNames()[:number]:
            raise ConfigurationError(
                f"there are two columns {field.name!r}: a message has one, so drop the other"
            )
        if field.name not in TYPES:
            raise ConfigurationError(
                f"a message has no {field.name!r}{did_you_mean(field.name, TYPES)}: the columns "
                f"of sent messages are {', '.join(TYPES)}; select them, or drop the others"
            )
        types = TYPES[field.name]
        if not any(same_type(field.dataType, type_) for type_ in types):
            raise ConfigurationError(
                f"the column {field.name!r} of a message is a "
                f"{' or a '.join(type_.simpleString() for type_ in types)}, and not a "
                f"{field.dataType.simpleString()}: cast it, or convert it by to_json"
            )
    if missing := [name for name in NEEDED if name not in schema.fieldNames()]:
        raise ConfigurationError(f"a message needs the column {missing[0]!r}")


def staged(
    rows: pa.RecordBatch, attempt: int, first: int, *, may_be_late: bool = False
) -> pa.RecordBatch:
    """Return rows in the form of saf.staged, numbered from ``first`` on.

    With ``may_be_late``, expired rows are sent, and the forwarder makes them dead letters. After a
    crash, a stream repeats an epoch whose rows may have expired.

    Raises:
        InvalidMessage: a row could not be sent; the error has its number.
    """
    rows = _small(rows)
    checked = rows
    if may_be_late and "expires_at" in rows.schema.names:
        checked = _as_if_in_time(rows)
    suspect = _suspect(checked)
    if suspect is not None:
        raise _why(checked, suspect).of_item(first + suspect)
    columns: dict[str, pa.Array] = {
        "attempt": pa.repeat(pa.scalar(attempt, pa.int64()), rows.num_rows),
        "number": pa.array(range(first, first + rows.num_rows), pa.int64()),
    }
    for field in rows.schema:
        name = IN_OUTBOX.get(field.name, field.name)
        if name != "headers" and rows[field.name].null_count < rows.num_rows:
            columns[name] = rows[field.name]
    if "to_broker" in columns:  # Python takes more spellings of a UUID than PostgreSQL does
        given = rows["to_broker"].dictionary_encode()
        brokers = [str(UUID(value)) for value in given.dictionary.to_pylist()]
        columns["to_broker"] = pa.array(brokers, pa.string()).take(given.indices)
    columns["body"] = rows["body"].cast(pa.binary())
    columns["headers"] = _headers(rows, first)
    return pa.RecordBatch.from_pydict(columns)


def _as_if_in_time(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows for a check that ignores expiry, but rejects times that no log can store."""
    times = rows["expires_at"]
    late = pc.less_equal(times, pa.scalar(datetime.now(UTC), times.type))
    possible = pc.greater_equal(times, pa.scalar(FIRST_MOMENT, times.type))
    place = rows.schema.get_field_index("expires_at")
    return rows.set_column(place, "expires_at", pc.if_else(pc.and_(late, possible), None, times))


def _small(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with texts as keys, and 32-bit lengths; a setting of Spark makes them 64-bit."""
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    columns = {
        name: column.cast(small[column.type]) if column.type in small else column
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
    if "key" in columns:
        columns["key"] = columns["key"].cast(pa.string())
    return pa.RecordBatch.from_pydict(columns)


def _suspect(rows: pa.RecordBatch) -> int | None:
    """Return the place of the first row that may be wrong."""
    wrong = [pc.is_null(rows["body"]), _longer(rows["body"], DEFAULT_MAX_BYTES)]
    for name in rows.schema.names:
        column = rows[name]
        if pa.types.is_string(column.type):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:  # not UTF-8
                return _not_unicode(column)
        if name in TEXTS:
            wrong += [
                _longer(column, TEXTS[name]),
                pc.equal(column, ""),
                pc.match_substring(column, "\0"),
            ]
        elif name == "to_broker":
            unknown = [value for value in pc.unique(column).to_pylist() if not _is_uuid(value)]
            wrong.append(pc.is_in(column, pa.array(unknown, pa.string())))
        elif name in TIMES:
            earliest = pa.scalar(FIRST_MOMENT, column.type)
            too_late = pa.scalar(LAST_DAY, column.type)
            wrong += [pc.less(column, earliest), pc.greater_equal(column, too_late)]
        if name == "expires_at":
            wrong.append(pc.less_equal(column, pa.scalar(datetime.now(UTC), column.type)))
    wrong.append(pc.is_null(rows["service"]))
    found = wrong[0]
    for value in wrong[1:]:
        found = pc.or_(found, pc.fill_null(value, False))
    place = pc.index(found, True).as_py()
    return None if place < 0 else int(place)


def _longer(column: pa.Array, longest: int) -> pa.Array:
    return pc.fill_null(pc.greater(pc.binary_length(column), longest), False)


def _not_unicode(column: pa.Array) -> int:
    for place, text in enumerate(column.cast(pa.binary()).to_pylist()):
        try:
            (text or b"").decode()
        except UnicodeDecodeError:
            return place
    raise AssertionError("Arrow calls a text invalid that is UTF-8")


def _why(rows: pa.RecordBatch, place: int) -> InvalidMessage:
    """Return the error of a row."""
    for name in rows.schema.names:
        if pa.types.is_string(rows[name].type):
            try:
                rows[name][place].as_py()
            except UnicodeDecodeError:
                return InvalidMessage(name, "is not Unicode text")
    for name in TIMES:
        if name in rows.schema.names:
            try:
                rows[name][place].as_py()
            except (OverflowError, ValueError):  # Python and logs have the same range of years
                return InvalidMessage(name, f"it {OUT_OF_CALENDAR}")
    row = {name: rows[name][place].as_py() for name in rows.schema.names if name != "headers"}
    if row["body"] is None:
        return InvalidMessage("body", "is NULL")
    broker = row.pop("to_broker", None)
    if broker is not None and not _is_uuid(broker):
        return InvalidMessage("to_broker", f"{broker!r} is not a UUID")
    try:
        encode(Message(**row))
    except InvalidMessage as error:
        return error
    return InvalidMessage("service", "could not be sent")


def _headers(rows: pa.RecordBatch, first: int) -> pa.Array:
    """Return each row's headers as JSON, with the content type of its body."""
    content_type = encode_body("" if pa.types.is_string(rows["body"].type) else b"")[1]
    plain = encode_headers(None, content_type)
    if "headers" not in rows.schema.names or rows["headers"].null_count == rows.num_rows:
        return pa.repeat(pa.scalar(plain), rows.num_rows)
    texts = []
    for number, given in enumerate(rows["headers"].to_pylist(), first):
        try:
            text = plain if given is None else encode_headers(_mapping(given), content_type)
            check_headers(text)
        except InvalidMessage as error:
            raise error.of_item(number) from None
        texts.append(text)
    return pa.array(texts, pa.string())


def _mapping(given: str | list[tuple[str, str | None]]) -> Mapping[str, Any]:
    if isinstance(given, list):
        return dict(given)
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage("headers", f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidMessage("headers", "expected a JSON object of names and values")
    return found


def _is_uuid(text: str | None) -> bool:
    try:
        return text is None or bool(UUID(text))
    except ValueError:
        return False
