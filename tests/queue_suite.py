"""What every queue has to keep as a destination, with a real server that is killed.

A subclass names its kind's server and settings. `saf.testing.conformance` has what any kind of
destination has to keep; this is what needs a server that a test can kill, or cut off.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol
from uuid import UUID

import pytest

from saf import begin_dialog, begin_monolog
from saf.config import Broker, Settings
from saf.database import Dsn, fetch
from saf.destinations import Destination
from saf.destinations.marks import MAIN, ONCE
from saf.destinations.settings import DestinationSettings
from saf.destinations.stepwise import Stepwise
from saf.errors import Fenced, Unavailable
from saf.operating.doctor import examine
from saf.operating.repair.reconcile import reconcile
from saf.setaside.lane import Kind
from saf.testing.forwarder import Forwarder, all_stored, start
from tests.destinations import know, route, send_to
from tests.lossy import Lossy
from tests.pipeline import bodies, connect, forward, let_time_pass, send, stores
from tests.tiers import sized
from tests.waits import until

WEEK = 7 * 86400.0


class Server(Protocol):
    """A queue's server, for one test."""

    @property
    def port(self) -> int:
        """Where it listens."""

    def start(self) -> None:
        """Start it with its data, and wait until it answers."""

    def kill(self) -> None:
        """Kill it with SIGKILL."""

    def freeze(self) -> None:
        """Stop it where it is: it keeps its connections, and does nothing."""

    def thaw(self) -> None:
        """Let it go on."""

    def down(self) -> AbstractContextManager[None]:
        """Killed, and started again with its data."""

    def empty(self) -> None:
        """Let it lose everything."""

    def entries(self, topic: str) -> Sequence[Mapping[str, str]]:
        """The headers of a topic's messages, and the ``body``, in their order."""


class AnyQueueSuite:
    """What holds for every queue. A subclass gives `queue` and `at`."""

    @pytest.fixture
    def queue(self) -> Server:
        """A server that is empty and durable."""
        raise NotImplementedError("give the fixture `queue`")

    def at(self, port: int) -> DestinationSettings:
        """The server at a port as a destination, which stores 100 messages at a time."""
        raise NotImplementedError

    def test_messages_are_there_in_their_order_and_each_once(self, app: Dsn, queue: Server) -> None:
        events = self.at(queue.port)
        send_numbers(app, *range(10))
        forward(app, chunk_rows=3, events=events)
        send_numbers(app, 10, 11)
        forward(app, chunk_rows=3, events=events)
        assert texts(queue) == [str(number) for number in range(12)]
        with connect(app) as connection:
            query = "SELECT message_id::text, shard::text FROM saf.outbox ORDER BY id"
            sent = fetch(connection, query)
            ((source,),) = fetch(connection, "SELECT broker_id::text FROM saf.broker")
        there = queue.entries("billing")
        assert [(one["saf-id"], one["saf-shard"]) for one in there] == sent
        assert {one["saf-source"] for one in there} == {source}
        assert {(one["saf-service"], one["saf-key"]) for one in there} == {("billing", "k")}

    def test_while_it_is_down_messages_are_parked_in_order_and_others_go_on(
        self, app: Dsn, mom: Dsn, queue: Server
    ) -> None:
        events = self.at(queue.port)
        with connect(app) as connection:
            route(connection, "billing", "events")
            route(connection, "shipping", "mom")
            with queue.down():
                for number in range(4):
                    send_to(connection, "billing", f"b{number}")
                    send_to(connection, "shipping", f"s{number}")
                forward(app, chunk_rows=3, events=events, mom=mom)
                assert bodies(mom) == [f"s{number}" for number in range(4)]
            send_to(connection, "billing", "b4")
            for _ in range(2):
                let_time_pass(app)
                forward(app, chunk_rows=3, events=events, mom=mom)
            assert texts(queue) == [f"b{number}" for number in range(5)]
            assert fetch(connection, "SELECT count(*) FROM saf.parked") == [(0,)]

    def test_messages_of_a_dialog_wait_for_a_broker_and_those_of_a_monolog_go(
        self, app: Dsn, mom: Dsn, queue: Server
    ) -> None:
        events = self.at(queue.port)
        with connect(app) as connection:
            connection.execute("INSERT INTO saf.service VALUES ('shop')")
            connection.execute("INSERT INTO saf.topic VALUES ('prices')")
            route(connection, "billing", "events")
            route(connection, "prices", "events")
            with connection.transaction():
                dialog = begin_dialog(connection, from_service="shop", to_service="billing")
                dialog.send(connection, "order")
                monolog = begin_monolog(connection, from_service="shop", topic="prices")
                monolog.send(connection, "price")
            send_to(connection, "billing", "plain", key="other")
            forward(app, chunk_rows=10, events=events, mom=mom)
            assert texts(queue, "prices") == ["price"]
            assert queue.entries("prices")[0]["saf-sequence"] == "1"
            assert texts(queue) == ["plain"]
            ((error,),) = fetch(connection, "SELECT error FROM saf.backoff")
            assert "'events' takes no messages of dialogs" in error
            assert "route 'billing' to a broker" in error
            config = Settings(
                brokers={"app": Broker(dsn=app)}, destinations={"events": events, **stores(mom=mom)}
            )
            (found,) = [one for one in examine(config) if one.check == "dialogs" and one.what]
            assert found.severity == "error"
            assert "dialogs with service 'billing' go to destination 'events'" in found.what
            know(mom, "billing")
            connection.execute("UPDATE saf.route SET destination = 'mom' WHERE service = 'billing'")
            let_time_pass(app)
            forward(app, chunk_rows=10, events=events, mom=mom)
            assert bodies(mom) == ["order"]


