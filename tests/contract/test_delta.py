"""A Delta table as a destination: appended to by several, cared for, set back and repaired."""

from __future__ import annotations

import shutil
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pydantic import SecretStr, ValidationError

from saf.database import Dsn, fetch
from saf.destinations import Chunk
from saf.destinations.delta import Delta
from saf.destinations.delta.files import Files
from saf.destinations.delta.table import optimize
from saf.errors import Fenced, Refused, SafError, Unavailable
from saf.operating.repair.send_again import send_again
from saf.operating.repair.set_back import set_back
from saf.routing.routes import current_routes
from saf.testing.forwarder import Forwarder, Row
from tests.delta_table import commits, messages, rows, texts
from tests.lakes import (
    WEEK,
    compare,
    ids,
    meanwhile,
    of_shards,
    problems,
    send_numbers,
    store,
)
from tests.pipeline import connect, forward, let_time_pass


@pytest.fixture
def lake(tmp_path: Path) -> Delta:
    (tmp_path / "lake").mkdir()
    return Delta(table=str(tmp_path / "lake"))


@pytest.fixture
def table(lake: Delta) -> Path:
    return Path(lake.table)


def files(table: Path) -> set[str]:
    return {str(file.relative_to(table)) for file in table.rglob("*.parquet")} - {
        str(file.relative_to(table)) for file in (table / "_delta_log").iterdir()
    }


# Forwarded to, and read


def test_messages_are_rows_and_each_is_there_once(app: Dsn, lake: Delta, table: Path) -> None:
    send_numbers(app, *range(10))
    forward(app, chunk_rows=3, lake=lake)
    send_numbers(app, 10, 11)
    forward(app, chunk_rows=3, lake=lake)
    assert texts(table) == [str(number) for number in range(12)]
    with connect(app) as connection:
        sent = fetch(
            connection,
            "SELECT id, shard::int, message_id::text, to_service, key, created_at "
            "FROM saf.outbox ORDER BY id",
        )
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    columns = ("id", "shard", "message_id", "to_service", "key", "created_at")
    assert [tuple(row[name] for name in columns) for row in rows(table)] == sent
    assert {row["source"] for row in rows(table)} == {source}
    assert {row["day"] for row in rows(table)} == {one[5].astimezone(UTC).date() for one in sent}
    assert len([*commits(table)]) == 1 + 5  # the table, and a commit for each chunk


def test_a_query_by_any_column_finds_its_rows(lake: Delta, table: Path) -> None:
    """Readers leave out files by what the log says of them."""
    forwarder = Forwarder()
    days = [datetime(2026, 1, day, 23, 59, 59, 999_999, tzinfo=UTC) for day in (1, 2)]
    for shard, created_at in enumerate(days):
        some = forwarder.messages(3, shard=shard, key=f"k{shard}", created_at=created_at)
        store(lake, forwarder.chunk(some))
    for number, where in enumerate(
        [
            "id <= 3", "shard = 0", "key = 'k0'", "day = '2026-01-01'", "body = '1'::BLOB",
            "created_at = '2026-01-01 23:59:59.999999+00'", "to_service = 'billing' AND id < 4",
            "deliver_at IS NULL AND created_at < '2026-01-02 00:00:00+00'",
        ]
    ):  # fmt: skip
        there = DeltaTable(table).to_pyarrow_dataset()
        found = duckdb.from_arrow(there).filter(where).project("id").fetchall()
        assert sorted(found) == ([(1,)] if number == 4 else [(1,), (2,), (3,)]), where


