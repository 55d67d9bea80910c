"""The tests that every kind of source must pass: subclass `SourceConformance` for yours.

For a topic without places, whose messages are acknowledged, subclass `QueueConformance` instead.

    from saf.testing.source_conformance import SourceConformance, Written

    class TestPaper(SourceConformance):
        @pytest.fixture
        def settings(self, tmp_path):
            return Paper(folder=tmp_path, topic="payments", service="billing")

        @pytest.fixture
        def add(self, settings):
            return lambda records: ...

Provide the fixtures that have no default here; their docstrings define the results. No test needs
an inbox: what happens there is the same for all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import ClassVar

import pytest

from saf.errors import RetentionPassed, SourceRefused, TopicMadeAgain, Unavailable
from saf.sources import BEGINNING, Position, Progress, Record, Source
from saf.sources.judging import judge
from saf.sources.settings import SourceSettings

__all__ = ["QueueConformance", "SourceConformance", "Written"]

LIMIT = 7


@dataclass(frozen=True, kw_only=True)
class Written:
    """A record to add to the topic."""

    body: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    key: str = "k"


Add = Callable[[Sequence[Written]], None]
WhileUnavailable = Callable[[], AbstractContextManager[object]]


class TopicConformance:
    """The part of the suite that is the same for all topics."""

    properties: ClassVar[frozenset[str]] = frozenset()
    """Headers that your kind makes of a record's properties."""

    # Fixtures to provide

    @pytest.fixture
    def settings(self) -> SourceSettings:
        """A source of your kind whose topic does not exist yet, and is used only by this test."""
        raise NotImplementedError("give the fixture `settings`")

    @pytest.fixture
    def add(self) -> Add:
        """A function that adds records; it creates the topic. Records with one key share a
        partition."""
        raise NotImplementedError("give the fixture `add`")

    @pytest.fixture
    def delete(self) -> Callable[[], None]:
        """A function that deletes the topic."""
        raise NotImplementedError("give the fixture `delete`")

    @pytest.fixture
    def unavailable(self) -> WhileUnavailable:
        """A context manager within which the topic's broker cannot be reached."""
        raise NotImplementedError("give the fixture `unavailable`")

    # Fixtures that tests use

    @pytest.fixture
    def source(self, settings: SourceSettings) -> Iterator[Source]:
        """The source, connected."""
        with closing(settings.open("conformance")) as source:
            source.connect()
            yield source

    # Tests

    def test_a_topic_that_does_not_exist_has_nothing(self, source: Source) -> None:
        for shard in range(source.partitions()):
            extent = source.extent(shard)
            assert (extent.exists, extent.last, extent.first) == (False, BEGINNING, None)
            assert not source.read(shard, BEGINNING, LIMIT).records

    def test_each_record_is_read_once_and_in_order(self, source: Source, add: Add) -> None:
        add([Written(body=b"%d" % number) for number in range(30)])
        shard, records = _all(source)
        assert [record.body for record in records] == [b"%d" % number for number in range(30)]
        positions = [record.position for record in records]
        assert positions == sorted({*positions})
        if (first := source.extent(shard).first) is not None:
            assert first <= positions[0]
            assert positions[-1] <= source.extent(shard).last

    def test_what_follows_is_read_after_the_last_position(self, source: Source, add: Add) -> None:
        add([Written(body=b"1")])
        shard, records = _all(source)
        read = source.read(shard, records[-1].position, LIMIT)
        assert not read.records
        add([Written(body=b"2")])
        after = read.end or records[-1].position
        assert [one.body for one in _up_to_end(source, shard, after)] == [b"2"]

    @pytest.mark.parametrize(
        "body",
        [b"", b"\x00", bytes(range(256)), "grüezi ☃".encode(), b"x" * 100_000, b"\r\n$5\r\n"],
        ids=["empty", "zero", "bytes", "unicode", "large", "ends of lines"],
    )
    def test_a_body_and_its_headers_come_unchanged(
        self, source: Source, add: Add, body: bytes
    ) -> None:
        headers = (("a", b"1"), ("grüezi", "☃".encode()), ("empty", b""), ("bytes", b"\xff\x00"))
        add([Written(body=body, headers=headers)])
        _, (record,) = _all(source)
        found = {n: value for n, value in record.headers.items() if n not in self.properties}
        assert (record.body, found) == (body, dict(headers))

    def test_a_broker_that_cannot_be_reached_is_unavailable_and_then_read(
        self, settings: SourceSettings, add: Add, unavailable: WhileUnavailable
    ) -> None:
        add([Written(body=b"1")])
        with closing(settings.open("conformance")) as source:
            source.connect()
            shard, _ = _all(source)
            with unavailable(), pytest.raises(Unavailable):
                source.extent(shard)
            source.connect()
            assert [one.body for one in _up_to_end(source, shard, BEGINNING)] == [b"1"]


