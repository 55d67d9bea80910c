"""Messages and filters that are drawn at random, for tests of what a filter lets pass."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.sql import functions as f

from saf.database import Dsn
from tests.pipeline import connect

COLUMNS = (
    "id long, shard int, to_service string, key string, message_type string, created_at timestamp"
)
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TEXTS = (
    "",
    "a",
    "A",
    "b",
    "ab",
    "B ",
    "é",
    "e\u0301",
    "\U0001f600",
    "\ufffd",
    "'",
    "\\",
    "%",
    "{}",
)
MOMENTS = [BEGIN + timedelta(microseconds=one) for one in (0, 1, 2, 10**6, 10**12)]


def fill(dsn: Dsn) -> None:
    """Each text in each column that holds texts, beside others."""
    with connect(dsn) as connection:
        for number in range(3 * len(TEXTS)):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, message_type, body, created_at) "
                "VALUES (%s, %s, %s, '', %s)",
                [
                    TEXTS[number % len(TEXTS)] or "none",
                    None if number % 5 == 0 else TEXTS[number * 3 % len(TEXTS)],
                    None if number % 4 == 0 else TEXTS[number * 5 % len(TEXTS)],
                    MOMENTS[number % len(MOMENTS)],
                ],
            )


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "to_service": st.sampled_from(TEXTS),
    "key": st.sampled_from(TEXTS),
    "message_type": st.sampled_from([*TEXTS, "a\0b"]),
    "created_at": st.sampled_from(MOMENTS),
    "id": st.integers(-1, 45) | st.just(1 << 62),
    "shard": st.integers(-1, 65) | st.sampled_from([1 << 20, -(1 << 40)]),
}


@st.composite
def conditions(draw: st.DrawFn) -> Column:
    name = draw(st.sampled_from([*VALUES]))
    column, values = f.col(name), VALUES[name]
    kind = draw(st.sampled_from(["=", "<=>", "<", "<=", ">", ">=", "in", "null", "like"]))
    if kind == "null":
        made = column.isNull()
    elif kind == "in":
        made = column.isin([f.lit(one) for one in draw(st.lists(values, min_size=1, max_size=3))])
    elif kind == "like":
        made = column.cast("string").contains(draw(st.sampled_from(TEXTS)))
    else:
        value = f.lit(draw(values))
        made = {
            "=": column == value,
            "<=>": column.eqNullSafe(value),
            "<": column < value,
            "<=": column <= value,
            ">": column > value,
            ">=": column >= value,
        }[kind]
    return ~made if draw(st.integers(0, 3)) == 0 else made