class OnceSuite(AnyQueueSuite):
    """What holds for a queue that stores exactly once."""

    request: bytes
    """What stands in the request that stores."""
    parts: Sequence[int] = (100, 200, 300)
    """How many of 300 messages may be there if the connection is lost."""
    insistent = False
    """Whether the client asks again by itself, so that more than one answer gets lost."""

    def proxy(self, port: int) -> Lossy:
        """A proxy in front of the server."""
        return Lossy(port)

    def settle(self, destination: Destination, forwarder: Forwarder) -> None:  # noqa: ARG002
        """Do what comes once, before messages are stored."""
        destination.connect()

    @pytest.mark.parametrize("stored", [200, 0, 2_000][: sized(1, 3)])
    def test_a_server_that_is_killed_while_it_stores_has_each_message_once_in_the_end(
        self, queue: Server, stored: int
    ) -> None:
        forwarder = Forwarder()
        rows = forwarder.messages(sized(4_000, 40_000))
        chunk = forwarder.chunk(rows)
        killed = threading.Event()

        def kill() -> None:
            until(lambda: len(queue.entries("billing")) >= stored)
            queue.kill()
            killed.set()

        with closing(self.at(queue.port).open("events")) as destination:
            destination.connect()
            threading.Thread(target=kill).start()
            while not killed.is_set():
                try:
                    destination.store(chunk, exactly_once=True)
                except Unavailable:
                    killed.wait(timeout=60)
            queue.start()
            destination.close()
            destination.store(chunk, exactly_once=True)
        assert ids(queue) == [row["message_id"] for row in rows]

    def test_a_chunk_whose_answer_was_lost_is_there_once(self, queue: Server) -> None:
        forwarder = Forwarder()
        rows = forwarder.messages(300)
        chunk = forwarder.chunk(rows)
        with (
            self.proxy(queue.port) as proxy,
            closing(self.at(proxy.port).open("events")) as destination,
        ):
            self.settle(destination, forwarder)
            proxy.lose_answers_to(self.request)
            with pytest.raises(Unavailable):
                destination.store(chunk, exactly_once=True)
            assert proxy.lost == 1 or (proxy.lost and self.insistent)
            proxy.lose_answers_to(b"")
            until(lambda: len(ids(queue)) in self.parts)
            done = all_stored(destination.store(chunk, exactly_once=True))
        assert done.dropped >= min(self.parts)
        assert ids(queue) == [row["message_id"] for row in rows]

    def test_a_process_that_was_stopped_stores_nothing_after_the_new_owner_did(
        self, queue: Server
    ) -> None:
        events = self.at(queue.port)
        forwarder = Forwarder()
        rows = forwarder.messages(400)
        chunks = [forwarder.chunk(rows[first : first + 4]) for first in range(0, 400, 4)]
        with start(events, chunks) as zombie:
            assert zombie.stdout is not None
            for _ in range(5):
                zombie.stdout.readline()
            zombie.send_signal(signal.SIGSTOP)
            forwarder.epoch += 1
            done = len(ids(queue))
            with closing(events.open("events")) as destination:
                destination.store(forwarder.chunk(rows), exactly_once=True)
            zombie.send_signal(signal.SIGCONT)
            zombie.stdout.read()
            assert zombie.wait(timeout=60) != 0 or done == 400
        assert ids(queue) == [row["message_id"] for row in rows]

    # Honest

    def test_a_server_that_has_lost_everything_is_not_taken_for_a_new_one(
        self, app: Dsn, queue: Server
    ) -> None:
        events = self.at(queue.port)
        send_numbers(app, 0)
        forward(app, chunk_rows=3, events=events)
        queue.empty()
        send_numbers(app, 1)
        (said,) = errors(app, events)
        assert "has lost messages that it acknowledged" in said
        assert texts(queue) == []

    def test_it_is_compared_like_an_inbox(self, app: Dsn, queue: Server) -> None:
        events = self.at(queue.port)
        send_numbers(app, *range(5))
        forward(app, chunk_rows=3, events=events)
        found = reconcile("app", app, {"events": events}, retention_seconds=WEEK)
        assert (found.same, found.unread) == (True, {})


