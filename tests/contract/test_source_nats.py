"""A stream of a NATS server as a source: killed, made again, purged, with other subjects."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from saf.config import load
from saf.database import Dsn
from saf.destinations.nats import Nats as Destination
from saf.destinations.queues import Format
from saf.errors import Refused, RetentionPassed, SourceSetBack, TopicMadeAgain
from saf.operating.sources import examine
from saf.sources.nats import Nats
from saf.testing.source_conformance import Written
from tests.nats_server import NatsServer, nats_server
from tests.pipeline import bodies, connect, forward
from tests.queue_suite import send_numbers
from tests.source_suite import Add, SourceSuite, numbers
from tests.topics import (
    STREAM,
    TOPIC,
    add_to_nats,
    arrived,
    nats_source,
    read,
    reading,
    texts,
    written_of,
)


class TestNats(SourceSuite):
    """What every source has to keep."""

    topic_of_billing = "saf.billing"

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[NatsServer]:
        with nats_server(tmp_path / "nats") as server:
            yield server

    @pytest.fixture
    def add(self, server: NatsServer) -> Add:
        return lambda bodies: add_to_nats(server, texts(bodies))

    @pytest.fixture
    def delete(self, server: NatsServer) -> Callable[[], object]:
        return lambda: server.ask(f"$JS.API.STREAM.DELETE.{STREAM}")

    def source(self, server: Any, topic: str | None = None, **more: Any) -> Nats:
        if topic is not None:
            more |= {"topic": topic, "stream": "SAF"}
        return nats_source(server, **more)

    def destination(self, server: Any, form: Format) -> Destination:
        return Destination(server=server.address, format=form)

    def test_a_stream_made_again_while_it_is_read_is_refused(
        self,
        server: NatsServer,
        billing: Dsn,
        add: Add,
        delete: Callable[[], object],
        tmp_path: Path,
    ) -> None:
        config = load(written_of(tmp_path / "saf.toml", billing, nats_source(server)))
        add(numbers(10))
        with reading(nats_source(server), billing) as reader:
            reader.turn(lambda: False)
            delete()
            add(numbers(20))  # more than were read
            with pytest.raises(TopicMadeAgain, match="its id was PAYMENTS, created at"):
                reader.turn(lambda: False)
        with pytest.raises(TopicMadeAgain):
            read(nats_source(server), billing)
        ((what, cure),) = examine(config, TOPIC)
        assert "its id was PAYMENTS, created at" in what
        assert "saf source continue payments" in cure
        assert bodies(billing) == numbers(10)

    def test_messages_that_were_purged_before_they_were_read_are_counted(
        self, server: NatsServer, billing: Dsn, add: Add
    ) -> None:
        add(numbers(10))
        read(nats_source(server), billing)
        add(numbers(10, 10))
        server.ask(f"$JS.API.STREAM.PURGE.{STREAM}")
        with pytest.raises(RetentionPassed, match="no longer has 10 messages"):
            read(nats_source(server), billing)
        assert bodies(billing) == numbers(10)

    def test_messages_that_are_purged_between_two_batches_are_noticed(
        self, server: NatsServer, billing: Dsn, add: Add, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("saf.sources.nats.stream.AT_ONCE", 5)
        add(numbers(20))
        source = nats_source(server)
        with reading(source, billing) as reader:
            reader._tend()
            stream: Any = reader._source
            answer = stream._answer

            def purged(*given: Any) -> Any:
                found = answer(*given)
                server.ask(f"$JS.API.STREAM.PURGE.{STREAM}", keep=3)
                return found

            monkeypatch.setattr(stream, "_answer", purged)
            with pytest.raises(RetentionPassed):
                reader.turn(lambda: False)
        assert bodies(billing) == []

    def test_a_stream_that_was_set_back_is_refused(
        self, tmp_path: Path, server: NatsServer, billing: Dsn, add: Add
    ) -> None:
        add(numbers(5))
        server.kill()
        (tmp_path / "kept").mkdir()
        shutil.copytree(server.folder, tmp_path / "kept" / "nats")
        server.start()
        add(numbers(5, 5))
        read(nats_source(server), billing)
        server.kill()
        shutil.rmtree(server.folder)
        shutil.copytree(tmp_path / "kept" / "nats", server.folder)
        server.start()
        with pytest.raises(SourceSetBack, match="was read up to 10, and ends at 5"):
            read(nats_source(server), billing)

    def test_only_the_subjects_of_the_topic_are_read_and_the_others_are_passed(
        self, server: NatsServer, billing: Dsn
    ) -> None:
        source = nats_source(server, topic="payments.eu", chunk_rows=3)
        for first in range(0, 20, 2):
            add_to_nats(server, texts(numbers(2, first)), "payments.eu")
            add_to_nats(server, texts(["other"] * 5), "payments.us")
        assert read(source, billing).messages == 20
        # what follows the last message of the topic is passed too, so it may be purged
        server.ask(f"$JS.API.STREAM.PURGE.{STREAM}")
        add_to_nats(server, texts(["20"]), "payments.eu")
        assert read(source, billing).messages == 1
        assert bodies(billing) == numbers(21)

    def test_a_server_that_lacks_the_newest_messages_hides_none(
        self, server: NatsServer, billing: Dsn, add: Add, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add(numbers(10))
        source = nats_source(server)
        with reading(source, billing) as reader:
            reader._tend()
            stream: Any = reader._source
            ask, answer = stream._ask, stream._answer

            def late(api: Any, after: int) -> Any:
                """Answer like a server of a cluster that has only the first five messages."""
                at, _, found = answer(api, after)
                return (at, False, found) if after < 5 else (after, False, [])

            with monkeypatch.context() as patched:
                patched.setattr(stream, "_ask", lambda api, after, *_: ask(api, after, 5, 1 << 20))
                patched.setattr(stream, "_answer", late)
                reader.turn(lambda: False)
                assert bodies(billing) == numbers(5)
            reader.turn(lambda: False)
        assert bodies(billing) == numbers(10)

    def test_the_marks_of_safs_destination_are_no_messages(
        self, app: Dsn, server: NatsServer, billing: Dsn
    ) -> None:
        send_numbers(app, *range(5))
        forward(app, there=self.destination(server, "saf"))
        turn = read(nats_source(server, stream="SAF", topic=">"), billing)
        assert (turn.messages, turn.dead) == (5, 0)

    def test_marks_alone_do_not_end_a_read(
        self, app: Dsn, server: NatsServer, billing: Dsn
    ) -> None:
        send_numbers(app, *range(5))
        forward(app, there=self.destination(server, "saf"))
        source = nats_source(server, stream="SAF", topic=">", chunk_rows=1)
        assert read(source, billing).messages == 5

    def test_a_message_of_another_writer_has_its_headers_and_its_subject(
        self, server: NatsServer, billing: Dsn
    ) -> None:
        headers = (("order", b"100%41"), ("Nats-Msg-Id", b"7"), ("Nats-TTL", b"never"), ("x", b""))
        records = [Written(body=b"1", headers=headers)]
        add_to_nats(server, records, allow_msg_ttl=True)
        read(nats_source(server, key_header="order"), billing)
        read(nats_source(server, topic="payments.eu"), billing, name="exact")
        first, second = arrived(billing)
        assert first["headers"] == {
            "order": "100%41", "Nats-Msg-Id": "7", "x": "", "Nats-Subject": "payments.eu"
        }  # fmt: skip
        assert first["key"] == "100%41"
        assert "Nats-Subject" not in second["headers"]

    def test_a_value_that_is_encoded_comes_back(
        self, app: Dsn, server: NatsServer, billing: Dsn
    ) -> None:
        with connect(app) as connection:
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES ('billing', 'ü %41', '7')"
            )
        forward(app, there=self.destination(server, "saf"))
        read(self.source(server, "saf.billing"), billing)
        assert [one["key"] for one in arrived(billing)] == ["ü %41"]

    def test_headers_that_look_like_the_servers_are_not_taken_for_them(
        self, server: NatsServer, billing: Dsn, add: Add
    ) -> None:
        forged = (("Nats-Stream", b"X"), ("Nats-Subject", b"y"), ("Nats-Sequence", b"999"),
                  ("Nats-Time-Stamp", b"never"))  # fmt: skip
        add_to_nats(server, [Written(body=b"1", headers=forged), *texts(["2"])])
        read(nats_source(server), billing)
        add(["3"])
        read(nats_source(server), billing)
        assert bodies(billing) == ["1", "2", "3"]

    def test_bodies_bound_what_is_read_at_a_time(self, server: NatsServer, add: Add) -> None:
        add(["x" * 10_000] * 50)
        source = nats_source(server).open("t")
        source.connect()
        try:
            found = source.read(0, (0, 0), 50, 30_000).records
        finally:
            source.close()
        assert 3 <= len(found) <= 4

    def test_a_stream_that_cannot_be_read_directly_is_refused_with_what_to_set(
        self, server: NatsServer, billing: Dsn
    ) -> None:
        add_to_nats(server, texts(["1"]), allow_direct=False)
        with pytest.raises(Refused, match="Set its allow_direct"):
            read(nats_source(server), billing)

    def test_a_user_needs_only_the_rights_of_the_page(self, tmp_path: Path, billing: Dsn) -> None:
        names = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
        allowed = [f"$JS.API.{name}.{STREAM}" for name in names]
        users = ", ".join(
            f"{{ user: {user}, password: hunter2, permissions: "
            f'{{ publish: {json.dumps(publish)}, subscribe: ["_INBOX.>"] }} }}'
            for user, publish in (("saf", allowed), ("nobody", ["x"]))
        )
        everyone = "{ user: all, password: hunter2 }"
        accounts = f"{{ A: {{ jetstream: enabled, users: [ {users}, {everyone} ] }} }}"
        with nats_server(tmp_path / "nats", accounts=accounts, no_auth_user="all") as server:
            add_to_nats(server, texts(["1"]), "payments.eu")
            add_to_nats(server, texts(["2"]), "payments.eu.west")
            read(nats_source(server, username="saf", password=SecretStr("hunter2")), billing)
            with pytest.raises(Refused, match=r"Let its user do what docs/sources\.md lists"):
                read(nats_source(server, username="nobody", password=SecretStr("hunter2")), billing)
        assert bodies(billing) == ["1"]


@pytest.mark.parametrize("topic", ["", "a..b", "a b", ".a", "a.>.b", "a*"])
def test_a_topic_that_is_no_pattern_of_subjects_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match=r"pattern of subjects|a name has"):
        Nats(server="nats://n", topic=topic, service="billing")
