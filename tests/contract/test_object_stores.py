"""Tables and archives in an object store: what is promised of a folder is promised there."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from saf.database import Dsn
from saf.database.bounds import Bounds
from saf.destinations.delta import Delta
from saf.destinations.delta.micro_batches import MicroBatches, heard
from saf.destinations.delta.table import optimize
from saf.destinations.iceberg import Iceberg
from saf.destinations.kinds import archive_at
from saf.destinations.lake import LakeSettings
from saf.errors import Fenced, Unavailable
from saf.operating.maintenance import purge_broker
from saf.testing.forwarder import Forwarder
from tests import iceberg_table
from tests.archives import fill, may_go
from tests.lakes import compare, meanwhile, problems, send_numbers, store
from tests.object_store import ObjectStore
from tests.pipeline import connect, forward, let_time_pass

KINDS = ("delta", "iceberg")


@pytest.fixture
def bucket(objects: ObjectStore) -> str:
    return objects.bucket()


@pytest.fixture
def delta(objects: ObjectStore, bucket: str) -> Delta:
    return Delta(table=f"s3://{bucket}/lake", storage_options=objects.secrets)


@pytest.fixture
def iceberg(objects: ObjectStore, bucket: str, tmp_path: Path) -> Iceberg:
    return Iceberg(
        catalog=f"sqlite:///{tmp_path}/catalog.db",
        table="shop.messages",
        warehouse=f"s3://{bucket}/lake",
        properties=objects.properties,
    )


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest) -> LakeSettings:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, LakeSettings)
    return found


def texts(lake: LakeSettings) -> list[str]:
    """The bodies of all rows, by their ids, as other readers find them."""
    if isinstance(lake, Iceberg):
        return [row["body"].decode() for row in iceberg_table.rows(lake)]
    assert isinstance(lake, Delta)
    table = DeltaTable(lake.table, storage_options=lake.options)
    rows = duckdb.from_arrow(table.to_pyarrow_dataset()).order("id").project("body").fetchall()
    return [body.decode() for (body,) in rows]


def test_messages_are_rows_and_each_is_there_once(app: Dsn, lake: LakeSettings) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, lake=lake)
    send_numbers(app, 5, 6)
    forward(app, chunk_rows=3, lake=lake)
    assert texts(lake) == [str(number) for number in range(7)]
    assert compare(app, lake).same


def test_a_chunk_that_comes_again_is_stored_once_and_an_old_owner_is_fenced(
    lake: LakeSettings,
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    zombie = forwarder.chunk(sent)
    assert store(lake, forwarder.chunk(sent[:4])) == (4, 0)
    assert store(lake, zombie) == (4, 4)
    old = forwarder.chunk(forwarder.messages(8))
    forwarder.epoch += 1
    newer = forwarder.chunk(forwarder.messages(4))
    with meanwhile(lambda: store(lake, newer)), pytest.raises(Fenced):
        store(lake, old)
    assert len(texts(lake)) == 12


def test_a_commit_that_comes_second_leaves_no_file(
    objects: ObjectStore, bucket: str, delta: Delta
) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(8)
    with meanwhile(lambda: store(delta, forwarder.chunk(sent[:5]))):
        assert store(delta, forwarder.chunk(sent)) == (3, 5)
    files = {key for key in objects.keys(bucket) if key.endswith(".parquet")}
    known = DeltaTable(delta.table, storage_options=delta.options).file_uris()
    assert files == {uri.removeprefix(f"s3://{bucket}/") for uri in known}


def test_marks_are_found_in_a_checkpoint(delta: Delta) -> None:
    forwarder = Forwarder()
    sent = forwarder.messages(4, shard=0)
    store(delta, forwarder.chunk(sent))
    DeltaTable(delta.table, storage_options=delta.options).create_checkpoint()
    assert store(delta, forwarder.chunk(sent)) == (0, 4)


def test_a_table_is_cared_for(delta: Delta) -> None:
    forwarder = Forwarder()
    for _ in range(2):
        store(delta, forwarder.chunk(forwarder.messages(1, shard=0)))
    done = optimize("lake", delta, keep_hours=1, dry_run=False)
    assert (done.files_before, done.files_after) == (2, 1)
    assert len(texts(delta)) == 2


def test_a_store_that_does_not_answer_is_unavailable_and_gets_the_messages_later(
    app: Dsn, objects: ObjectStore, bucket: str, delta: Delta
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, lake=delta)
    send_numbers(app, 1)
    with objects.down(bucket):
        assert problems(app, delta) == ["Unavailable"]
    let_time_pass(app)
    forward(app, chunk_rows=3, lake=delta)
    assert texts(delta) == ["0", "1"]


def test_a_store_is_waited_for_within_saf_s_bounds(objects: ObjectStore, bucket: str) -> None:
    """Its client would try again for three minutes."""
    options = {**objects.secrets}
    del options["max_retries"]
    lake = Delta(table=f"s3://{bucket}/lake", storage_options=options)
    lake = lake.bounded(Bounds(statement_seconds=1))
    with objects.down(bucket), pytest.raises(Unavailable, match="retry_timeout 1s"):
        lake.identity("lake")


def test_an_archive_has_what_left_a_log_and_each_message_once(
    app: Dsn, mom: Dsn, objects: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in objects.environment.items():
        monkeypatch.setenv(name, value)
    where = f"delta:s3://{bucket}/archive"

    def purge() -> set[str]:
        with connect(app) as connection:
            outcome = purge_broker(
                connection,
                retention_seconds=0,
                rotate_after_seconds=86400,
                archive=archive_at(where, app),
            )
        return {slot.state for slot in outcome.slots if slot.log == "outbox"}

    fill(app, "a", "b")
    may_go(app, mom)
    with app.connect(role="test") as reader:
        reader.execute("SELECT count(*) FROM saf.outbox")
        assert "locked" in purge()
    assert "purged" in purge()
    table = DeltaTable(f"s3://{bucket}/archive", storage_options=objects.options)
    found = table.to_pyarrow_table().to_pylist()
    assert sorted(row["body"] for row in found if row["log"] == "outbox") == [b"a", b"b"]


def test_a_micro_batch_is_appended_once(delta: Delta) -> None:
    """As the driver and the tasks of a query do; tests/spark/test_lake.py has a real one."""
    rows = pa.record_batch({"id": pa.array([1, 2], pa.int64())})
    query = MicroBatches(delta, ())
    for number in (0, 1):
        task = query.begin("query", number, rows.schema)
        assert task is not None
        (told,) = task.write([rows])
        assert query.commit("query", number, heard(zip(*told.to_pydict().values(), strict=True)))
        (told,) = task.write([rows])  # by an attempt that nobody needs
        assert not query.commit(
            "query", number, heard(zip(*told.to_pydict().values(), strict=True))
        )
        assert query.begin("query", number, rows.schema) is None
    table = DeltaTable(delta.table, storage_options=delta.options)
    assert sorted(table.to_pyarrow_table()["id"].to_pylist()) == [1, 1, 2, 2]
