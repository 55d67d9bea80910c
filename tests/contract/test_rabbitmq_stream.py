"""Streams of a RabbitMQ server: exactly once, killed, cut off, set back, trimmed, compared."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cloudevents.core.bindings.amqp import AMQPMessage, from_binary_event
from cloudevents.core.formats.json import JSONFormat

from saf.database import Dsn, fetch
from saf.destinations.marks import AGAIN, MAIN, ONCE
from saf.destinations.rabbitmq_stream import RabbitmqStream, journal
from saf.destinations.rabbitmq_stream.connection import Command, pairs, text
from saf.destinations.rabbitmq_stream.journal import BATCH_BITS, publishing_ids
from saf.destinations.rabbitmq_stream.streams import Publishers
from saf.errors import Ahead, Rejected, Unavailable
from saf.operating.repair.reconcile import reconcile
from saf.setaside.lane import Kind
from saf.testing.forwarder import Forwarder, all_stored
from tests.destinations import send_to
from tests.lossy import Lossy
from tests.pipeline import connect, forward
from tests.queue_suite import WEEK, OnceSuite, ids, send_numbers
from tests.rabbitmq_server import RabbitmqServer
from tests.waits import until

pytestmark = pytest.mark.slow  # its server takes seconds to start


@pytest.fixture
def queue(rabbitmq: RabbitmqServer) -> RabbitmqServer:
    return rabbitmq


@pytest.fixture
def events(queue: RabbitmqServer) -> RabbitmqStream:
    return RabbitmqStream(server=queue.address)


@pytest.mark.full
class TestRabbitmqStream(OnceSuite):
    """What every queue has to keep that stores exactly once."""

    request = b"saf-created-at"
    parts = range(1, 301)

    @pytest.fixture
    def queue(self, rabbitmq: RabbitmqServer) -> RabbitmqServer:
        return rabbitmq

    def at(self, port: int) -> RabbitmqStream:
        return RabbitmqStream(server=f"rabbitmq-stream://127.0.0.1:{port}", step_rows=100)


def test_of_two_that_come_first_at_the_same_time_both_are_there_once(
    events: RabbitmqStream, queue: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old owner and a new one, neither of which has found anything, cut their chunks anew."""
    forwarder = Forwarder()
    rows = forwarder.messages(400)
    old = forwarder.chunk(rows)
    forwarder.epoch += 1
    new = [forwarder.chunk(rows[:150]), forwarder.chunk(rows)]
    both, come = threading.Barrier(2), [1, 2]
    begin = journal.Journal.begin

    def together(*given: Any) -> None:
        if come and come.pop():
            both.wait(timeout=60)  # each has read that there is nothing
        begin(*given)

    def store_old() -> None:
        with closing(events.open("events")) as destination:
            destination.store(old, exactly_once=True)

    with closing(events.open("events")) as destination:
        destination.connect()
        monkeypatch.setattr(journal.Journal, "begin", together)
        other = threading.Thread(target=store_old)
        other.start()
        for chunk in new:
            destination.store(chunk, exactly_once=True)
        other.join(timeout=60)
    assert come == []
    assert sorted(ids(queue)) == sorted(row["message_id"] for row in rows)
    for shard in range(4):
        mine = [row["message_id"] for row in rows if row["shard"] == shard]
        assert [one for one in ids(queue) if one in mine] == mine


def test_what_a_killed_process_has_stored_without_its_mark_is_not_stored_again(
    events: RabbitmqStream, queue: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(40)
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "move", _die)
        with closing(events.open("events")) as destination, pytest.raises(Unavailable):
            destination.store(forwarder.chunk(rows[:30]), exactly_once=True)
    assert len(ids(queue)) == 30
    with closing(events.open("events")) as destination:
        done = all_stored(destination.store(forwarder.chunk(rows), exactly_once=True))
    assert (done.messages, done.dropped) == (10, 30)
    assert ids(queue) == [row["message_id"] for row in rows]