def test_members_of_bodies_get_columns_also_later(lake: Delta, table: Path) -> None:
    forwarder = Forwarder()
    store(lake, forwarder.chunk(forwarder.messages(1, body=b'{"amount": 1}')))
    more = lake.model_copy(
        update={"promote": {"amount": "double", "paid": "boolean", "at": "timestamp", "n": "long"}}
    )
    said = [
        b'{"amount": 2.5, "paid": true, "at": "2026-01-31T12:00:00+01:00", "n": 7}',
        b'{"amount": "2.5", "paid": 1, "at": "noon", "n": 7.5}',
        b'{"amount": 1e999, "n": 9223372036854775808, "at": 7, "paid": null}',
        b"[1]", b"no JSON", b"\xff", b"[" * 100_000,
    ]  # fmt: skip
    for body in said:
        store(more, forwarder.chunk(forwarder.messages(1, shard=0, body=body)))
    names = ("amount", "paid", "at", "n")
    found = [tuple(row[name] for name in names) for row in rows(table)]
    noon = datetime(2026, 1, 31, 11, tzinfo=UTC)
    assert found[:2] == [(None,) * 4, (2.5, True, noon, 7)]
    assert found[2] == (None,) * 4
    assert found[3] == (float("inf"), None, None, None)
    assert found[4:] == [(None,) * 4] * 4
    other = lake.model_copy(update={"promote": {"amount": "string"}})
    with pytest.raises(Refused, match=r"the column 'amount' of its table is double, and .* string"):
        store(other, forwarder.chunk(forwarder.messages(1)))
    store(lake, forwarder.chunk(forwarder.messages(1, shard=0)))
    assert len(rows(table)) == 9


# Appended to by several


def test_tasks_with_other_shards_append_at_the_same_time(lake: Delta, table: Path) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    mine, theirs = (of_shards(forwarder.chunk(sent), *some) for some in ((0, 1), (2, 3)))
    with meanwhile(lambda: store(lake, theirs)):
        assert store(lake, mine) == (4, 0)
    assert sorted(ids(messages(table))) == sorted(ids(sent))
    assert len(files(table)) == 2  # none was written twice


def test_a_new_owner_that_stores_before_the_commit_fences_it(lake: Delta, table: Path) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    zombie = forwarder.chunk(sent)
    forwarder.epoch += 1
    newer = forwarder.chunk(sent[:4])
    with meanwhile(lambda: store(lake, newer)), pytest.raises(Fenced):
        store(lake, zombie)
    assert ids(messages(table)) == ids(sent[:4])
    assert len(files(table)) == 1  # what is not in the table was removed


