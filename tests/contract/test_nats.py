"""A stream of a NATS server: exactly once, killed, cut off, set back, limited, compared."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from saf.database import Dsn
from saf.destinations.nats import Nats
from saf.destinations.nats.connection import Connection, Message, NoResponders, of, status
from saf.errors import Fenced, Refused, Rejected, Unavailable
from saf.operating.repair.reconcile import reconcile
from saf.setaside.lane import Kind
from saf.testing.forwarder import Forwarder, all_stored
from tests.nats_server import NatsServer, nats_server
from tests.pipeline import forward
from tests.queue_suite import WEEK, QueueSuite, ids, send_numbers, texts
from tests.waits import until


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def events(queue: NatsServer) -> Nats:
    return Nats(server=queue.address)


class TestNats(QueueSuite):
    """What every queue has to keep."""

    request = b"Nats-Batch-Commit"

    @pytest.fixture
    def queue(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    def at(self, port: int) -> Nats:
        return Nats(server=f"nats://127.0.0.1:{port}", step_rows=100)


STREAM: dict[str, Any] = {
    "name": "SAF",
    "subjects": ["saf.>", "saf-marks.SAF.>"],
    "allow_atomic": True,
    "allow_direct": True,
    "allow_msg_ttl": True,
    "allow_rollup_hdrs": True,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"allow_atomic": False}, "takes no batches. Set its allow_atomic"),
        ({"subjects": ["saf.>"]}, "does not take its marks, saf-marks.SAF.>. Add that"),
        ({"retention": "interest"}, "no marks. Let its retention be limits"),
        ({"max_age": 10**12, "allow_msg_ttl": False}, "by max_age. Set its allow_msg_ttl"),
        ({"max_bytes": 10**9}, "forgets the oldest, marks too, by max_bytes. Let its discard"),
        ({"max_msgs": 10}, "forgets the oldest, marks too, by max_msgs. Let its discard"),
    ],
)
def test_a_stream_that_would_lose_marks_is_refused_with_what_to_set(
    queue: NatsServer, events: Nats, changed: dict[str, Any], reason: str
) -> None:
    queue.ask("$JS.API.STREAM.CREATE.SAF", **(STREAM | changed))
    forwarder = Forwarder()
    with closing(events.open("events")) as destination, pytest.raises(Refused) as caught:
        destination.store(forwarder.chunk(forwarder.messages(1)), exactly_once=True)
    assert reason in str(caught.value)
    with pytest.raises(Refused):
        [*events.problems("events")]
    assert ids(queue) == []


def test_an_answer_of_the_server_itself_is_none_of_who_listens(
    events: Nats,
) -> None:
    connection = Connection("events", events)
    try:
        with pytest.raises(NoResponders):
            next(connection.answers("nobody.listens", b""))
        inbox = connection.inbox()
        connection.publish([Message("nobody.listens", reply=inbox)])
        answer = connection.receive()
        assert (answer.subject, status(answer), answer.data) == (inbox, "503", b"")
        with pytest.raises(NoResponders):
            of("nobody.listens", answer)
    finally:
        connection.close()


def test_a_connection_that_its_client_has_closed_without_a_word_is_noticed(events: Nats) -> None:
    connection = Connection("events", events)
    before = connection._client._status
    try:
        connection._client._status = connection._client.CLOSED
        begun = time.monotonic()
        with pytest.raises(ConnectionResetError):
            connection.receive()
        assert time.monotonic() - begun < events.bounds.statement_seconds / 2
    finally:
        connection._client._status = before  # so that it closes its socket
        connection.close()


def test_a_subject_that_the_stream_does_not_take_is_named(queue: NatsServer, events: Nats) -> None:
    subjects = ["saf.shipping", "saf-marks.SAF.>"]
    queue.ask("$JS.API.STREAM.CREATE.SAF", **(STREAM | {"subjects": subjects}))
    forwarder = Forwarder()
    with (
        closing(events.open("events")) as destination,
        pytest.raises(Refused, match=r"takes only saf\.shipping, .* and not saf\.billing"),
    ):
        destination.store(forwarder.chunk(forwarder.messages(1)), exactly_once=True)


@pytest.mark.parametrize("rollup", [True, False])
def test_marks_outlive_the_messages_that_the_stream_forgets_by_age(
    app: Dsn, queue: NatsServer, events: Nats, rollup: bool
) -> None:
    aged = {"max_age": 10**9, "duplicate_window": 10**8, "allow_rollup_hdrs": rollup}
    queue.ask("$JS.API.STREAM.CREATE.SAF", **(STREAM | aged))
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    until(lambda: texts(queue) == [])
    send_numbers(app, 5)
    done = forward(app, chunk_rows=3, events=events)
    assert [one.error for one in done if one.error] == []
    assert texts(queue) == ["5"]
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 6}, True)
    assert "5 messages were removed from its stream" in found.unread["events"]


def test_what_was_stored_twice_is_found(app: Dsn, queue: NatsServer, events: Nats) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    first = queue.messages()[0]
    said = {name: text for name, text in (first.headers or {}).items() if name.startswith("saf-")}
    with queue.connected() as connection:
        connection.request("saf.billing", first.data, said)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert found.counts == {"duplicate": 1}


def test_what_others_write_into_its_stream_is_passed_over(
    app: Dsn, queue: NatsServer, events: Nats
) -> None:
    send_numbers(app, *range(5))
    forward(app, chunk_rows=3, events=events)
    head = b"NATS/1.0\r\nno-text: \xff\r\n\r\n"
    with socket.create_connection(("127.0.0.1", queue.port)) as raw:
        raw.sendall(b'CONNECT {"headers": true, "verbose": false}\r\n')
        raw.sendall(b"HPUB saf.billing %d %d\r\n%b7\r\n" % (len(head), len(head) + 1, head))
    until(lambda: len(texts(queue)) == 6)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.same, found.unread) == (True, {})


def test_there_may_be_more_lanes_than_a_batch_has_room_for(queue: NatsServer, events: Nats) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(1_500)

    def chunk() -> Any:
        made = forwarder.chunk(rows, lane=Kind.RETRY)
        subjects = pa.array([f"{number}" for number in range(1_500)])
        place = made.rows.column_names.index("subject")
        return replace(made, rows=made.rows.set_column(place, "subject", subjects))

    zombie = chunk()
    with closing(events.open("events")) as destination:
        done = all_stored(destination.store(chunk(), exactly_once=True))
        assert (done.messages, done.dropped, len(done.marks)) == (1_500, 0, 1_500)
        done = all_stored(destination.store(chunk(), exactly_once=True))
        assert (done.messages, done.dropped) == (0, 1_500)
        forwarder.epoch += 1
        destination.store(chunk(), exactly_once=True)
        with pytest.raises(Fenced):
            destination.store(zombie, exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]
    assert len(events.known("events", forwarder.source, role="test").marks) == 1_504


def test_there_may_be_more_shards_than_a_batch_has_room_for(
    queue: NatsServer, events: Nats
) -> None:
    forwarder = Forwarder()
    rows = [forwarder.message(shard=number % 1_024) for number in range(2_000)]

    def chunk(epoch: int) -> Any:
        made = forwarder.chunk(rows)
        epochs = tuple((shard, epoch) for shard in range(1_024))
        return replace(made, batch=replace(made.batch, epochs=epochs))

    with closing(events.open("events")) as destination:
        destination.store(replace(chunk(1), rows=chunk(1).rows.slice(0, 3)), exactly_once=True)
        done = all_stored(destination.store(chunk(2), exactly_once=True))
        assert (done.messages, done.dropped) == (1_997, 3)
        with pytest.raises(Fenced):
            destination.store(chunk(1), exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]
    assert len(events.known("events", forwarder.source, role="test").epochs) == 1_024


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": b"x" * (1 << 16)}, "more than its server takes"),
        ({"headers": '{"a": "%s"}' % ("x" * 70_000)}, "its headers have 70,"),
        ({"headers": '{"a b": "x"}'}, "NATS cannot carry a header 'a b'"),
        ({"headers": '{"nats-msg-id": "x"}'}, "a server's command"),
    ],
    ids=["body", "headers", "name", "command"],
)
def test_what_the_server_does_not_take_is_rejected_before_anything_is_stored(
    tmp_path: Path, columns: dict[str, Any], reason: str
) -> None:
    size = str((1 << 16) if "body" in columns else (1 << 20))
    with nats_server(tmp_path / "nats", max_payload=size) as queue:
        events = Nats(server=queue.address, step_rows=1)
        forwarder = Forwarder()
        rows = [forwarder.message(), forwarder.message(**columns)]
        with closing(events.open("events")) as destination:
            with pytest.raises(Rejected, match=reason):
                destination.store(forwarder.chunk(rows), exactly_once=True)
            assert ids(queue) == []
            destination.store(forwarder.chunk(rows[:1]), exactly_once=True)
        assert ids(queue) == [rows[0]["message_id"]]


def test_a_server_with_too_many_batches_says_so_and_takes_them_later(tmp_path: Path) -> None:
    limits = "limits: { batch: { max_inflight_per_stream: 1 } }"
    jetstream = f'{{ store_dir: "{tmp_path}/data", {limits} }}'
    with nats_server(tmp_path / "nats", jetstream=jetstream) as queue:
        events = Nats(server=queue.address, step_rows=300)
        forwarder = Forwarder()
        rows = forwarder.messages(300)
        with closing(events.open("events")) as destination, queue.connected() as other:
            destination.connect()
            other.request("saf.x", b"", {"Nats-Batch-Id": "x", "Nats-Batch-Sequence": "1"})
            with pytest.raises(Unavailable, match="too many inflight"):
                destination.store(forwarder.chunk(rows), exactly_once=True)
            other.request("saf.x", b"", {"Nats-Batch-Id": "x", "Nats-Batch-Sequence": "9"})
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(queue) == [row["message_id"] for row in rows]
