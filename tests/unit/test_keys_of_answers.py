"""Keys that classifiers return: text, integers and UUIDs become text, and others are errors."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import saf
from saf.engine.classifying import as_table, by_arrow, by_python

ORDER = UUID("12345678-1234-5678-1234-567812345678")
TEXTS = {7: "7", ORDER: str(ORDER), "7": "7", None: None}
ROWS = as_table([{"id": 1, "message_id": UUID(int=1), "to_service": "orders", "body": b"{}"}])


@pytest.mark.parametrize("key", TEXTS)
def test_a_function_of_a_message_may_name_a_key_of_each_type(key: Any) -> None:
    (answer,) = by_python(lambda _: saf.Resolved(service="s", key=key), ROWS).to_pylist()
    assert (answer["service"], answer["key"], answer["error"]) == ("s", TEXTS[key], None)


@pytest.mark.parametrize("key", [7.5, True, b"7", ["7"]])
def test_a_key_of_another_type_is_the_error_of_its_message(key: Any) -> None:
    (answer,) = by_python(lambda _: saf.Resolved(service="s", key=key), ROWS).to_pylist()
    assert answer["service"] is None
    assert (
        f"wrong key: expected str, int or UUID, got {type(key).__name__} {key!r}" in answer["error"]
    )


def answered(keys: pa.Array) -> dict[str, Any]:
    batch = pa.RecordBatch.from_arrays([pa.array(["s"]), keys], names=["service", "key"])
    (answer,) = by_arrow(lambda _: batch, ROWS).to_pylist()
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    ("keys", "stored"),
    [
        (pa.array([7], pa.int64()), "7"),
        (pa.array([7], pa.uint8()), "7"),
        (pa.array(["7"], pa.large_string()), "7"),
        (pa.array([ORDER.bytes], pa.uuid()), str(ORDER)),
        (pa.array([None], pa.uuid()), None),
        (pa.array([None], pa.int64()), None),
        (pa.nulls(1), None),
    ],
)
def test_a_column_of_keys_may_have_each_type(keys: pa.Array, stored: str | None) -> None:
    assert (answered(keys)["key"], answered(keys)["error"]) == (stored, None)


@pytest.mark.parametrize("keys", [pa.array([7.5]), pa.array([True]), pa.array([b"7"])])
def test_a_column_of_another_type_is_an_error_that_shows_it(keys: pa.Array) -> None:
    error = answered(keys)["error"]
    assert "a key is text, an integer or a UUID" in error
    assert f"{keys.type} {keys[0]}" in error