def test_a_chunk_that_another_process_stores_before_the_commit_is_there_once(
    lake: Delta, table: Path
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    chunk = forwarder.chunk(sent)
    with meanwhile(lambda: store(lake, forwarder.chunk(sent[:5]))):
        assert store(lake, chunk) == (3, 5)
    assert ids(messages(table)) == ids(sent)


def test_a_commit_that_is_asked_for_twice_keeps_its_files(
    lake: Delta, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an object store's client does, if the answer to the first request is lost."""
    forwarder = Forwarder()
    store(lake, forwarder.chunk(forwarder.messages(2)))
    real = DeltaTable.create_write_transaction

    def twice(self: DeltaTable, *arguments: Any, **more: Any) -> None:
        real(DeltaTable(table), *arguments, **more)
        real(self, *arguments, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", twice)
    sent = forwarder.messages(4)
    assert store(lake, forwarder.chunk(sent)) == (4, 0)
    monkeypatch.undo()
    assert ids(messages(table))[2:] == ids(sent)


def test_a_table_that_is_changed_before_the_commit_gets_the_messages_once(
    lake: Delta, table: Path
) -> None:
    forwarder = Forwarder()
    store(lake, forwarder.chunk(forwarder.messages(4)))
    with meanwhile(lambda: DeltaTable(table).alter.set_table_description("ours")):
        assert store(lake, forwarder.chunk(forwarder.messages(4))) == (4, 0)
    with meanwhile(lambda: optimize("lake", lake, keep_hours=1, dry_run=False)):
        assert store(lake, forwarder.chunk(forwarder.messages(4))) == (4, 0)
    assert [row["id"] for row in rows(table)] == [*range(1, 13)]


def test_two_that_make_the_table_at_the_same_time_make_one(lake: Delta, table: Path) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    one, other = (lake.open("lake") for _ in range(2))
    one.connect()
    other.connect()
    halves = [of_shards(forwarder.chunk(sent), *some) for some in ((0, 1), (2, 3))]
    for destination, half in zip((one, other), halves, strict=True):
        destination.store(half, exactly_once=True)
    assert one.identity() == other.identity()
    assert len(rows(table)) == 8


# Cared for


def test_many_files_become_few_and_nothing_is_sent_again(
    app: Dsn, lake: Delta, table: Path
) -> None:
    send_numbers(app, *range(30))
    forward(app, chunk_rows=3, lake=lake)
    (table / "day=2026-01-01").mkdir()
    orphan = table / "day=2026-01-01" / "left-by-a-killed-process.parquet"
    orphan.write_bytes(b"")
    asked = optimize("lake", lake, keep_hours=1, dry_run=True)
    assert (asked.files_before, asked.files_after, asked.removed) == (10, 10, 0)
    done = optimize("lake", lake, keep_hours=1, dry_run=False)
    assert (done.files_before, done.files_after, done.removed) == (10, 1, 0)
    assert orphan.exists()  # it is too young
    send_numbers(app, 30)
    forward(app, chunk_rows=3, lake=lake)
    assert [row["body"] for row in rows(table)] == [b"%d" % number for number in range(31)]
    assert compare(app, lake).same


def test_marks_are_kept_by_checkpoints(lake: Delta, table: Path) -> None:
    """Delta removes files of its log that are older than a checkpoint, after a month."""
    forwarder = Forwarder()
    sent = forwarder.messages(45, shard=0)
    for row in sent:
        done = forwarder.learn(lake_stores(lake, forwarder.chunk([row])))
    checkpoints = sorted((table / "_delta_log").glob("*.checkpoint.parquet"))
    assert checkpoints
    newest = checkpoints[-1].name[:20]
    for file in (table / "_delta_log").glob("*.json"):
        if file.name[:20] < newest:
            file.unlink()
    known = lake.known("lake", forwarder.source, role="test")
    assert {**known.marks} == {**done.marks}
    assert {*known.epochs.values()} == {forwarder.epoch}
    assert store(lake, forwarder.chunk(sent)) == (0, 45)


def lake_stores(lake: Delta, chunk: Chunk) -> Any:
    with closing(lake.open("lake")) as one:
        return one.store(chunk, exactly_once=True)


# Honest


def test_a_table_that_was_set_back_is_refused_and_gets_again_what_it_has_lost(
    app: Dsn, lake: Delta, table: Path, tmp_path: Path
) -> None:
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=3, lake=lake)
    backup = shutil.copytree(table, tmp_path / "backup")
    send_numbers(app, 2, 3)
    forward(app, chunk_rows=3, lake=lake)
    shutil.rmtree(table)
    backup.rename(table)
    send_numbers(app, 4)
    assert problems(app, lake) == ["Behind"]
    assert texts(table) == ["0", "1"]
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        known = lake.known("lake", source, role="test")
        assert set_back(connection, "lake", known).behind
    sent = send_again(
        "app", app, {"lake": lake}, lambda one: current_routes(one, "lake"),
        retention_seconds=WEEK,
    )  # fmt: skip
    assert sent is not None
    assert {name: len(ids) for name, ids in sent.by_destination.items()} == {"lake": 2}
    let_time_pass(app)
    forward(app, chunk_rows=3, lake=lake)
    forward(app, chunk_rows=3, lake=lake)
    assert sorted(texts(table)) == [str(number) for number in range(5)]
    assert compare(app, lake).same


@pytest.mark.parametrize("name", ["", "x", "7", "7:epoch", "x:epoch:", "7:place:", "7:position:"])
def test_marks_that_somebody_has_written_make_no_dead_letters(
    lake: Delta, table: Path, name: str
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(4)
    forwarder.learn(lake_stores(lake, forwarder.chunk(sent)))
    there = DeltaTable(table)
    theirs = CommitProperties(app_transactions=[Transaction(f"saf:{forwarder.source}:{name}", 1)])
    there.create_write_transaction([], "append", there.schema(), commit_properties=theirs)
    with pytest.raises(Refused, match=r"its marks .* cannot be read.*estore the table"):
        store(lake, forwarder.chunk(sent))
    with pytest.raises(Refused, match="cannot be read"):
        lake.known("lake", forwarder.source, role="test")


def test_a_table_that_is_altered_while_a_task_has_it_is_looked_at_again(
    lake: Delta, table: Path
) -> None:
    forwarder = Forwarder()

    def overwritten(rows: pa.Table, by: str) -> None:
        write_deltalake(table, rows, mode="overwrite", schema_mode="overwrite", partition_by=[by])

    with closing(lake.open("lake")) as one:

        def stores(count: int) -> int:
            rows = forwarder.messages(count)
            return forwarder.learn(one.store(forwarder.chunk(rows), exactly_once=True)).messages

        assert stores(1) == 1
        there = DeltaTable(table).to_pyarrow_table()
        overwritten(there.drop_columns(["key"]), "day")
        assert stores(2) == 2
        assert "key" in DeltaTable(table).schema().to_arrow().names
        number = there.set_column(there.column_names.index("key"), "key", pa.array([7]))
        overwritten(number, "day")
        with pytest.raises(Refused, match="the column 'key' of its table is"):
            stores(1)
        overwritten(there, "to_service")
        with pytest.raises(Refused, match="partitioned by to_service, not by day"):
            stores(1)
        assert len(DeltaTable(table).to_pyarrow_table()) == 1  # it can be read


def test_a_table_that_is_gone_is_not_taken_for_a_new_one(
    app: Dsn, lake: Delta, table: Path, tmp_path: Path
) -> None:
    assert compare(app, lake).same  # nothing was forwarded there yet, and nothing is written
    assert [*lake.problems("lake")] == []
    assert [*table.iterdir()] == []
    send_numbers(app, 0)
    forward(app, chunk_rows=3, lake=lake)
    table.rename(tmp_path / "disk")
    table.mkdir()
    send_numbers(app, 1)
    assert problems(app, lake) == ["Behind"]
    shutil.rmtree(table)
    elsewhere = Delta(table=str((tmp_path / "disk").rename(tmp_path / "elsewhere")))
    let_time_pass(app)
    forward(app, chunk_rows=3, lake=elsewhere)
    assert texts(tmp_path / "elsewhere") == ["0", "1"]


def test_a_commit_that_lost_power_halfway_is_made_again(lake: Delta, table: Path) -> None:
    """The name of the log's file is there, and nothing in it."""
    forwarder = Forwarder()
    sent = forwarder.messages(8, shard=0)
    store(lake, forwarder.chunk(sent[:4]))
    store(lake, forwarder.chunk(sent))
    last = sorted((table / "_delta_log").glob("*.json"))[-1]
    last.write_bytes(b"")
    assert store(lake, forwarder.chunk(sent)) == (4, 4)
    assert ids(messages(table)) == ids(sent)


def test_a_table_that_is_taken_away_before_the_commit_gets_the_messages_later(
    lake: Delta, table: Path
) -> None:
    lake = lake.model_copy(update={"partition_by": "service"})  # files in the folder itself
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    store(lake, forwarder.chunk(sent[:4]))
    away = table.with_name("away")
    with meanwhile(lambda: table.rename(away)), pytest.raises(Unavailable):
        store(lake, forwarder.chunk(sent))
    with pytest.raises(Unavailable):
        store(lake, forwarder.chunk(sent))
    with pytest.raises(FileNotFoundError):
        Files(lake.table, table, {}).write("rows.parquet", b"")
    assert not table.exists()
    away.rename(table)
    assert store(lake, forwarder.chunk(sent)) == (4, 4)
    assert ids(messages(table)) == ids(sent)


def test_rows_that_somebody_has_deleted_are_not_taken_for_lost_for_ever(
    app: Dsn, lake: Delta, table: Path
) -> None:
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=3, lake=lake)
    assert compare(app, lake).range.purged == ()
    DeltaTable(table).delete()
    outcome = compare(app, lake)
    assert outcome.range.purged == ("table of destination 'lake'",)
    assert outcome.counts == {"lost": 2}


def test_a_restore_by_delta_is_named(app: Dsn, lake: Delta, table: Path) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, lake=lake)
    assert [*lake.problems("lake")] == []
    DeltaTable(table).restore(0)
    ((what, cure),) = lake.problems("lake")
    assert "restored to an older version, by version 2" in what
    assert "saf reconcile" in cure
    assert compare(app, lake).counts == {"lost": 1}


# Refused


def made(table: Path, **options: Any) -> None:
    """A table that somebody else has made."""
    columns = {"id": pa.array([1], pa.int64()), "amount": pa.array([1.5])}
    write_deltalake(table, pa.table(columns), **options)


def test_a_table_of_somebody_elses_gets_columns_if_it_can_have_them(
    lake: Delta, table: Path
) -> None:
    made(table)
    forwarder = Forwarder()
    chunk = forwarder.chunk(forwarder.messages(2))
    with pytest.raises(Refused, match=r'partitioned by nothing, not by day.* partition_by = "not'):
        store(lake, chunk)
    flat = lake.model_copy(update={"partition_by": "nothing"})
    before = flat.identity("lake")
    store(flat, chunk)
    assert flat.identity("lake") == before
    assert len(rows(table)) == 3
    DeltaTable(table).alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(Refused, match="constraints, which saf does not check"):
        store(flat, chunk)


def test_a_column_that_must_have_a_value_is_refused(lake: Delta, table: Path) -> None:
    named = pa.schema([pa.field("owner", pa.string(), nullable=False), ("day", pa.date32())])
    DeltaTable.create(table, named, partition_by=["day"])
    with pytest.raises(Refused, match="column 'owner' of its table must have a value"):
        store(lake, Forwarder().chunk([]))


def test_what_cannot_be_a_table_or_a_column_is_refused(tmp_path: Path) -> None:
    for wrong, said in (
        ({"table": ""}, "is empty"),
        ({"table": "s3://bucket"}, "neither a folder nor an address"),
        ({"table": "file:///x/y"}, "neither a folder nor an address"),
        ({"promote": {"ID": "long"}}, "has such a column already"),
        ({"promote": {"a b": "long"}}, "cannot be the name of a column"),
        ({"promote": {"a": "long", "A": "long"}}, "upper and lower case"),
        ({"promote": {"a": "uuid"}}, "Input should be"),
    ):
        with pytest.raises(ValidationError, match=said):
            Delta.model_validate({"table": str(tmp_path), **wrong})


def test_an_object_store_that_does_not_answer_is_unavailable_and_no_secret_is_shown() -> None:
    canary = "hunter2-canary"
    options = {
        "AWS_ACCESS_KEY_ID": canary, "AWS_SECRET_ACCESS_KEY": canary, "AWS_REGION": "here",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:9/{canary}", "AWS_ALLOW_HTTP": "true",
        "max_retries": "0",
    }  # fmt: skip
    secret = {name: SecretStr(value) for name, value in options.items()}
    lake = Delta(table="s3://bucket/table", storage_options=secret)
    shown: list[object] = [lake, lake.model_dump_json()]
    row: Row = Forwarder().message()
    for ask in (
        lambda: lake.identity("lake"),
        lambda: [*lake.problems("lake")],
        lambda: store(lake, Forwarder().chunk([row])),
    ):
        with pytest.raises(Unavailable) as caught:
            ask()
        assert isinstance(caught.value, SafError)
        shown.append(caught.value)
    assert canary not in repr(shown) + str(shown)