def test_a_batch_of_an_earlier_life_of_its_source_is_noticed_even_without_its_mark(
    events: RabbitmqStream, queue: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was restored from a backup, and gives the same numbers to other messages."""
    forwarder = Forwarder()
    rows = forwarder.messages(4)
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "move", _die)
        with closing(events.open("events")) as destination, pytest.raises(Unavailable):
            destination.store(forwarder.chunk(rows), exactly_once=True)
    forwarder.next_batch()
    forwarder.number -= 1
    with closing(events.open("events")) as destination, pytest.raises(Ahead):
        destination.store(forwarder.chunk(forwarder.messages(4)), exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]


def test_a_batch_that_was_begun_and_never_sent_is_no_mark(
    events: RabbitmqStream, queue: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(4)
    with monkeypatch.context() as patched:
        patched.setattr(Publishers, "publish", _die)
        with closing(events.open("events")) as destination, pytest.raises(Unavailable):
            destination.store(forwarder.chunk(rows), exactly_once=True)
    forwarder.next_batch()
    with closing(events.open("events")) as destination:
        destination.store(forwarder.chunk(rows), exactly_once=True)
    assert ids(queue) == [row["message_id"] for row in rows]


def _die(*_: Any) -> int:
    raise ConnectionResetError("killed here")


def test_later_batches_come_later_whatever_their_rows_and_however_many_there_are(
    events: RabbitmqStream, queue: RabbitmqServer
) -> None:
    """The publisher's name goes on to its next generation."""
    forwarder = Forwarder()
    late, later = forwarder.messages(4), forwarder.messages(4)
    forwarder.number = (1 << BATCH_BITS) - 1
    sent = []
    with closing(events.open("events")) as destination:
        for rows in (forwarder.messages(4), late, forwarder.messages(4), later):
            for _ in range(2):
                forwarder.learn(destination.store(forwarder.chunk(rows), exactly_once=True))
            sent += rows
            forwarder.next_batch()
    assert ids(queue) == [row["message_id"] for row in sent]
    largest = publishing_ids(np.array([(1 << BATCH_BITS) - 1]), np.array([(1 << 48) - 1]))
    assert 0 < largest[0] < 1 << 63


def test_there_may_be_more_lanes_than_a_connection_has_publishers(
    events: RabbitmqStream, queue: RabbitmqServer
) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(700)

    def chunk() -> Any:
        made = forwarder.chunk(rows, lane=Kind.RETRY)
        subjects = pa.array([f"{number}" for number in range(700)])
        place = made.rows.column_names.index("subject")
        return replace(made, rows=made.rows.set_column(place, "subject", subjects))

    with closing(events.open("events")) as destination:
        for count in (700, 0):
            done = all_stored(destination.store(chunk(), exactly_once=True))
            assert (done.messages, done.dropped, len(done.marks)) == (count, 700 - count, 700)
    assert sorted(ids(queue)) == sorted(row["message_id"] for row in rows)
    assert len(events.known("events", forwarder.source, role="test").marks) == 704


def test_qualities_of_service_take_turns_on_one_connection(
    events: RabbitmqStream, queue: RabbitmqServer
) -> None:
    forwarder = Forwarder()
    sent = []
    with closing(events.open("events")) as destination:
        for number in range(6):
            rows = forwarder.messages(8)
            rows += forwarder.messages(8, to_service=f"other{number}")
            for once, quality in ((True, MAIN), (False, AGAIN), (False, ONCE)):
                chunk = forwarder.chunk(rows, prefix=quality)
                forwarder.learn(destination.store(chunk, exactly_once=once))
                sent += rows[:8]
            forwarder.next_batch()
    assert ids(queue) == [row["message_id"] for row in sent]


def test_the_journal_is_read_from_where_all_was_written_anew(
    events: RabbitmqStream, queue: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "ENOUGH_BYTES", 2_000)
    forwarder = Forwarder()
    read: list[int] = []
    learn = journal.Journal._learn

    def counted(self: journal.Journal, entry: bytes) -> str | None:
        read[-1] += len(entry)
        return learn(self, entry)

    monkeypatch.setattr(journal.Journal, "_learn", counted)
    for _ in range(30):
        read.append(0)
        with closing(events.open("events")) as destination:
            rows = forwarder.messages(4)
            forwarder.learn(destination.store(forwarder.chunk(rows), exactly_once=True))
            forwarder.next_batch()
        with queue.connected() as one:
            there = journal.Journal(
                connection=one, stream=f"saf-marks.{forwarder.source}", source=forwarder.source
            )
            read.append(0)
            there.follow()
            assert there.marks([*forwarder.known])[1] == forwarder.known
    assert max(read) < 6_000


def test_a_message_that_the_server_does_not_take_is_rejected_before_anything_is_stored(
    events: RabbitmqStream, queue: RabbitmqServer
) -> None:
    forwarder = Forwarder()
    rows = [forwarder.message(), forwarder.message(to_service="x" * 300)]
    with closing(events.open("events")) as destination:
        with pytest.raises(Rejected, match="its stream's name has more than 255 bytes"):
            destination.store(forwarder.chunk(rows), exactly_once=True)
        link = destination._link  # type: ignore[attr-defined]
        link.connection.largest = 1 << 16
        rows[1] = forwarder.message(body=b"x" * (1 << 16))
        with pytest.raises(Rejected, match=r"more than its server's stream.frame_max \(65,536\)"):
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert ids(queue) == []
        destination.store(forwarder.chunk(rows[:1]), exactly_once=True)
    assert ids(queue) == [rows[0]["message_id"]]


def test_what_the_stream_has_removed_is_not_taken_for_lost(
    app: Dsn, queue: RabbitmqServer, events: RabbitmqStream
) -> None:
    limits = {"max-length-bytes": "20000", "stream-max-segment-size-bytes": "10000"}
    with queue.connected() as one:
        one.ask(Command.CREATE, text("billing") + pairs(limits))
    for _ in range(4):
        send_numbers(app, *range(50))
        forward(app, chunk_rows=50, events=events)
    until(lambda: len(ids(queue)) < 200)
    found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
    assert (found.counts, found.same) == ({"not_compared": 200}, True)
    assert "messages of its stream billing are gone" in found.unread["events"]


def test_as_cloud_events_they_are_read_by_the_library_of_cloud_events(
    app: Dsn, queue: RabbitmqServer
) -> None:
    with connect(app) as connection:
        send_to(connection, "billing", '{"n": 1}', message_type="paid",
                headers={"content-type": "application/json"})  # fmt: skip
        ((source, message_id),) = fetch(
            connection, "SELECT b.broker_id, o.message_id FROM saf.broker b, saf.outbox o"
        )
    forward(app, chunk_rows=3, events=RabbitmqStream(server=queue.address, format="cloudevents"))
    ((headers, body),) = queue.messages("billing")
    given = AMQPMessage(
        properties={"content-type": headers["content-type"]},
        application_properties=dict(headers),
        application_data=body,
    )
    event = from_binary_event(given, JSONFormat())
    assert (event.get_id(), event.get_type()) == (str(message_id), "paid")
    assert event.get_source() == f"urn:uuid:{source}"
    assert event.get_data() == {"n": 1}
    assert event.get_extension("safservice") == "billing"


def test_an_answer_that_was_lost_on_the_way_costs_nothing(queue: RabbitmqServer) -> None:
    forwarder = Forwarder()
    rows = forwarder.messages(300)
    with Lossy(queue.port) as proxy:
        at = f"rabbitmq-stream://127.0.0.1:{proxy.port}"
        with closing(RabbitmqStream(server=at).open("events")) as destination:
            for request in (b"read", b"begun", b"saf-created-at", b"done"):
                proxy.lose_answers_to(request)
                with pytest.raises(Unavailable):
                    destination.store(forwarder.chunk(rows), exactly_once=True)
                proxy.lose_answers_to(b"")
            destination.store(forwarder.chunk(rows), exactly_once=True)
        assert proxy.lost == 4
    assert ids(queue) == [row["message_id"] for row in rows]
