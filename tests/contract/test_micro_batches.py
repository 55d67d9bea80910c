"""Micro-batches of a stream in a Delta table: each is there once, whoever dies or comes again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from saf.destinations.delta import Delta
from saf.destinations.delta.micro_batches import MicroBatches, TaskFiles, heard
from saf.errors import ConfigurationError, NotThisStream, Refused, Unavailable
from tests.delta_table import commits
from tests.synced import synced

QUERY = "a query"
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("service", pa.string()),
        ("sequence", pa.int64()),
        ("moment", pa.timestamp("us", "UTC")),
        ("headers", pa.map_(pa.string(), pa.string())),
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "outbox"


def micro_batches(table: Path, by: Sequence[str] = ()) -> MicroBatches:
    return MicroBatches(Delta(table=str(table)), by)


def rows(*ids: int, service: str | None = "billing") -> pa.Table:
    row = {"service": service, "sequence": None, "moment": 1_000_000, "headers": [("a", "b")]}
    return pa.Table.from_pylist([{**row, "id": one} for one in ids], COLUMNS)


def written(files: TaskFiles, *tasks: pa.Table) -> list[Any]:
    told = [batch for rows in tasks for batch in files.write(rows.to_batches())]
    return heard(tuple(row.values()) for batch in told for row in batch.to_pylist())


def append(batches: MicroBatches, number: int, *tasks: pa.Table, application: str = QUERY) -> bool:
    """What the driver of a query does; whether the table did not have it before."""
    columns = tasks[0].schema if tasks else COLUMNS
    files = batches.begin(application, number, columns)
    return files is not None and batches.commit(application, number, written(files, *tasks))


def ids(table: Path, where: str = "true") -> list[int]:
    there = DeltaTable(table).to_pyarrow_dataset()
    found: Iterable[Any] = duckdb.from_arrow(there).filter(where).project("id").fetchall()
    return sorted(one for (one,) in found)


def parquet(table: Path) -> int:
    return len([*table.rglob("*.parquet")])


def test_each_is_there_once_in_a_commit_of_its_own(table: Path) -> None:
    batches = micro_batches(table)
    assert append(batches, 0, rows(1, 2), rows(3))
    assert append(batches, 1)  # without rows
    assert not append(batches, 1, rows(9))  # as after a crash, by another driver
    assert append(micro_batches(table), 2, rows(4))
    assert not append(micro_batches(table), 2, rows(4))
    assert ids(table) == [1, 2, 3, 4]
    assert len([*commits(table)]) == 1 + 3
    assert append(batches, 0, rows(5), application="another query")
    assert ids(table) == [1, 2, 3, 4, 5]


def test_a_table_that_was_just_made_is_durable_before_its_first_micro_batch_is_acknowledged(
    table: Path,
) -> None:
    with synced() as found:
        append(micro_batches(table), 0, rows(1))
    log = table / "_delta_log"
    versions = sorted(log.glob("*.json"))
    assert {table.parent.parent, table.parent, table, log, *versions} <= found
    assert len(versions) == 2
    more = rows(2).append_column("day", pa.array(["2026-01-31"]))
    with synced() as found:
        append(micro_batches(table), 1, more)
    versions = sorted(log.glob("*.json"))[2:]
    assert {*versions} <= found
    assert len(versions) == 2  # one has added the column


def test_of_two_drivers_with_the_same_one_the_second_finds_it_there(table: Path) -> None:
    one, two = micro_batches(table), micro_batches(table)
    mine, theirs = one.begin(QUERY, 0, COLUMNS), two.begin(QUERY, 0, COLUMNS)
    assert mine
    assert theirs
    first, second = written(mine, rows(1, 2)), written(theirs, rows(1, 2))
    assert one.commit(QUERY, 0, first)
    assert not two.commit(QUERY, 0, second)
    assert ids(table) == [1, 2]
    assert parquet(table) == 1  # and nothing is left behind


def test_a_query_by_any_column_finds_its_rows(table: Path) -> None:
    """Readers leave out files by what the log says of them, also of columns that are all NULL."""
    batches = micro_batches(table, ["service"])
    append(batches, 0, rows(1, 2), rows(3, service=None))
    append(batches, 1, rows(4, service="a/b=c %20"))
    for where, found in {
        "service = 'billing'": [1, 2],
        "service IS NULL": [3],
        "service = 'a/b=c %20'": [4],
        "sequence IS NULL": [1, 2, 3, 4],
        "sequence = 1": [],
        "id > 2 AND moment = '1970-01-01 00:00:01+00'": [3, 4],
        "headers['a'] = 'b'": [1, 2, 3, 4],
    }.items():
        assert ids(table, where) == found, where


def test_columns_of_any_type_are_written_and_found_by_what_they_hold(table: Path) -> None:
    """What is counted is written in the way of its type; what is not counted leaves nothing out."""
    columns = {
        "id": pa.array([1, 2, 3], pa.int64()),
        "day": pa.array([date(2026, 1, 31), None, date(1969, 12, 31)], pa.date32()),
        "clock": pa.array([datetime(2026, 1, 31, 7), None, datetime(1, 1, 1)], pa.timestamp("us")),
        "small": pa.array([-7, 7, None], pa.int16()),
        "price": pa.array([Decimal("1.10"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
        "ratio": pa.array([float("nan"), float("-inf"), 1.5], pa.float64()),
        "paid": pa.array([True, None, False]),
        "bytes": pa.array([b"\x00\xff", None, b""]),
        "never": pa.nulls(3, pa.date32()),
    }
    append(micro_batches(table), 0, pa.table(columns))
    for where, found in {
        "day = '2026-01-31'": [1],
        "day < '1970-01-01'": [3],
        "day > '2026-01-31'": [],
        "clock = '2026-01-31 07:00:00'": [1],
        "clock < '1970-01-01'": [3],
        "small = -7": [1],
        "price < 0": [3],
        "isnan(ratio)": [1],
        "ratio < 0": [2],
        "paid": [1],
        "bytes = ''": [3],
        "never IS NULL AND day IS NULL": [2],
        "never = '2026-01-31'": [],
    }.items():
        assert ids(table, where) == found, where
    (said,) = DeltaTable(table).get_add_actions(flatten=True).to_struct_array().to_pylist()
    assert said["max.day"] == date(2026, 1, 31)
    assert said["min.clock"] == datetime(1, 1, 1)
    assert said["null_count.never"] == 3


def test_a_table_that_lacks_what_was_before_is_refused(table: Path) -> None:
    batches = micro_batches(table)
    for number in range(3):
        append(batches, number, rows(number))
    copy = table.parent / "copy"
    shutil.copytree(table, copy)
    append(batches, 3, rows(3))
    with pytest.raises(NotThisStream, match=r"has no more than 2 of 'a query'.*micro-batch 4"):
        append(micro_batches(copy), 4, rows(4))
    with pytest.raises(NotThisStream, match=r"has none of 'new'.*was removed or restored"):
        append(batches, 1, rows(4), application="new")
    with pytest.raises(NotThisStream, match=r"has micro-batch 3 .* already.* comes with 0"):
        append(batches, 0, rows(4))
    shutil.rmtree(table)
    with pytest.raises(Unavailable):
        append(batches, 4, rows(4))
    table.mkdir()
    with pytest.raises(NotThisStream, match="is missing"):
        append(batches, 4, rows(4))
    assert [*table.iterdir()] == []


def test_columns_that_come_later_are_added_and_others_are_refused(table: Path) -> None:
    append(micro_batches(table), 0, rows(1))
    more = rows(2).append_column("day", pa.array(["2026-01-31"]))
    append(micro_batches(table), 1, more)
    append(micro_batches(table), 2, rows(3).drop_columns(["headers"]))
    assert ids(table, "day IS NULL") == [1, 3]
    assert ids(table, "headers IS NULL") == [3]
    other = rows(4).set_column(0, "id", pa.array(["4"]))
    with pytest.raises(Refused, match=r"its column 'id' is .*long.*'id' comes as .*string"):
        append(micro_batches(table), 3, other)
    with pytest.raises(Refused, match=r"is partitioned by nothing, and not by service"):
        append(micro_batches(table, ["service"]), 3, rows(4))


@pytest.mark.parametrize(
    ("by", "columns", "said"),
    [
        ((), {"id": pa.duration("us")}, "'id' is a duration"),
        (("day",), {"id": pa.int64()}, "no column 'day', only id"),
        (("at",), {"id": pa.int64(), "at": pa.timestamp("us", "UTC")}, "'at' is a timestamp"),
        (("id",), {"id": pa.int64()}, "names all columns"),
    ],
)
def test_what_delta_cannot_have_is_refused_before_anything_is_made(
    table: Path, by: Sequence[str], columns: dict[str, pa.DataType], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        micro_batches(table, by).begin(QUERY, 0, pa.schema(columns))
    assert not table.exists()


def test_an_empty_text_that_would_become_null_is_refused(table: Path) -> None:
    with pytest.raises(ConfigurationError, match="'service' has an empty text"):
        append(micro_batches(table, ["service"]), 0, rows(1, service=""))
    assert ids(table) == []
