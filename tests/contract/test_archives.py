"""An archive, a folder or a table, has all that left a log, and each message once."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from saf.database import Dsn
from saf.destinations.delta import Delta
from saf.destinations.kinds import archive_at, table_at
from saf.errors import Refused, Unavailable
from saf.failpoints import arm
from saf.log.ring import Contents
from saf.operating.maintenance import Outcome, purge_broker
from saf.operating.repair.set_back import raise_incarnation
from tests.archives import (
    DONE,
    FORMS,
    fill,
    in_log,
    may_go,
    next_slot,
    place,
    read_inbox,
    rows,
    texts,
)
from tests.pipeline import connect, forward
from tests.programs import configuration, saf
from tests.synced import synced

NO_STORE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "saf",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
}
LATE = """
INSERT INTO saf.outbox (id, to_service, key, body) OVERRIDING SYSTEM VALUE
VALUES (%s, 'billing', 'key 1', %s)
"""


@pytest.fixture(params=FORMS)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return place(request.param, tmp_path)


def purge(dsn: Dsn, where: str) -> Outcome:
    with connect(dsn) as connection:
        return purge_broker(
            connection,
            retention_seconds=0,
            rotate_after_seconds=86400,
            archive=archive_at(where, dsn),
        )


def states(outcome: Outcome) -> set[str]:
    return {slot.state for slot in outcome.slots if slot.log == "outbox"}


def send_late(app: Dsn, id_: int, text: str) -> None:
    """A message with an id that was drawn long ago."""
    with connect(app) as connection:
        connection.execute(LATE, [id_, text.encode()])
        connection.execute(DONE)


def test_a_table_holds_each_column_of_each_message_that_went(tmp_path: Path, mom: Dsn) -> None:
    where = place("table", tmp_path)
    sent = read_inbox(mom)
    with connect(mom) as connection:
        ((broker_id,),) = connection.execute("SELECT broker_id FROM saf.broker").fetchall()
    slots = [slot for slot in purge(mom, where).slots if slot.state == "purged"]
    assert [(one.messages, one.archive) for one in slots] == [(4, where)]
    archived = sorted(rows(where, "inbox"), key=lambda row: int(row["id"]))
    for row, was in zip(archived, sent, strict=True):
        assert (row.pop("log"), row.pop("slot"), row.pop("purge")) == ("inbox", 0, 1)
        row["headers"] = row["headers"] and json.loads(row["headers"])
        assert row.pop("broker_id") == str(broker_id)
        uuids = ("message_id", "to_broker", "conversation_id", "source")
        assert row == {**was, **{name: was[name] and str(was[name]) for name in uuids}}


def test_what_was_archived_and_stays_is_not_archived_again(app: Dsn, mom: Dsn, where: str) -> None:
    fill(app, "a", "b")
    may_go(app, mom)
    archive = archive_at(where, app)
    for _ in range(3):
        with app.connect(role="test") as reader, connect(app) as connection:

            def then_read(contents: Contents, reader: Any = reader) -> Any:
                done = archive(contents)
                reader.execute("SELECT count(*) FROM saf.outbox")
                return done

            outcome = purge_broker(
                connection, retention_seconds=0, rotate_after_seconds=86400, archive=then_read
            )
            assert "locked" in states(outcome)
        assert (texts(where), in_log(app)) == (["a", "b"], ["a", "b"])
    send_late(app, 1 << 19, "late")
    assert "purged" in states(purge(app, where))
    assert (texts(where), in_log(app)) == (["a", "b", "late"], [])


def test_what_a_purge_takes_is_durable_in_an_archive_that_was_just_made(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    fill(app, "a")
    may_go(app, mom)
    with synced() as found:
        purge(app, place("table", tmp_path / "one"))
    archive = tmp_path / "one" / "archive"
    versions = {*archive.glob("_delta_log/*.json")}
    assert len(versions) == 2
    assert {tmp_path, archive.parent, archive, archive / "_delta_log", *versions} <= found
    fill(app, "b")
    may_go(app, mom)
    with synced() as found:
        purge(app, place("folder", tmp_path / "two"))
    (file,) = (tmp_path / "two").rglob("*.parquet")
    assert {tmp_path, tmp_path / "two", file.parent.parent, file.parent} <= found


@pytest.mark.parametrize("point", ["archive_written", "archived"])
def test_a_purge_that_is_killed_neither_loses_nor_doubles_a_message(
    tmp_path: Path, app: Dsn, mom: Dsn, where: str, point: str
) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill(app, "a", "b", "c")
    may_go(app, mom)
    said = ("purge", "--retention", "0", "--archive", where, "--json")
    for text in ("late", "later"):
        killed = saf(*said, cwd=tmp_path, env={"SAF_FAILPOINT": point})
        assert killed.returncode == -signal.SIGKILL
        assert {*texts(where)} <= {*in_log(app)}
        send_late(app, 100 + len(text), text)
    done = saf(*said, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (texts(where), in_log(app)) == (["a", "b", "c", "late", "later"], [])


@pytest.mark.full
def test_slots_of_many_turns_and_what_is_inserted_late_are_there_once(
    app: Dsn, mom: Dsn, where: str
) -> None:
    sent = []
    for turn in range(10):
        names = [f"{turn} {number}" for number in range(3)]
        fill(app, *names)
        may_go(app, mom)
        send_late(app, turn * (1 << 20) + 99, f"{turn} late")
        sent += [*names, f"{turn} late"]
        assert "purged" in states(purge(app, where))
        send_late(app, turn * (1 << 20) + 100, f"{turn} after")
        sent.append(f"{turn} after")
    assert "purged" in states(purge(app, where))
    assert sorted(texts(where) + in_log(app)) == sorted(sent)
    assert len(in_log(app)) <= 1


def test_of_two_that_archive_a_slot_at_the_same_time_one_does(
    app: Dsn, mom: Dsn, where: str
) -> None:
    """Such as a purge whose connection broke, so that another one took its turn."""
    fill(app, "before")
    may_go(app, mom)
    purge(app, where)
    fill(app, "a", "b", "c")
    may_go(app, mom)
    at, go_on = threading.Event(), threading.Event()
    found: list[object] = []

    def wait() -> None:
        at.set()
        go_on.wait(60)

    def late(contents: Contents) -> Any:
        arm("archive_written", wait)
        thread = threading.Thread(target=lambda: found.append(archive_at(where, app)(contents)))
        thread.start()
        assert at.wait(60)
        arm("")
        try:
            return archive_at(where, app)(contents)
        finally:
            go_on.set()
            thread.join()

    with connect(app) as connection, one_at_a_time(where):
        outcome = purge_broker(
            connection, retention_seconds=0, rotate_after_seconds=86400, archive=late
        )
        assert "purged" in states(outcome)
    assert len(found) == 1
    assert texts(where) == ["a", "b", "before", "c"]
    purge(app, where)
    assert (texts(where), in_log(app)) == (["a", "b", "before", "c"], [])


def one_at_a_time(where: str) -> AbstractContextManager[object]:
    """A folder is written by one, and the other is refused; a table takes both."""
    if where.startswith("delta:"):
        return nullcontext()
    return pytest.raises(Unavailable, match="another purge is writing to it")


def test_brokers_share_an_archive(app: Dsn, mom: Dsn, where: str) -> None:
    fill(app, "a")
    may_go(app, mom)
    fill(mom, "b")
    with connect(mom) as connection:
        connection.execute(DONE)
    next_slot(mom)
    assert "purged" in states(purge(app, where))
    assert "purged" in states(purge(mom, where))
    assert texts(where) == ["a", "b"]


def test_a_log_that_is_written_anew_after_a_set_back_is_archived_beside(
    app: Dsn, mom: Dsn, where: str
) -> None:
    """Its ids are given again, to other messages."""
    fill(app, "a", "b")
    may_go(app, mom)
    assert "purged" in states(purge(app, where))
    with connect(app) as connection:
        connection.execute("SELECT setval('saf.outbox_id_seq', 1, false)")
        raise_incarnation(connection)
    fill(app, "other a")
    may_go(app, mom)
    assert "purged" in states(purge(app, where))
    assert texts(where) == ["a", "b", "other a"]


def test_a_table_has_few_files_and_any_reader_finds_its_rows(
    tmp_path: Path, app: Dsn, mom: Dsn
) -> None:
    where = place("table", tmp_path)
    fill(app, *(str(number) for number in range(100)))
    may_go(app, mom)
    purge(app, where)
    table = DeltaTable(tmp_path / "archive")
    assert len(table.file_uris()) == 1
    lake = table.to_pyarrow_dataset()
    found = duckdb.sql("SELECT count(*), max(id) FROM lake WHERE key = 'key 1' AND slot = 0")
    assert found is not None
    assert found.fetchall() == [(33, 98)]
    assert lake.count_rows() == 100


def test_forwarded_and_archived_messages_have_tables_of_their_own(tmp_path: Path, app: Dsn) -> None:
    lake = Delta(table=str(tmp_path / "lake"))
    (tmp_path / "lake").mkdir()
    fill(app, "a")
    assert not [one.error for one in forward(app, lake=lake) if one.error]
    next_slot(app)
    with pytest.raises(Refused, match=r"messages that are forwarded\. Name another table"):
        purge(app, f"delta:{tmp_path}/lake")
    assert in_log(app) == ["a"]
    where = place("table", tmp_path)
    purge(app, where)
    fill(app, "b")
    (error,) = {
        one.error for one in forward(app, lake=Delta(table=str(tmp_path / "archive"))) if one.error
    }
    assert error is not None
    assert "its table is an archive of logs" in error


def test_what_cannot_be_archived_stays(tmp_path: Path, app: Dsn, mom: Dsn) -> None:
    configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    fill(app, "a")
    may_go(app, mom)
    (tmp_path / "file").touch()
    for said, code, why in (
        (f"delta:{tmp_path}/file", 75, "File exists"),
        ("delta:s3://bucket/there", 75, "the archive 's3://bucket/there' is unavailable"),
        ("s3://bucket/there", 2, "neither a folder nor a table such as delta:s3://"),
        ("kafka:there", 2, "the kind 'kafka' takes no archive of a log"),
    ):
        done = saf("purge", "--retention", "0", "--archive", said, cwd=tmp_path, env=NO_STORE)
        assert "hunter2" not in done.stderr
        assert done.returncode == code, done.stderr
        assert why in " ".join(done.stderr.split())
    assert in_log(app) == ["a"]


def test_a_slot_that_cannot_be_archived_holds_up_no_other_one(app: Dsn, mom: Dsn) -> None:
    def archive(contents: Contents) -> str:
        if (contents.slot.log, contents.slot.number) == ("outbox", 0):
            raise Unavailable("the archive", "an earlier piece cannot be read")
        return "elsewhere"

    for text in ("a", "b"):
        fill(app, text)
        may_go(app, mom)
    with connect(app) as connection, pytest.raises(Unavailable, match="an earlier piece"):
        purge_broker(connection, retention_seconds=0, rotate_after_seconds=86400, archive=archive)
    assert in_log(app) == ["a"]


def test_the_place_says_what_an_archive_is() -> None:
    found = table_at("delta:s3://bucket/archive")
    assert isinstance(found, Delta)
    assert found.table == "s3://bucket/archive"
    assert table_at("/srv/archive") is None
    assert table_at("archive") is None
