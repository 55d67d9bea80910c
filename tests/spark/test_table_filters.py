"""Filters that the database applies let the same messages pass as Spark's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.sql import functions as f
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    Not,
    StringContains,
)

from saf.database import Dsn, fetch
from saf.log.shards import shard_of
from saf.spark.table.part import Part
from saf.spark.table.query import condition, shards_of
from saf.spark.table.source import Messages
from tests.pipeline import connect
from tests.spark.filters import BEGIN, COLUMNS, TEXTS, conditions, fill
from tests.spark.tables import Tables
from tests.tiers import sized


def test_a_read_with_filters_gives_what_spark_would_keep_of_a_read_without(
    app: Dsn, mom: Dsn, tmp_path: Path
) -> None:
    tables = Tables(tmp_path, mom, app=app)
    fill(app)
    everything = tables(schema=COLUMNS).cache()
    assert everything.count() == 3 * len(TEXTS)

    @settings(
        max_examples=sized(12, 200),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(conditions(), min_size=1, max_size=3), st.booleans())
    @example(drawn=[f.col("key") < f.lit("a")], either=False)  # "A" is, but not in a dictionary
    def same(drawn: list[Column], either: bool) -> None:
        whole = drawn[0]
        for one in drawn[1:]:
            whole = whole | one if either else whole & one
        read = tables(schema=COLUMNS, partitions=3).where(whole)
        expected = [row.id for row in everything.where(whole).orderBy("id").collect()]
        assert sorted(row.id for row in read.select("id").collect()) == expected

    try:
        same()
    finally:
        everything.unpersist()


@pytest.mark.parametrize(
    "taken",
    [
        EqualTo(("key",), "x"),
        In(("to_service",), ("a", None)),
        GreaterThan(("created_at",), BEGIN),
        GreaterThan(("message_type",), "a"),
        IsNull(("key",)),
        EqualTo(("id",), 7),
    ],
)
def test_the_database_takes_what_it_can_decide(taken: Filter) -> None:
    assert condition(taken) is not None


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (LessThan(("shard",), 100_000), True),
        (GreaterThanOrEqual(("shard",), -(1 << 62)), True),
        (GreaterThan(("shard",), 1 << 62), False),
        (EqualTo(("shard",), 100_000), False),
    ],
)
def test_a_shard_is_compared_with_any_number_by_an_index(
    app: Dsn, taken: Filter, found: bool
) -> None:
    fill(app)
    one = condition(taken)
    assert one is not None
    with connect(app) as connection:
        where = f"FROM saf.outbox WHERE {one.text}"
        assert fetch(connection, f"SELECT count(*) > 0 {where}") == [(found,)]
        connection.execute("SET enable_seqscan = off")
        plan = [line for (line,) in fetch(connection, f"EXPLAIN SELECT id {where}")]
    assert any("Index Cond" in line and "shard" in line for line in plan), plan


@pytest.mark.parametrize(
    "left",
    [
        Not(EqualTo(("key",), "x")),
        StringContains(("key",), "x"),
        EqualTo(("body",), b"x"),
        EqualTo(("key",), "a\0b"),
        EqualTo(("key",), "\ud800"),
        EqualTo(("headers", "key"), "x"),
        EqualTo(("from_service",), "x"),
        EqualTo(("id",), 1.5),
    ],
)
def test_spark_keeps_what_it_cannot_or_no_row_could_match(left: Filter) -> None:
    assert condition(left) is None


def test_filters_that_are_not_taken_are_given_back(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    tables = Tables(tmp_path, mom, app=app)
    scan = _scan(tables)
    kept: list[Filter] = [StringContains(("key",), "x"), Not(EqualTo(("key",), "y"))]
    assert list(scan.pushFilters([kept[0], EqualTo(("key",), "x"), kept[1]])) == kept


def _scan(tables: Tables) -> Any:
    source = Messages({"broker": "app", "config": str(tables.config), "log": "outbox"})
    return source.reader(source.schema())


def test_a_key_is_looked_for_in_its_own_shard_only(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    scan = _scan(Tables(tmp_path, mom, app=app))
    assert list(scan.pushFilters([EqualTo(("key",), "x")])) == []
    (part,) = scan.partitions()
    assert isinstance(part, Part)
    assert part.batch.shards == [shard_of("x", 64)]


def test_shards_are_those_that_all_filters_leave() -> None:
    of_keys = condition(In(("key",), ("x", "y")))
    of_shards = condition(In(("shard",), (shard_of("y", 64), 63, 64, -1)))
    assert of_keys is not None
    assert of_shards is not None
    assert shards_of([of_keys], 64) == sorted({shard_of("x", 64), shard_of("y", 64)})
    assert shards_of([of_keys, of_shards], 64) == [shard_of("y", 64)]
    assert shards_of([of_shards], 1) == []


def test_what_no_shard_can_hold_is_not_looked_for(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    tables = Tables(tmp_path, mom, app=app)
    fill(app)
    assert tables().where("shard = 64").collect() == []
