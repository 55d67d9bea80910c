"""A folder of JSON lines as a destination: forwarded to, compared, set back and repaired."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pytest

from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.destinations import Capabilities, Compared
from saf.destinations.jsonl import Jsonl
from saf.destinations.settings import DestinationSettings
from saf.destinations.tables import uuid_hashes
from saf.errors import CannotReadBack, Refused, Unavailable
from saf.failpoints import arm
from saf.log import disk
from saf.operating.doctor import examine
from saf.operating.repair.reconcile import Outcome, reconcile
from saf.operating.repair.send_again import send_again
from saf.operating.repair.set_back import set_back
from saf.routing.routes import current_routes
from tests.destinations import route, send_to
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forward,
    forwarding_rules,
    let_time_pass,
    outlive_lease,
    send,
    stores,
)
from tests.synced import synced

WEEK = 7 * 86400.0


class Blind(Jsonl):
    """The same folder, as if it could not be read back, nor keep marks."""

    capabilities = Capabilities(largest_body=10)

    def reading(self, name: str) -> Any:
        return DestinationSettings.reading(self, name)


class Silent(Jsonl):
    """The same, with its marks, as if it could not be read back."""

    capabilities = Capabilities(exactly_once=True, fences=True)

    def reading(self, name: str) -> Any:
        return DestinationSettings.reading(self, name)


@pytest.fixture
def files(tmp_path: Path) -> Jsonl:
    (tmp_path / "files").mkdir()
    return Jsonl(folder=tmp_path / "files", lock_seconds=0.2)


def held(files: Jsonl) -> list[Mapping[str, Any]]:
    found = []
    for file in sorted(files.folder.glob("*/*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def texts(files: Jsonl) -> list[str]:
    return [line["body"] for line in held(files)]


def compare(app: Dsn, **destinations: DestinationSettings) -> Outcome:
    return reconcile("app", app, destinations, retention_seconds=WEEK)


def send_numbers(app: Dsn, *numbers: int) -> None:
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key="k")


def test_messages_are_lines_in_their_order_and_each_is_there_once(app: Dsn, files: Jsonl) -> None:
    send_numbers(app, *range(10))
    forward(app, chunk_rows=3, files=files)
    send_numbers(app, 10, 11)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == [str(number) for number in range(12)]
    names = [file.name for file in sorted(files.folder.glob("*/*.jsonl"))]
    assert names == [f"{number:012}.jsonl" for number in range(1, 6)]
    with connect(app) as connection:
        sent = fetch(connection, "SELECT message_id::text, shard FROM saf.outbox ORDER BY id")
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    assert [(line["message_id"], line["shard"]) for line in held(files)] == sent
    assert {line["source"] for line in held(files)} == {source}


def test_the_names_of_its_folders_are_durable_before_a_message_counts_as_stored(
    app: Dsn, files: Jsonl
) -> None:
    send_numbers(app, 0)
    with synced() as found:
        forward(app, files=files)
    (file,) = files.folder.glob("*/*.jsonl")
    assert {files.folder, files.folder / ".saf", file.parent} <= found
    shutil.rmtree(file.parent)  # by a reader, who has read it
    send_numbers(app, 1)
    with synced() as found:
        forward(app, files=files)
    assert {files.folder, file.parent} <= found


def test_what_is_made_durable_does_not_stay_open(tmp_path: Path) -> None:
    """A forwarder that runs for weeks would run out of descriptors."""
    before = len([*Path("/proc/self/fd").iterdir()])
    for number in range(20):
        folder = tmp_path / str(number) / "inner"
        disk.make_folder(folder)
        disk.write(folder / "file", b"x")
        disk.sync_file(folder / "file")
        disk.sync(folder)
    assert len([*Path("/proc/self/fd").iterdir()]) < before + 20, "other threads may open a few"


class Died(BaseException):
    """The process dies here."""


def die() -> None:
    raise Died


@pytest.mark.parametrize(("point", "there"), [("mom_insert", []), ("mom_commit", ["0", "1", "2"])])
def test_what_a_killed_writer_has_not_named_is_named_by_the_next_one(
    app: Dsn, files: Jsonl, point: str, there: list[str]
) -> None:
    """And not again where a reader has deleted what it has read."""
    send_numbers(app, *range(5))
    arm(point, die)
    try:
        with pytest.raises(Died):
            forward(app, chunk_rows=3, files=files)
    finally:
        arm("")
    assert texts(files) == []  # nobody sees it yet
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
    with files.reading("files") as reading:
        what = Compared(source=source, shards=64, since=None, until=None, topics=[])
        assert sum(one.stored for one in reading.figures(what)) == len(there)
    outlive_lease(app)
    with Cycle(app, forwarding_rules(chunk_rows=10, files=files)) as cycle:  # these, and two more
        cycle.run()
    assert texts(files) == ["0", "1", "2", "3", "4"]
    for file in files.folder.glob("*/*.jsonl"):
        file.unlink()
    send_numbers(app, 5)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == ["5"]


def test_it_is_compared_like_an_inbox(app: Dsn, files: Jsonl) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, files=files)
    outcome = compare(app, files=files)
    assert outcome.same
    assert all(shard.same for shard in outcome.shards)
    (file,) = files.folder.glob("*/*2.jsonl")
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(first * 2)
    outcome = compare(app, files=files)
    assert outcome.counts == {"lost": 1, "duplicate": 1}
    assert {str(one.message_id) for one in outcome.named} == {
        json.loads(line)["message_id"] for line in (first, second)
    }


def test_its_figures_are_those_that_postgresql_comes_to(app: Dsn) -> None:
    ids = [UUID(int=0), UUID(int=2**128 - 1), *(uuid4() for _ in range(100))]
    with connect(app) as connection:
        query = "SELECT uuid_hash_extended(id, 0) FROM unnest(%(ids)s::uuid[]) AS id"
        said = [hashed for (hashed,) in fetch(connection, query, {"ids": ids})]
    column = pa.chunked_array([pa.array([one.bytes for one in ids], pa.binary(16))])
    assert uuid_hashes(column).tolist() == said


def let_lose_two(app: Dsn, files: Jsonl, tmp_path: Path) -> None:
    """Set a folder back by two of four messages, and send a fifth."""
    send_numbers(app, 0, 1)
    forward(app, chunk_rows=3, files=files)
    backup = shutil.copytree(files.folder, tmp_path / "backup")
    send_numbers(app, 2, 3)
    forward(app, chunk_rows=3, files=files)
    shutil.rmtree(files.folder)
    backup.rename(files.folder)
    send_numbers(app, 4)


def test_a_folder_that_was_set_back_is_refused_and_gets_again_what_it_has_lost(
    app: Dsn, files: Jsonl, tmp_path: Path
) -> None:
    let_lose_two(app, files, tmp_path)
    assert [
        one.error_kind for one in forward(app, chunk_rows=3, files=files) if one.error_kind
    ] == ["Behind"]
    assert texts(files) == ["0", "1"]
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id FROM saf.broker")
        known = files.known("files", source, role="test")
        assert set_back(connection, "files", known).behind
    sent = send_again(
        "app", app, {"files": files}, lambda one: current_routes(one, "files"),
        retention_seconds=WEEK,
    )  # fmt: skip
    assert sent is not None
    assert {name: len(ids) for name, ids in sent.by_destination.items()} == {"files": 2}
    let_time_pass(app)
    forward(app, chunk_rows=3, files=files)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == [str(number) for number in range(5)]
    assert compare(app, files=files).same


def test_messages_behind_a_replay_that_became_due_meanwhile_do_not_count_as_failed(
    app: Dsn, files: Jsonl, tmp_path: Path
) -> None:
    let_lose_two(app, files, tmp_path)
    forward(app, chunk_rows=3, files=files)
    send_again(
        "app", app, {"files": files}, lambda one: current_routes(one, "files"),
        retention_seconds=WEEK,
    )  # fmt: skip
    later = "now() + CASE kind WHEN 'replay' THEN interval '1 hour' ELSE interval '0' END"
    with (
        connect(app) as connection,
        Cycle(app, forwarding_rules("exactly_once", 3, files=files)) as cycle,
    ):
        connection.execute(f"UPDATE saf.backoff SET next_attempt_at = {later}")
        cycle.open()
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        cycle.close(cycle.deliver())
        attempts = fetch(connection, "SELECT kind, attempts FROM saf.backoff ORDER BY kind")
    assert (texts(files), attempts) == (["0", "1"], [("main", 1), ("replay", 0)])
    forward(app, chunk_rows=3, files=files)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == [str(number) for number in range(5)]


def test_an_empty_folder_is_compared_and_repaired_like_any_other(app: Dsn, files: Jsonl) -> None:
    """Nothing was forwarded there yet, and who only asks writes nothing."""
    send_numbers(app, 0)
    outcome = compare(app, files=files)
    assert (outcome.same, outcome.unread) == (True, {})
    assert send_again("app", app, {"files": files}, current_routes, retention_seconds=WEEK) is None
    assert [*files.problems("files")] == []
    assert [*files.folder.iterdir()] == []


def test_a_folder_whose_disk_is_not_mounted_is_not_taken_for_a_new_one(
    app: Dsn, files: Jsonl, tmp_path: Path
) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, files=files)
    files.folder.rename(tmp_path / "disk")
    files.folder.mkdir()
    send_numbers(app, 1)
    assert [
        one.error_kind for one in forward(app, chunk_rows=3, files=files) if one.error_kind
    ] == ["Behind"]
    shutil.rmtree(files.folder)
    (tmp_path / "disk").rename(files.folder)
    let_time_pass(app)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == ["0", "1"]
    elsewhere = Jsonl(folder=files.folder.rename(tmp_path / "elsewhere"))
    send_numbers(app, 2)
    forward(app, chunk_rows=3, files=elsewhere)
    assert texts(elsewhere) == ["0", "1", "2"]


def test_what_readers_have_deleted_is_not_taken_for_lost(app: Dsn, mom: Dsn, files: Jsonl) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "mom")
        route(connection, "billing", "files")
        send_to(connection, "shipping", "1")
        send_to(connection, "billing", "2")
    forward(app, chunk_rows=3, mom=mom, files=files)
    (file,) = files.folder.glob("*/*.jsonl")
    file.unlink()
    outcome = compare(app, files=files, **stores(mom=mom))
    assert (outcome.counts, outcome.same) == ({"not_compared": 1}, True)
    assert "1 of its files are gone" in outcome.unread["files"]
    with connect(mom) as store:
        store.execute("DELETE FROM saf.inbox")
    outcome = compare(app, files=files, **stores(mom=mom))
    assert outcome.counts == {"not_compared": 1, "lost": 1}
    assert [one.service for one in outcome.named] == ["shipping"]
    sent = send_again(
        "app", app, {"files": files, **stores(mom=mom)}, current_routes,
        retention_seconds=WEEK, only_if_set_back=False,
    )  # fmt: skip
    assert sent is not None
    assert {name: len(ids) for name, ids in sent.by_destination.items()} == {"mom": 1}
    assert [*sent.unread] == ["files"]
    send_numbers(app, 3)
    forward(app, chunk_rows=3, mom=mom, files=files)
    assert texts(files) == ["3"]


def test_who_holds_the_lock_is_waited_for_and_not_for_ever(app: Dsn, files: Jsonl) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, files=files)
    send_numbers(app, 1)
    (file,) = (files.folder / ".saf").glob("*.lock")
    with held_by_another(file):
        (error,) = [one.error for one in forward(app, chunk_rows=3, files=files) if one.error]
        assert "another forwarder holds its lock" in error
    let_time_pass(app)
    forward(app, chunk_rows=3, files=files)
    assert texts(files) == ["0", "1"]


@contextmanager
def held_by_another(file: Path) -> Iterator[None]:
    with file.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_route_that_asks_for_more_than_the_kind_can_lets_its_messages_wait(
    app: Dsn, mom: Dsn, files: Jsonl
) -> None:
    blind = Blind(folder=files.folder)
    assert blind.quality == "at_least_once"
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.route (service, destination, quality) "
            "VALUES ('billing', 'files', 'exactly_once'), (NULL, 'mom', NULL)"
        )
        send_to(connection, "billing", "1")
        send_to(connection, "shipping", "2")
        forward(app, chunk_rows=3, mom=mom, files=blind)
        assert (texts(files), bodies(mom)) == ([], ["2"])
        ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
        assert "cannot store exactly once" in error
        config = Settings(
            brokers={"app": Broker(dsn=app)}, destinations={"files": blind, **stores(mom=mom)}
        )
        assert [
            (one.check, one.severity)
            for one in examine(config)
            if "cannot store exactly once" in one.what
        ] == [("parked", "error"), ("routes", "error")]
        connection.execute("UPDATE saf.route SET quality = NULL")
        connection.execute("UPDATE saf.parked SET quality = NULL")
        let_time_pass(app)
        forward(app, chunk_rows=3, mom=mom, files=blind)
    assert texts(files) == ["1"]


def test_a_destination_that_cannot_say_which_it_is_makes_no_dead_letters(
    app: Dsn, files: Jsonl
) -> None:
    identity = files.folder / "saf.json"
    identity.write_text("{")
    with connect(app) as connection:
        for body in ("0", "1", "2"):
            send(connection, body, key="k")
        with suppress(Unavailable):
            forward(app, chunk_rows=3, files=files)
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]
        assert texts(files) == []
        identity.unlink()
        let_time_pass(app)
        forward(app, chunk_rows=3, files=files)
    assert texts(files) == ["0", "1", "2"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"number": 1, "places": [[1]]}', "null"])
@pytest.mark.parametrize("which", ["saf.json", ".saf/SOURCE.json"])
def test_what_is_wrong_with_its_own_files_makes_no_dead_letters(
    app: Dsn, files: Jsonl, which: str, content: str
) -> None:
    send_numbers(app, 0, 1)
    forward(app, files=files)
    with connect(app) as connection:
        ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
    file = files.folder / which.replace("SOURCE", source)
    before = file.read_text()
    file.write_text(content)
    send_numbers(app, 2, 3)
    with Cycle(app, forwarding_rules("exactly_once", 1000, files=files)) as cycle:
        (error,) = [one.error or "" for one in cycle.run() if one.error]
    assert f"{file} cannot be read" in error
    with pytest.raises(Refused, match="Bring the file back"):
        files.known("files", UUID(source), role="test")
    file.write_text(before)
    let_time_pass(app)
    forward(app, files=files)
    assert texts(files) == ["0", "1", "2", "3"]
    with connect(app) as connection:
        assert fetch(connection, "SELECT count(*) FROM saf.dead_letter") == [(0,)]


def test_a_body_larger_than_a_kind_takes_is_a_dead_letter(app: Dsn, files: Jsonl) -> None:
    blind = Blind(folder=files.folder)
    with connect(app) as connection:
        for body in ("0", "12345678901", "2"):
            send(connection, body, key="k")
        forward(app, chunk_rows=3, files=blind)
        dead = fetch(connection, "SELECT reason, error FROM saf.dead_letter")
    assert texts(files) == ["0", "2"]
    assert dead == [
        ("rejected", "destination 'files' rejects messages: a body has more than 10 bytes")
    ]


def test_what_a_kind_cannot_say_is_said_of_it_and_the_others_are_compared(
    app: Dsn, mom: Dsn, files: Jsonl
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "mom")
        route(connection, "billing", "files")
        send_to(connection, "shipping", "1")
        send_to(connection, "billing", "2")
    blind = Blind(folder=files.folder)
    forward(app, chunk_rows=3, mom=mom, files=blind)
    outcome = compare(app, files=blind, **stores(mom=mom))
    assert outcome.unread == {"files": "its kind, 'jsonl', cannot be read back"}
    assert (outcome.counts, outcome.same) == ({"not_compared": 1}, True)


def test_one_that_was_set_back_and_cannot_be_read_is_named_and_the_others_repaired(
    app: Dsn, files: Jsonl, tmp_path: Path
) -> None:
    other = Jsonl(folder=tmp_path / "other")
    other.folder.mkdir()
    with connect(app) as connection:
        route(connection, "shipping", "other")
        route(connection, "billing", "files")
        for number in range(3):
            send_to(connection, "shipping", f"s{number}")
            send_to(connection, "billing", f"b{number}")
    forward(app, chunk_rows=3, files=files, other=other)
    for one in (files, other):  # emptied
        shutil.rmtree(one.folder)
        one.folder.mkdir()
    there = {"files": Silent(folder=files.folder), "other": other}
    with pytest.raises(CannotReadBack, match=r"'files' is not compared: .* It was set back"):
        send_again("app", app, there, current_routes, retention_seconds=WEEK)
    let_time_pass(app)
    forward(app, chunk_rows=3, files=files, other=other)
    assert (texts(files), texts(other)) == ([], ["s0", "s1", "s2"])


def test_two_names_of_one_folder_are_refused(app: Dsn, files: Jsonl) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "one")
        route(connection, "billing", "two")
        send_to(connection, "shipping", "1")
        send_to(connection, "billing", "2")
    errors = [one.error for one in forward(app, chunk_rows=3, one=files, two=files) if one.error]
    assert any("'one' and 'two' are the same" in error for error in errors), errors


def test_a_source_that_was_set_back_is_refused(app: Dsn, files: Jsonl) -> None:
    send_numbers(app, 0)
    forward(app, chunk_rows=3, files=files)
    with connect(app) as connection:
        forget(connection)
    send_numbers(app, 1)
    assert [
        one.error_kind for one in forward(app, chunk_rows=3, files=files) if one.error_kind
    ] == ["Ahead"]
    assert texts(files) == ["0"]


def forget(connection: psycopg.Connection[Any]) -> None:
    """As a backup of before the last run would have it."""
    connection.execute("DELETE FROM saf.acknowledged")
    connection.execute("UPDATE saf.cursor SET batch = 0, position = 0, opened_at = NULL")
