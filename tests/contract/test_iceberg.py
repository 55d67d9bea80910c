"""An Iceberg table as a destination: appended to by several, rolled back, set back and repaired."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import SecretStr, ValidationError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from saf.database import Dsn, fetch
from saf.database.bounds import Bounds
from saf.destinations.iceberg import Iceberg
from saf.destinations.iceberg.link import Link
from saf.errors import Behind, Fenced, Refused, SafError, Unavailable
from saf.operating.repair.send_again import send_again
from saf.operating.repair.set_back import set_back
from saf.routing.routes import current_routes
from saf.testing.forwarder import Forwarder
from tests.endpoints import listening
from tests.iceberg_table import in_postgresql, loaded, messages, roll_back, rows, snapshots, texts
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
from tests.rest_catalog import rest_catalog
from tests.synced import synced


@pytest.fixture
def lake(tmp_path: Path) -> Iceberg:
    return lake_in(tmp_path / "lake")


def lake_in(folder: Path) -> Iceberg:
    folder.mkdir()
    catalog = f"sqlite:///{folder}/catalog.db"
    return Iceberg(catalog=catalog, table="shop.messages", warehouse=str(folder))


def folder_of(lake: Iceberg) -> Path:
    assert lake.folder is not None
    return lake.folder


def data(lake: Iceberg) -> list[Path]:
    """Its files with rows, and any that nobody reads."""
    return [*folder_of(lake).rglob("*.parquet")]


def catalog_of(lake: Iceberg) -> SqlCatalog:
    """The catalog, as somebody else opens it."""
    folder = lake.folder
    return SqlCatalog("saf", uri=lake.catalog, warehouse=f"file://{folder}")


def append(lake: Iceberg, branch: str = "main") -> None:
    """Somebody else appends a row, with the id 1,000."""
    table = loaded(lake)
    row = table.scan().to_arrow().slice(0, 1)
    row = row.set_column(row.column_names.index("id"), "id", pa.array([1_000]))
    table.append(row, branch=branch)


# Forwarded to, and read


def test_messages_are_rows_and_each_is_there_once(app: Dsn, lake: Iceberg) -> None:
    send_numbers(app, *range(10))
    forward(app, chunk_rows=3, lake=lake)
    send_numbers(app, 10, 11)
    forward(app, chunk_rows=3, lake=lake)
    assert texts(lake) == [str(number) for number in range(12)]
    with connect(app) as connection:
        sent = fetch(
            connection,
            "SELECT id, shard::int, message_id::text, to_service, key, created_at "
            "FROM saf.outbox ORDER BY id",
        )
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    columns = ("id", "shard", "message_id", "to_service", "key", "created_at")
    assert [tuple(row[name] for name in columns) for row in rows(lake)] == sent
    assert {row["source"] for row in rows(lake)} == {source}
    assert len(snapshots(lake)) == 5  # a commit for each chunk
    assert compare(app, lake).same


def test_a_query_by_any_column_finds_its_rows(lake: Iceberg) -> None:
    """Readers leave out files by what the list of files says of them."""
    forwarder = Forwarder()
    days = [datetime(2026, 1, day, 23, 59, 59, 999_999, tzinfo=UTC) for day in (1, 2)]
    for shard, created_at in enumerate(days):
        some = forwarder.messages(
            3, shard=shard, key=f"a key that is longer than {shard}", created_at=created_at
        )
        store(lake, forwarder.chunk(some))
    table = loaded(lake)
    for where in (
        "id <= 3", "shard = 0", "key = 'a key that is longer than 0'", "deliver_at is null",
        "created_at = '2026-01-01T23:59:59.999999+00:00'", "to_service = 'billing'",
    ):  # fmt: skip
        found = table.scan(where).to_duckdb("messages").sql("SELECT id FROM messages ORDER BY id")
        every = where.startswith(("deliver_at", "to_service"))
        assert [one for (one,) in found.fetchall()] == ([*range(1, 7)] if every else [1, 2, 3])
    day = table.scan("created_at < '2026-01-02T00:00:00+00:00'")
    assert len([*day.plan_files()]) == 1


def test_the_names_of_its_folders_are_durable_before_a_message_counts_as_stored(
    lake: Iceberg,
) -> None:
    forwarder, folder = Forwarder(), folder_of(lake)
    with synced() as found:
        store(lake, forwarder.chunk(forwarder.messages(1)))
    made = {one.parent for one in folder.rglob("shop/**/*") if one.is_dir()}
    assert {folder, folder / "shop", *made} <= found


def test_members_of_bodies_get_columns_also_later(lake: Iceberg) -> None:
    forwarder = Forwarder()
    store(lake, forwarder.chunk(forwarder.messages(1, body=b'{"amount": 1}')))
    promote = {"amount": "double", "paid": "boolean", "at": "timestamp", "n": "long"}
    more = lake.model_copy(update={"promote": promote})
    body = b'{"amount": 2.5, "paid": true, "at": "2026-01-31T12:00:00+01:00", "n": 7}'
    store(more, forwarder.chunk(forwarder.messages(1, shard=0, body=body)))
    found = [tuple(row[name] for name in promote) for row in rows(lake)]
    noon = datetime(2026, 1, 31, 11, tzinfo=UTC)
    assert found == [(None,) * 4, (2.5, True, noon, 7)]
    other = lake.model_copy(update={"promote": {"amount": "string"}})
    with pytest.raises(Refused, match=r"the column 'amount' of its table is double, and .* string"):
        store(other, forwarder.chunk(forwarder.messages(1)))


# Appended to by several


def test_tasks_with_other_shards_append_at_the_same_time(lake: Iceberg) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    mine, theirs = (of_shards(forwarder.chunk(sent), *some) for some in ((0, 1), (2, 3)))
    with meanwhile(lambda: store(lake, theirs)):
        assert store(lake, mine) == (4, 0)
    assert sorted(ids(messages(lake))) == sorted(ids(sent))
    assert len(data(lake)) == 2  # what was written for the commit that failed is gone
    again = forwarder.chunk(sent)
    assert store(lake, again) == (0, 8)  # the marks of both are there


def test_a_new_owner_that_stores_before_the_commit_fences_it(lake: Iceberg) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    zombie = forwarder.chunk(sent)
    forwarder.epoch += 1
    newer = forwarder.chunk(sent[:4])
    with meanwhile(lambda: store(lake, newer)), pytest.raises(Fenced):
        store(lake, zombie)
    assert ids(messages(lake)) == ids(sent[:4])
    assert len(data(lake)) == 1


def test_a_chunk_that_another_process_stores_before_the_commit_is_there_once(
    lake: Iceberg,
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    with meanwhile(lambda: store(lake, forwarder.chunk(sent[:5]))):
        assert store(lake, forwarder.chunk(sent)) == (3, 5)
    assert ids(messages(lake)) == ids(sent)


def test_a_table_that_is_changed_before_the_commit_gets_the_messages_once(lake: Iceberg) -> None:
    lake = lake.model_copy(update={"partition_by": "service"})
    forwarder = Forwarder()
    sent = forwarder.messages(12)

    def change() -> None:
        """It asks for a commit to be tried again, which would bring older marks."""
        with loaded(lake).transaction() as transaction:
            transaction.set_properties({"commit.retry.num-retries": "4", "owner": "us"})

    store(lake, forwarder.chunk(sent[:4]))
    with meanwhile(change):
        assert store(lake, forwarder.chunk(sent[:8])) == (4, 4)
    with meanwhile(lambda: append(lake)):
        assert store(lake, forwarder.chunk(sent)) == (4, 8)
    assert [row["id"] for row in rows(lake)] == [*range(1, 13), 1_000]
    assert loaded(lake).properties["owner"] == "us"


def test_a_commit_to_another_branch_is_in_nobodys_way_for_long(lake: Iceberg) -> None:
    lake = lake.model_copy(update={"partition_by": "service"})
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    store(lake, forwarder.chunk(sent[:4]))
    loaded(lake).manage_snapshots().create_branch(snapshots(lake)[-1], "trial").commit()

    with meanwhile(lambda: append(lake, branch="trial")), pytest.raises(Unavailable):
        store(lake, forwarder.chunk(sent))
    assert store(lake, forwarder.chunk(sent)) == (4, 4)
    assert [row["id"] for row in rows(lake)] == [*range(1, 9)]


def test_two_that_make_the_table_at_the_same_time_make_one(lake: Iceberg) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    one, other = (lake.open("lake") for _ in range(2))
    with closing(one), closing(other):
        one.connect()
        other.connect()
        halves = [of_shards(forwarder.chunk(sent), *some) for some in ((0, 1), (2, 3))]
        for destination, half in zip((one, other), halves, strict=True):
            destination.store(half, exactly_once=True)
        assert one.identity() == other.identity()
    assert len(rows(lake)) == 8


def test_several_that_make_a_catalog_at_the_same_time_make_one(lake: Iceberg) -> None:
    """As the tasks of a first run do."""
    at_once = Barrier(4)

    def identity(_: int) -> UUID:
        with closing(lake.open("lake")) as destination:
            at_once.wait(30)
            return destination.identity()

    with ThreadPoolExecutor(4) as tasks:
        assert len({*tasks.map(identity, range(4))}) == 1


def test_by_a_rest_catalog_messages_are_stored_once_and_a_zombie_is_fenced(tmp_path: Path) -> None:
    with rest_catalog(tmp_path / "lake", token="let-me-in") as url:
        lake = Iceberg(
            catalog=url, table="shop.messages", properties={"token": SecretStr("let-me-in")}
        )
        assert [*lake.problems("lake")] == []
        forwarder = Forwarder()
        sent = forwarder.messages(8)
        with meanwhile(lambda: store(lake, forwarder.chunk(sent[:5]))):
            assert store(lake, forwarder.chunk(sent)) == (3, 5)
        zombie = forwarder.chunk(forwarder.messages(4))
        forwarder.epoch += 1
        newer = forwarder.chunk(forwarder.messages(4))
        with meanwhile(lambda: store(lake, newer)), pytest.raises(Fenced):
            store(lake, zombie)
        assert [row["id"] for row in rows(lake)] == [*range(1, 9), *range(13, 17)]
        assert "by a REST catalog" in lake.guarantee("lake").server
        stranger = lake.model_copy(update={"properties": {"token": SecretStr("hunter2")}})
        with pytest.raises(Refused, match=r"[Ff]ix properties\.token") as caught:
            store(stranger, newer)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(Unavailable):
        store(lake, newer)


def test_a_rest_catalog_that_says_nothing_at_a_login_or_no_catalogs_answer_is_unavailable() -> None:
    bounds = Bounds(network_seconds=1, statement_seconds=1)
    login = {"credential": SecretStr("somebody:hunter2")}
    said = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\nhere"

    def answer(connection: socket.socket) -> None:
        if connection.recv(1 << 16):
            connection.sendall(said)

    def say_nothing(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    for serve, properties, reason in (
        (say_nothing, login, "timed out"),
        (answer, login, "TokenResponse"),
        (answer, {}, "ConfigResponse"),
    ):
        with listening(serve) as url:
            more = {"oauth2-server-uri": SecretStr(url), **properties}
            lake = Iceberg(catalog=url, table="a.b", properties=more).bounded(bounds)
            began = time.monotonic()
            with pytest.raises(Unavailable, match=reason) as caught:
                lake.identity("lake")
            assert time.monotonic() - began < 15
            assert "hunter2" not in str(caught.value)


# Honest


def test_a_table_that_was_rolled_back_is_refused_and_gets_again_what_it_has_lost(
    app: Dsn, lake: Iceberg
) -> None:
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=3, lake=lake)
    send_numbers(app, 2, 3)
    forward(app, chunk_rows=3, lake=lake)
    roll_back(lake, snapshots(lake)[0])
    send_numbers(app, 4)
    assert problems(app, lake) == ["Behind"]
    assert texts(lake) == ["0", "1"]
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
    assert sorted(texts(lake)) == [str(number) for number in range(5)]
    assert compare(app, lake).same


def expire(lake: Iceberg, *which: int) -> None:
    """Iceberg forgets snapshots."""
    loaded(lake).maintenance.expire_snapshots().by_ids([*which]).commit()
    assert not {*which} & {*snapshots(lake)}


def test_marks_stay_when_their_snapshots_have_expired(lake: Iceberg) -> None:
    one, other = Forwarder(), Forwarder()
    sent = one.messages(4)
    store(lake, one.chunk(sent))
    store(lake, other.chunk(other.messages(4)))
    expire(lake, snapshots(lake)[0])
    assert store(lake, one.chunk(sent)) == (0, 4)
    one.epoch = 0
    with pytest.raises(Fenced):
        store(lake, one.chunk(sent))


def test_marks_that_were_rolled_back_do_not_count_again_once_others_have_committed(
    lake: Iceberg,
) -> None:
    one, other, third = Forwarder(), Forwarder(), Forwarder()
    sent = one.messages(8)
    known = {}
    for forwarder, some in ((other, other.messages(4)), (one, sent[:4]), (one, sent)):
        with closing(lake.open("lake")) as table:
            known = {**forwarder.learn(table.store(forwarder.chunk(some), exactly_once=True)).marks}
    store(lake, third.chunk(third.messages(1)))
    first, second, *later = snapshots(lake)
    roll_back(lake, second)
    store(lake, other.chunk(other.messages(4)))
    expire(lake, first, second, *later)
    assert lake.known("lake", one.source, role="test").marks != known
    assert lake.known("lake", third.source, role="test").marks == {}
    with pytest.raises(Behind):
        store(lake, one.chunk(sent))


def test_a_rollback_whose_marks_have_expired_is_refused_and_a_way_out_is_named(
    lake: Iceberg,
) -> None:
    one, other = Forwarder(), Forwarder()
    for forwarder in (one, other, one):
        some = forwarder.messages(4)
        with closing(lake.open("lake")) as table:
            forwarder.learn(table.store(forwarder.chunk(some), exactly_once=True))
    first, second, third = snapshots(lake)
    roll_back(lake, second)
    expire(lake, first)
    for forwarder in (one, other):  # a commit of the other's would hide it
        with pytest.raises(Refused, match="how far it had got by then has expired") as caught:
            store(lake, forwarder.chunk(forwarder.messages(1)))
        assert f"main to snapshot {third} again" in str(caught.value)
        assert f"remove its property saf.marks.{one.source}" in str(caught.value)
    with loaded(lake).transaction() as transaction:
        transaction.remove_properties(f"saf.marks.{one.source}")
    with pytest.raises(Behind):
        store(lake, one.chunk(one.messages(1)))
    assert store(lake, other.chunk(other.messages(1))) == (1, 0)


@pytest.mark.parametrize("text", ["", "{}", '{"snapshot": 1, "sequence": "x"}', "null"])
def test_marks_that_somebody_has_written_make_no_dead_letters(lake: Iceberg, text: str) -> None:
    one, other = Forwarder(), Forwarder()
    for forwarder in (one, other):
        store(lake, forwarder.chunk(forwarder.messages(4)))
    mine = f"saf.marks.{one.source}"
    before = loaded(lake).properties[mine]
    with loaded(lake).transaction() as transaction:
        transaction.set_properties({mine: text})
    for forwarder in (one, other):  # a commit of the other's could not put it right
        with pytest.raises(Refused, match=f"property {mine} .* cannot be read.*remove it"):
            store(lake, forwarder.chunk(forwarder.messages(1)))
    with pytest.raises(Refused, match="cannot be read"):
        lake.known("lake", one.source, role="test")
    with loaded(lake).transaction() as transaction:
        transaction.set_properties({mine: before})
    assert store(lake, other.chunk(other.messages(1))) == (1, 0)


def test_a_table_that_is_altered_while_a_task_has_it_is_looked_at_again(lake: Iceberg) -> None:
    forwarder = Forwarder()
    with closing(lake.open("lake")) as table:

        def stores(count: int) -> int:
            rows = forwarder.messages(count)
            return forwarder.learn(table.store(forwarder.chunk(rows), exactly_once=True)).messages

        assert stores(1) == 1
        with loaded(lake).update_schema() as change:
            change.rename_column("key", "formerly")
            change.delete_column("message_type")
        assert stores(2) == 2
        assert {"key", "formerly", "message_type"} <= {*loaded(lake).schema().column_names}
        with loaded(lake).update_spec() as spec:
            spec.remove_field("created_at_day")
        with pytest.raises(Refused, match="partitioned by nothing, not by day"):
            stores(1)


def test_a_table_that_is_gone_is_not_taken_for_a_new_one(
    app: Dsn, lake: Iceberg, tmp_path: Path
) -> None:
    folder = folder_of(lake)
    assert compare(app, lake).same  # nothing was forwarded there yet, and nothing is written
    assert [*lake.problems("lake")] == []
    assert [*folder.iterdir()] == []
    send_numbers(app, 0)
    forward(app, chunk_rows=3, lake=lake)
    folder.rename(tmp_path / "disk")
    folder.mkdir()
    send_numbers(app, 1)
    assert problems(app, lake) == ["Behind"]
    shutil.rmtree(folder)
    (tmp_path / "disk").rename(folder)
    catalog_of(lake).drop_table(("shop", "messages"))
    let_time_pass(app)
    assert problems(app, lake) == ["Behind"]


def test_a_table_that_is_taken_away_before_the_commit_gets_the_messages_later(
    lake: Iceberg,
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    store(lake, forwarder.chunk(sent[:4]))
    folder = folder_of(lake)
    away = folder.with_name("away")
    with meanwhile(lambda: folder.rename(away)), pytest.raises(Unavailable):
        store(lake, forwarder.chunk(sent))
    with pytest.raises(Unavailable):
        store(lake, forwarder.chunk(sent))
    assert not folder.exists()
    away.rename(folder)
    assert store(lake, forwarder.chunk(sent)) == (4, 4)
    assert ids(messages(lake)) == ids(sent)


def test_rows_that_somebody_has_deleted_are_not_taken_for_lost_for_ever(
    app: Dsn, lake: Iceberg
) -> None:
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=3, lake=lake)
    assert compare(app, lake).range.purged == ()
    loaded(lake).delete("id >= 0")
    outcome = compare(app, lake)
    assert outcome.range.purged == ("table of destination 'lake'",)
    assert outcome.counts == {"lost": 2}
    send_numbers(app, 2)
    assert problems(app, lake) == []
    assert texts(lake) == ["2"]


# Refused


def test_a_table_of_somebody_elses_gets_columns_if_it_can_have_them(lake: Iceberg) -> None:
    catalog = catalog_of(lake)
    catalog.create_namespace("shop")
    columns = pa.schema([("id", pa.int64()), ("amount", pa.float64())])
    table = catalog.create_table("shop.messages", columns)
    table.append(pa.table({"id": [1_000], "amount": [1.5]}, columns))
    forwarder = Forwarder()
    chunk = forwarder.chunk(forwarder.messages(2))
    with pytest.raises(Refused, match=r'partitioned by nothing, not by day.* partition_by = "not'):
        store(lake, chunk)
    flat = lake.model_copy(update={"partition_by": "nothing"})
    before = flat.identity("lake")
    store(flat, chunk)
    assert flat.identity("lake") == before
    assert [row["amount"] for row in rows(flat)] == [None, None, 1.5]


def test_a_table_that_rows_cannot_be_appended_to_is_refused(lake: Iceberg) -> None:
    catalog = catalog_of(lake)
    catalog.create_namespace("shop")
    flat = lake.model_copy(update={"partition_by": "nothing"})
    needed = Schema(NestedField(1, "owner", LongType(), required=True))
    for properties, said in (
        ({"format-version": "1"}, "has version 1 of Iceberg's format"),
        ({}, "column 'owner' of its table must have a value"),
    ):
        catalog.create_table("shop.messages", needed, properties=properties)
        with pytest.raises(Refused, match=said):
            store(flat, Forwarder().chunk([]))
        with pytest.raises(Refused, match=said):
            [*flat.problems("lake")]
        catalog.drop_table("shop.messages")


def test_what_cannot_be_a_catalog_or_a_table_is_refused(tmp_path: Path) -> None:
    right = {"catalog": "sqlite:///c.db", "table": "shop.messages", "warehouse": str(tmp_path)}
    for wrong, said in (
        ({"table": "messages"}, "not a table with its namespace"),
        ({"table": "shop..messages"}, "not a table with its namespace"),
        ({"catalog": "mysql://db/lake"}, "not an address of a catalog"),
        ({"catalog": "sqlite:///"}, "not an address of a catalog"),
        ({"catalog": "postgresql://saf:hunter2@db/lake"}, "give a login by username"),
        ({"warehouse": "file:///lake"}, "neither a folder nor an address"),
        ({"warehouse": None}, "a catalog in a database needs a folder"),
        ({"promote": {"ID": "long"}}, "has such a column already"),
    ):
        with pytest.raises(ValidationError, match=said) as caught:
            Iceberg.model_validate({**right, **wrong})
        assert "hunter2" not in str([one["msg"] for one in caught.value.errors()])


def test_a_catalog_that_does_not_answer_is_unavailable_and_no_secret_is_shown(
    tmp_path: Path, new_database: Callable[[str], Dsn]
) -> None:
    canary = "hunter2-canary"
    secrets = {
        "username": "nobody", "password": SecretStr(canary), "table": "shop.messages",
        "warehouse": str(tmp_path), "properties": {"token": SecretStr(canary)},
    }  # fmt: skip
    there = Iceberg.model_validate({**in_postgresql(new_database("catalog")), **secrets})
    for lake, error in (
        (Iceberg.model_validate({**secrets, "catalog": "http://127.0.0.1:9"}), Unavailable),
        (Iceberg.model_validate({**secrets, "catalog": "postgresql://127.0.0.1:9/x"}), Unavailable),
        (there, Refused),
    ):
        shown: list[object] = [lake, lake.model_dump_json(), Link("lake", lake)]
        for ask in (
            lambda: lake.identity("lake"),  # noqa: B023 - called at once
            lambda: [*lake.problems("lake")],  # noqa: B023
            lambda: store(lake, Forwarder().chunk([Forwarder().message()])),  # noqa: B023
        ):
            with pytest.raises(error) as caught:
                ask()
            assert isinstance(caught.value, SafError)
            shown.append(caught.value)
        assert canary not in repr(shown) + str(shown)
