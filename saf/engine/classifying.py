"""Classifying: run a router's function over messages, as Arrow.

A table of answers has a row for each message: the service, broker and key that the message is
really addressed to, or in the column ``error`` the reason why they are unknown. If the function
fails for one message, halving finds that message; its neighbours still get answers. A function of
the database may also fail for another reason, such as a missing right or a lock: that is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from itertools import repeat
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from saf.columns import COLUMNS
from saf.database import reason_of
from saf.errors import InvalidMessage, masked
from saf.log.columns import MESSAGES
from saf.message import key_text
from saf.received import READ, Received
from saf.routing.functions import Classify
from saf.routing.resolved import Resolved
from saf.setaside.isolation import of_messages

ANSWERS = pa.schema(
    [
        ("service", pa.string()),
        ("broker", pa.binary()),
        ("key", pa.string()),
        ("error", pa.string()),
    ]
)

Function = Callable[[Any], Any]


def by_arrow(function: Function, rows: pa.Table) -> pa.Table:
    """Return the answers of a function of record batches with the columns of a message."""
    batches = rows.select(COLUMNS).to_batches()
    answers = [answer for batch in batches for answer in _by_batch(function, batch)]
    return pa.Table.from_batches(answers, ANSWERS)


def by_database(classify: Classify, rows: pa.Table) -> pa.Table:
    """Return the answers of a function of the database, which gets the bodies.

    Raises:
        psycopg.Error: it fails for a reason that is not about a message.
    """

    def answers(batch: pa.RecordBatch) -> pa.Array:
        return pa.array(classify(batch["body"].to_pylist()), pa.string())

    batches = rows.select(["body"]).combine_chunks().to_batches()
    found = [answer for batch in batches for answer in _by_batch(answers, batch, of_messages)]
    return pa.Table.from_batches(found, ANSWERS)


def by_python(function: Function, rows: pa.Table) -> pa.Table:
    """Return the answers of a function of single messages."""
    return as_answers([_by_message(function, message) for message in received(rows)])


def as_answers(answers: Sequence[Resolved | str]) -> pa.Table:
    """Make a table of answers; a string is the error of a message that could not be resolved."""
    answers = [*map(_with_text, answers)]
    found = [answer if isinstance(answer, Resolved) else None for answer in answers]
    return pa.table(
        [
            [answer and answer.service for answer in found],
            [answer and answer.broker and answer.broker.bytes for answer in found],
            [answer and answer.key for answer in found],
            [answer if isinstance(answer, str) else None for answer in answers],
        ],
        schema=ANSWERS,
    )


def _with_text(answer: Resolved | str) -> Resolved | str:
    """Return an answer with its key as text, or the error of an invalid key."""
    if isinstance(answer, str) or isinstance(answer.key, (str, type(None))):
        return answer
    try:
        return replace(answer, key=key_text(answer.key))
    except InvalidMessage as error:
        return f"its classifier returned a wrong {error}"


def from_columns(said: pa.RecordBatch | pa.Table, count: int) -> pa.RecordBatch:
    """Read answers from the column service, and from broker and key if present.

    Raises:
        ValueError, TypeError: the columns are not valid answers.
    """
    if said.num_rows != count:
        raise ValueError(f"{said.num_rows} answers to {count} messages")
    if "service" not in said.column_names:
        raise ValueError(f"no column service, only {', '.join(said.column_names)}")
    columns = {
        name: _plain(said[name]) if name in said.column_names else pa.nulls(count)
        for name in ANSWERS.names
    }
    columns["broker"] = _brokers(columns["broker"])
    columns["key"] = _keys(columns["key"])
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in ANSWERS], schema=ANSWERS
    )


def as_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Make a table of messages as a task reads them; columns missing from a row are null."""
    binary = [
        {name: value.bytes if isinstance(value, UUID) else value for name, value in row.items()}
        for row in rows
    ]
    return pa.Table.from_pylist(binary, MESSAGES)