class QueueSuite(OnceSuite):
    """What holds for a queue that stores step by step, and is fenced."""

    def test_of_steps_in_flight_none_is_stored_after_one_that_was_not(self, queue: Server) -> None:
        """Another owner moves the marks between two steps."""
        events = self.at(queue.port)
        forwarder = Forwarder()
        rows = forwarder.messages(400)
        zombie = forwarder.chunk(rows)

        def take_over() -> None:
            forwarder.epoch += 1
            with closing(events.open("events")) as other:
                other.store(forwarder.chunk(rows), exactly_once=True)

        with interrupted(events, queue, take_over) as destination, pytest.raises(Fenced):
            destination.store(zombie, exactly_once=True)
        assert ids(queue) == [row["message_id"] for row in rows]

    @pytest.mark.parametrize("quality", [MAIN, ONCE])
    def test_what_is_stored_is_not_stored_again_if_another_lane_is_stored_meanwhile(
        self, queue: Server, quality: str
    ) -> None:
        events = self.at(queue.port)
        forwarder = Forwarder()
        rows = forwarder.messages(400)
        late = forwarder.messages(4)
        replayed = Kind.REPLAY if quality == MAIN else None

        def store_others() -> None:
            with closing(events.open("events")) as other:
                other.store(forwarder.chunk(late, lane=replayed), exactly_once=True)

        with interrupted(events, queue, store_others) as destination:
            done = all_stored(
                destination.store(
                    forwarder.chunk(rows, prefix=quality), exactly_once=quality == MAIN
                )
            )
        assert (done.messages, done.dropped) == (400, 0)
        others = {row["message_id"] for row in late}
        assert [one for one in ids(queue) if one not in others] == [
            row["message_id"] for row in rows
        ]
        assert len(ids(queue)) == 404


@contextmanager
def interrupted(
    events: DestinationSettings, queue: Server, meanwhile: Callable[[], object]
) -> Iterator[Any]:
    """A destination; once 300 messages of its first chunk are there, something else happens."""
    with closing(events.open("events")) as destination:
        assert isinstance(destination, Stepwise)
        steps: Any = destination._steps
        happened: list[object] = []

        def slowly(*given: Any) -> Iterator[Any]:
            for number, one in enumerate(steps(*given)):
                if number == 3 and not happened:
                    until(lambda: len(ids(queue)) == 300)
                    happened.append(meanwhile())
                yield one

        setattr(destination, "_steps", slowly)  # noqa: B010 - a patch of this one
        yield destination
        assert happened


def texts(queue: Server, topic: str = "billing") -> list[str]:
    """The bodies of a topic's messages."""
    return [fields["body"] for fields in queue.entries(topic)]


def ids(queue: Server) -> list[UUID]:
    """The ids of the messages for billing."""
    return [UUID(fields["saf-id"]) for fields in queue.entries("billing")]


def errors(app: Dsn, events: DestinationSettings) -> list[str]:
    """What forwarding there complains of."""
    destinations: dict[str, Any] = {"events": events}
    return [one.error for one in forward(app, chunk_rows=3, **destinations) if one.error]


def send_numbers(app: Dsn, *numbers: int) -> None:
    """Messages of one key for billing."""
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key="k")
