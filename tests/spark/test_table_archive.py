"""A log and its archive are one table: no message twice, none missing, whatever a purge does."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.testing import assertDataFrameEqual

from saf.database import Dsn
from saf.destinations.kinds import archive_at
from saf.errors import ConfigurationError, PurgedMeanwhile, Refused, Unavailable
from saf.failpoints import arm
from saf.operating.maintenance import purge_broker
from saf.operating.repair.set_back import raise_incarnation
from saf.spark.table import archived
from tests.archives import DONE, FORMS, Reading, fill, in_log, may_go, next_slot, place, texts
from tests.dying import Crash, crash
from tests.pipeline import connect, send
from tests.spark import filters
from tests.spark.tables import Tables
from tests.tiers import sized

READ_SECONDS = sized(3, 30)


@pytest.fixture(params=FORMS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "archive").mkdir()
    return place(request.param, tmp_path)


@pytest.fixture
def tables(app: Dsn, mom: Dsn, tmp_path: Path) -> Tables:
    return Tables(tmp_path, mom, app=app)


def purge(app: Dsn, where: str) -> set[str]:
    with connect(app) as connection:
        outcome = purge_broker(
            connection,
            retention_seconds=0,
            rotate_after_seconds=86400,
            archive=archive_at(where, app),
        )
    return {slot.state for slot in outcome.slots if slot.log == "outbox"}


def planned(tables: Tables, where: str) -> Reading:
    """A read whose tasks have not run yet."""
    options = {"broker": "app", "config": str(tables.config), "log": "outbox", "archive": where}
    return Reading(options)


def test_what_has_left_the_log_is_read_with_the_same_columns_and_types(
    app: Dsn, tables: Tables, where: str
) -> None:
    filters.fill(app)
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (from_service, to_service, to_broker, headers, body, "
            "expires_at) VALUES ('shop', 'x', gen_random_uuid(), '{\"a\": [1], \"b\": null}', "
            "'\\xff', now())"
        )
        connection.execute(DONE)
    next_slot(app)
    before = tables().cache()
    count = before.count()
    assert "purged" in purge(app, where)
    fill(app, "new")
    after = tables(archive=where)
    assert tables().count() == 1
    assert after.schema == before.schema
    old = after.where("body <> CAST('new' AS binary)")
    assert old.count() == count
    assertDataFrameEqual(old, before, checkRowOrder=False)
    text = tables(schema="text string, message_id string, headers string", archive=where)
    assert text.where("text = 'new'").count() == 1
    before.unpersist()


def test_filters_let_the_same_messages_of_an_archive_pass(
    app: Dsn, tables: Tables, where: str
) -> None:
    filters.fill(app)
    with connect(app) as connection:
        connection.execute(DONE)
    next_slot(app)
    assert "purged" in purge(app, where)
    fill(app, "a", "b")
    columns = filters.COLUMNS
    everything = tables(schema=columns, archive=where).cache()

    @settings(
        max_examples=sized(8, 100),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        deadline=None,
    )
    @given(st.lists(filters.conditions(), min_size=1, max_size=3), st.booleans())
    def same(drawn: list[Column], either: bool) -> None:
        whole = drawn[0]
        for one in drawn[1:]:
            whole = whole | one if either else whole & one
        read = tables(schema=columns, partitions=3, archive=where).where(whole)
        expected = [row.id for row in everything.where(whole).orderBy("id").collect()]
        assert sorted(row.id for row in read.select("id").collect()) == expected

    try:
        same()
    finally:
        everything.unpersist()


def test_what_is_archived_and_has_not_left_the_log_is_read_once(
    app: Dsn, mom: Dsn, tables: Tables, where: str
) -> None:
    fill(app, "a", "b", "c")
    may_go(app, mom)
    for number in range(3):
        arm("archived", crash)
        try:
            with pytest.raises(Crash):
                purge(app, where)
        finally:
            arm("")
        sent = in_log(app)
        assert texts(where) == sent
        assert planned(tables, where).texts() == sent
        with connect(app) as connection:
            connection.execute(
                "INSERT INTO saf.outbox (id, to_service, body) OVERRIDING SYSTEM VALUE "
                "VALUES (%s, 'billing', %s)",
                [100 + number, f"late {number}".encode()],
            )
            connection.execute(DONE)
        assert planned(tables, where).texts() == sorted([*sent, f"late {number}"])
    everything = in_log(app)
    assert "purged" in purge(app, where)
    assert in_log(app) == []
    assert planned(tables, where).texts() == everything


@pytest.mark.full
def test_a_slot_that_fills_again_is_read_beside_what_left_it(
    app: Dsn, mom: Dsn, tables: Tables, where: str
) -> None:
    sent: list[str] = []
    for turn in range(10):
        sent += [f"{turn} {number}" for number in range(3)]
        fill(app, *sent[-3:])
        may_go(app, mom)
        assert planned(tables, where).texts() == sorted(sent)
        assert "purged" in purge(app, where)
    assert planned(tables, where).texts() == sorted(sent)


def test_a_purge_between_the_plan_and_its_tasks_is_noticed_and_an_archive_changes_nothing(
    app: Dsn, mom: Dsn, tables: Tables, where: str
) -> None:
    fill(app, "a", "b")
    may_go(app, mom)
    purge(app, where)
    fill(app, "c", "d")
    may_go(app, mom)
    one, other = planned(tables, where), planned(tables, where)
    arm("archived", crash)
    try:
        with pytest.raises(Crash):
            purge(app, where)
    finally:
        arm("")
    assert one.texts() == ["a", "b", "c", "d"]
    assert "purged" in purge(app, where)
    with pytest.raises(PurgedMeanwhile, match=r"load\(\) it again"):
        other.texts()
    assert planned(tables, where).texts() == ["a", "b", "c", "d"]


def test_a_purge_waits_while_a_read_is_planned(
    app: Dsn, mom: Dsn, tables: Tables, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(app, "a", "b")
    may_go(app, mom)
    states: set[str] = set()
    of_log = archived.Log.of

    def then_purge(*given: Any) -> archived.Log:
        found = of_log(*given)
        states.update(purge(app, where))
        return found

    monkeypatch.setattr(archived.Log, "of", then_purge)
    before = planned(tables, where)
    assert "locked" in states
    assert before.texts() == ["a", "b"]


def test_what_is_committed_after_the_plan_is_not_read_wherever_it_goes(
    app: Dsn, mom: Dsn, tables: Tables, where: str
) -> None:
    """The archive is looked at after the snapshot, and may have more than that shows."""
    fill(app, "a")
    may_go(app, mom)
    purge(app, where)
    before = planned(tables, where)
    fill(app, "b")
    may_go(app, mom)
    arm("archived", crash)
    try:
        with pytest.raises(Crash):
            purge(app, where)
    finally:
        arm("")
    assert before.texts() == ["a"]
    assert planned(tables, where).texts() == ["a", "b"]


@pytest.mark.full
def test_reads_beside_senders_and_purges_have_each_message_once_or_say_that_one_was_purged(
    app: Dsn, tables: Tables, where: str
) -> None:
    done = threading.Event()
    committed: list[str] = []
    failed: list[BaseException] = []

    def work() -> None:
        number = 0
        try:
            while not done.is_set():
                number += 1
                names = [f"{number} {one}" for one in range(3)]
                with connect(app) as connection, connection.transaction():
                    for name in names:
                        send(connection, name, key=name[-1])
                committed.extend(names)
                with connect(app) as connection:
                    connection.execute(DONE)
                next_slot(app)
                with suppress(Unavailable):
                    purge(app, where)
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    whole = 0
    timer = threading.Timer(READ_SECONDS, done.set)
    timer.start()
    while not done.is_set() or not whole:
        before = set(committed)
        try:
            found = planned(tables, where).texts() if before else []
        except PurgedMeanwhile:
            continue
        assert [name for name, count in Counter(found).items() if count > 1] == []
        assert before <= set(found)
        whole += bool(before)
        if done.is_set():
            break
    worker.join()
    assert not failed
    assert planned(tables, where).texts() == sorted(committed)


def test_an_archive_that_is_not_there_is_named_and_an_empty_one_is_empty(
    app: Dsn, tables: Tables, tmp_path: Path
) -> None:
    fill(app, "a")
    for form in FORMS:
        where = place(form, tmp_path / form)
        with pytest.raises(Unavailable, match=r"archive .*No such file"):
            planned(tables, where)
        (tmp_path / form / "archive").mkdir(parents=True)
        assert planned(tables, where).texts() == ["a"]


def test_a_file_that_somebody_removes_is_missed(
    app: Dsn, mom: Dsn, tables: Tables, where: str, tmp_path: Path
) -> None:
    fill(app, "a")
    may_go(app, mom)
    purge(app, where)
    before = planned(tables, where)
    (file,) = (tmp_path / "archive").rglob("*.parquet")
    file.unlink()
    with pytest.raises(Unavailable, match=r"archive .*\.parquet"):
        before.texts()


def test_a_broker_that_was_set_back_has_another_archive(
    app: Dsn, mom: Dsn, tables: Tables, where: str
) -> None:
    """What its archive has may be in its log again."""
    fill(app, "a")
    may_go(app, mom)
    purge(app, where)
    with connect(app) as connection:
        raise_incarnation(connection)
    refused = "was repaired after it was set back"
    with pytest.raises(ConfigurationError, match=refused):
        planned(tables, where)
    fill(app, "b")
    may_go(app, mom)
    purge(app, where)
    assert texts(where) == ["a", "b"]
    with pytest.raises(ConfigurationError, match=refused):
        planned(tables, where)
    with pytest.raises(Exception, match=refused):
        tables(archive=where).count()


def test_a_table_that_is_no_archive_is_refused(tables: Tables, tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    write_deltalake(tmp_path / "other", pa.table({"id": [1]}))
    alike = pa.table({"broker_id": ["x"], "log": ["outbox"], "id": [1]})
    write_deltalake(tmp_path / "alike", alike, partition_by=["broker_id", "log"])
    for name in ("other", "alike"):
        with pytest.raises(Refused, match="a table for something else"):
            planned(tables, f"delta:{tmp_path}/{name}")


@pytest.mark.parametrize("wrong", ["s3://bucket/archive", "kafka:archive", "delta:file:///x"])
def test_what_can_be_no_archive_is_said(tables: Tables, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="the option archive: "):
        planned(tables, wrong)


def test_streams_and_sinks_have_no_archive(tables: Tables, tmp_path: Path) -> None:
    given = {"broker": "app", "config": str(tables.config), "log": "outbox"}
    more = {**given, "archive": str(tmp_path), "subscription": "lake"}
    refused = "the option archive is only for batch reads: spark.read"
    stream = tables.spark.readStream.format("saf").options(**more).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match=refused):
        query.awaitTermination(60)
    rows = tables.spark.createDataFrame([("billing", b"x")], "service string, body binary")
    with pytest.raises(Exception, match=refused):
        rows.write.format("saf").options(**given, archive=str(tmp_path)).mode("append").save()


def test_a_task_shows_no_secret_of_an_archive(tables: Tables, tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    assert "archive" not in repr(planned(tables, str(tmp_path / "archive")).parts)