def received(rows: pa.Table) -> Iterator[Received]:
    """Yield the messages one by one, as consumers see them."""
    ids = [value and UUID(bytes=value) for value in _values(rows["conversation_id"])]
    known = {"conversation_id": ids, "source": [None] * rows.num_rows}
    columns = [known[name] if name in known else _values(rows[name]) for name in READ]
    for row in zip(*columns, strict=True):
        yield Received(row)


def _by_batch(
    function: Function,
    batch: pa.RecordBatch,
    of_messages: Callable[[Exception], bool] = lambda _: True,
) -> list[pa.RecordBatch]:
    """Return the answers for a batch, in parts; raise an error that is not ``of_messages``."""
    try:
        return [_answered(function(batch), batch.num_rows)]
    except Exception as error:
        if not of_messages(error):
            raise
        if batch.num_rows == 1:
            return [pa.RecordBatch.from_pylist([{"error": _raised(error)}], ANSWERS)]
    half = batch.num_rows // 2
    return [
        answers
        for part in (batch.slice(0, half), batch.slice(half))
        for answers in _by_batch(function, part, of_messages)
    ]


def _by_message(function: Function, message: Received) -> Resolved | str:
    try:
        answer = function(message)
    except Exception as error:
        return _raised(error)
    if answer is None:
        return "its classifier returns no service"
    if isinstance(answer, str):
        return Resolved(service=answer)
    if isinstance(answer, Resolved) and isinstance(answer.broker, (UUID, type(None))):
        return answer
    return f"its classifier returned {answer!r:.200}, and no name, saf.Resolved or None"


def _answered(answer: Any, count: int) -> pa.RecordBatch:
    if isinstance(answer, (pa.RecordBatch, pa.Table)):
        return from_columns(answer, count)
    if isinstance(answer, pa.ChunkedArray):
        answer = answer.combine_chunks()
    if not isinstance(answer, pa.Array):
        raise TypeError(f"returned a {type(answer).__name__}, and no Arrow array of services")
    if pa.types.is_struct(answer.type):
        return from_columns(pa.RecordBatch.from_struct_array(answer), count)
    return from_columns(pa.RecordBatch.from_arrays([answer], names=["service"]), count)


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(column.type, pa.UuidType):
        return pa.array([value and str(value) for value in column.to_pylist()], pa.string())
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _brokers(column: pa.Array) -> pa.Array:
    """Turn UUIDs, binary or text, into their 16 bytes."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        texts = column.dictionary_encode()
        bytes_ = [
            None if text is None else UUID(text).bytes for text in texts.dictionary.to_pylist()
        ]
        return pa.array(bytes_, pa.binary()).take(texts.indices)
    wrong = pc.not_equal(pc.binary_length(column.cast(pa.binary())), 16)
    if pc.any(wrong).as_py():
        raise ValueError("a broker is a uuid: 16 bytes, or its text")
    return column


def _keys(column: pa.Array) -> pa.Array:
    """Check that keys are text, integers or UUIDs, which are text by now.

    Raises:
        TypeError: the column has another type.
    """
    fitting = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_null)
    if not any(fits(column.type) for fits in fitting):
        example = next((str(value) for value in column if value.is_valid), "")
        raise TypeError(
            f"a key is text, an integer or a UUID, and not {column.type} {example:.200}"
        )
    return column


def _values(column: pa.ChunkedArray) -> Iterable[Any]:
    """Return a column's values. Null columns cost nothing; timestamps avoid Arrow's slow path."""
    if column.null_count == len(column):
        return repeat(None, len(column))
    if pa.types.is_timestamp(column.type):
        moments = column.to_numpy().tolist()
        return [moment and moment.replace(tzinfo=UTC) for moment in moments]
    return column.to_pylist()  # type: ignore[no-any-return] # pyarrow has no types


def _raised(error: Exception) -> str:
    # a server's text has further lines, and may quote the row at fault
    text = masked(reason_of(error)) if isinstance(error, psycopg.Error) else str(error)
    return f"its classifier raised {type(error).__name__}: {text:.1000}"