class SourceConformance(TopicConformance):
    """The conformance suite of sources; a subclass runs it for one kind."""

    @pytest.fixture
    def remove(self) -> Callable[[int], None]:
        """A function that removes the oldest messages of each partition: all but a number."""
        raise NotImplementedError("give the fixture `remove`")

    def test_reading_again_gives_the_same(self, source: Source, add: Add) -> None:
        add([Written(body=b"%d" % number) for number in range(20)])
        shard, records = _all(source)
        again = source.read(shard, records[4].position, 6).records
        assert [*again] == records[5:11]

    def test_a_topic_that_still_has_everything_may_be_read_on(
        self, source: Source, add: Add
    ) -> None:
        add([Written(body=b"%d" % number) for number in range(10)])
        shard, progress = _progress(source)
        assert judge("s", "t", progress, source.extent(shard)) is None

    def test_messages_that_were_read_may_be_removed(
        self, source: Source, add: Add, remove: Callable[[int], None]
    ) -> None:
        add([Written(body=b"%d" % number) for number in range(10)])
        shard, progress = _progress(source)
        remove(0)
        assert judge("s", "t", progress, source.extent(shard)) is None
        add([Written(body=b"new")])
        assert judge("s", "t", progress, source.extent(shard)) is None
        assert [one.body for one in _up_to_end(source, shard, progress.position)] == [b"new"]

    def test_messages_that_are_removed_before_they_are_read_are_counted(
        self, source: Source, add: Add, remove: Callable[[int], None]
    ) -> None:
        add([Written(body=b"%d" % number) for number in range(10)])
        shard, progress = _progress(source)
        add([Written(body=b"%d" % number) for number in range(10, 20)])
        remove(7)
        error = judge("s", "t", progress, source.extent(shard))
        assert isinstance(error, RetentionPassed)
        assert error.messages == 3

    def test_a_topic_that_was_deleted_or_made_again_is_refused(
        self, settings: SourceSettings, add: Add, delete: Callable[[], None]
    ) -> None:
        with closing(settings.open("conformance")) as source:
            source.connect()
            add([Written(body=b"%d" % number) for number in range(10)])
            shard, progress = _progress(source)
        delete()
        with closing(settings.open("conformance")) as source:
            source.connect()
            assert isinstance(judge("s", "t", progress, source.extent(shard)), TopicMadeAgain)
        add([Written(body=b"%d" % number) for number in range(20)])
        with closing(settings.open("conformance")) as source:
            source.connect()
            assert isinstance(judge("s", "t", progress, source.extent(shard)), SourceRefused)


class QueueConformance(TopicConformance):
    """The conformance suite of sources whose messages are acknowledged; `Written.key` is the id."""

    def test_messages_without_an_acknowledgement_come_again_in_their_order(
        self, settings: SourceSettings, add: Add
    ) -> None:
        add([Written(body=b"%d" % number, key=f"id-{number}") for number in range(20)])
        for _ in range(2):
            with closing(settings.open("conformance")) as source:
                source.connect()
                _, records = _all(source)
            assert [record.body for record in records] == [b"%d" % number for number in range(20)]
            assert [record.id for record in records] == [f"id-{number}" for number in range(20)]

    def test_acknowledged_messages_do_not_come_again(
        self, settings: SourceSettings, add: Add
    ) -> None:
        add([Written(body=b"%d" % number, key=f"id-{number}") for number in range(20)])
        with closing(settings.open("conformance")) as source:
            source.connect()
            first = source.read(0, BEGINNING, LIMIT)
            source.read(0, first.records[-1].position, LIMIT)
            source.acknowledge(first.receipt)
        with closing(settings.open("conformance")) as source:
            source.connect()
            _, records = _all(source)
        assert [record.body for record in records] == [b"%d" % n for n in range(LIMIT, 20)]

    def test_what_waits_is_counted(self, source: Source, add: Add) -> None:
        add([Written(body=b"1")] * 10)
        assert source.extent(0).waiting == 10
        read = source.read(0, BEGINNING, LIMIT)
        assert source.extent(0).waiting == 10 - LIMIT
        source.acknowledge(read.receipt)
        assert source.extent(0).waiting == 10 - LIMIT

    def test_each_message_without_an_id_gets_another(self, source: Source, add: Add) -> None:
        add([Written(body=b"1", key="")] * 5)
        _, records = _all(source)
        assert len({record.id for record in records}) == 5

    def test_a_topic_that_was_deleted_is_refused(
        self, source: Source, add: Add, delete: Callable[[], None]
    ) -> None:
        add([Written(body=b"1")])
        shard, _ = _all(source)
        progress = Progress(shard=shard, position=(0, 1), added=1)
        assert judge("s", "t", progress, source.extent(shard)) is None
        delete()
        error = judge("s", "t", progress, source.extent(shard))
        assert isinstance(error, TopicMadeAgain)


def _all(source: Source) -> tuple[int, list[Record]]:
    """Return the only partition with records, and its records."""
    found = {
        shard: records
        for shard in range(source.partitions())
        if (records := _up_to_end(source, shard, BEGINNING))
    }
    ((shard, records),) = found.items()
    return shard, records


def _up_to_end(source: Source, shard: int, after: Position) -> list[Record]:
    records: list[Record] = []
    while (read := source.read(shard, after, LIMIT)).records:
        assert len(read.records) <= LIMIT
        records += read.records
        after = read.records[-1].position
    return records


def _progress(source: Source) -> tuple[int, Progress]:
    """Read everything; return the partition, and how far it was read."""
    shard, records = _all(source)
    last = source.read(shard, records[-2].position, LIMIT)
    position = last.end or records[-1].position
    added = last.added if last.added is not None else len(records)
    topic_id = source.extent(shard).topic_id
    return shard, Progress(shard=shard, position=position, added=added, topic_id=topic_id)
