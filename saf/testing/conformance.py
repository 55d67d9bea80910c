"""The tests that every kind of destination must pass: subclass `DestinationConformance` for yours.

    from saf.testing.conformance import DestinationConformance

    class TestPaper(DestinationConformance):
        @pytest.fixture
        def settings(self, tmp_path):
            return Paper(folder=tmp_path)

        @pytest.fixture
        def stored(self, settings):
            return lambda: [...]

Provide the fixtures that have no default here; their docstrings define the results. A test
does not require what a kind's `saf.destinations.Capabilities` exclude. Then it checks instead that
the operation is rejected, or that it is harmless. No test is skipped.

A kind calls ``fail_point("mom_insert")`` before it commits, and ``fail_point("mom_commit")`` after
the commit (`saf.failpoints`): tests kill it there, and also at arbitrary moments.

It needs the extra ``forwarder``, and no source database: the tests build chunks themselves.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pydantic
import pytest

from saf.columns import COLUMNS
from saf.database import Dsn
from saf.destinations import Chunk, Compared, Destination, Refusal, Stored
from saf.destinations.marks import AGAIN, MAIN, NOTHING, ONCE
from saf.destinations.settings import DestinationSettings
from saf.errors import (
    Ahead,
    AnotherBroker,
    Behind,
    CannotReadBack,
    Fenced,
    Rejected,
    SafError,
    Unavailable,
    UnknownService,
)
from saf.message import DEFAULT_MAX_BYTES
from saf.setaside.lane import Kind
from saf.testing.forwarder import (
    CREATED_AT,
    DIALOG,
    HARD,
    READY,
    SERVICE,
    SHARDS,
    Forwarder,
    Row,
    all_stored,
    start,
)

__all__ = ["DestinationConformance", "Forwarder", "Read", "Row", "WhileUnavailable"]

Read = Callable[[], Sequence[Mapping[str, Any]]]
WhileUnavailable = Callable[[], AbstractContextManager[object]]


class DestinationConformance:
    """The conformance suite of destinations; a subclass runs it for one kind."""

    columns: Sequence[str] = COLUMNS
    """Columns of a message that the destination stores. Default: all."""

    # Fixtures to provide

    @pytest.fixture
    def settings(self) -> DestinationSettings:
        """A destination of your kind: reachable, empty, and used only by this test."""
        raise NotImplementedError("give the fixture `settings`")

    @pytest.fixture
    def stored(self) -> Read:
        """A function that returns all stored messages, oldest first, as mappings of ``columns``.

        ``headers`` is JSON text; a UUID is a `uuid.UUID`, and times have a time zone.
        """
        raise NotImplementedError("give the fixture `stored`")

    @pytest.fixture
    def unavailable(self) -> WhileUnavailable:
        """A context manager within which the destination cannot be reached."""
        raise NotImplementedError("give the fixture `unavailable`")

    @pytest.fixture
    def refused(self) -> DestinationSettings:
        """The same destination with a login that it rejects, or a place that it may not use."""
        raise NotImplementedError("give the fixture `refused`")

    @pytest.fixture
    def know(self) -> Callable[[str], None]:
        """A function that tells the destination of a service; needed with `knows_services`."""
        raise NotImplementedError("give the fixture `know`: the kind knows services")

    @pytest.fixture
    def rejected(self) -> Row | None:
        """The columns of a message that the destination rejects; None if it rejects no message."""
        return None

    # Fixtures that tests use

    @pytest.fixture
    def forwarder(self) -> Forwarder:
        """A source that sends, spreading messages over its shards."""
        return Forwarder()

    @pytest.fixture
    def destination(self, settings: DestinationSettings) -> Iterator[Destination]:
        """The destination, opened."""
        with closing(settings.open("conformance")) as one:
            yield one

    # Once

    def test_a_chunk_is_stored_as_a_whole(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(10)
        done = _store(settings, forwarder.chunk(rows))
        assert (done.messages, done.dropped) == (10, 0)
        assert _ids(stored()) == _ids(rows)

    @pytest.mark.parametrize("learnt", [False, True], ids=["answer lost", "answer heard"])
    def test_a_chunk_that_is_given_twice_is_stored_once(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        learnt: bool,
    ) -> None:
        """If the answer to the commit was lost, the source does not know about the stored chunk."""
        rows = forwarder.messages(10)
        first = _store(settings, forwarder.chunk(rows))
        if learnt:
            forwarder.learn(first)
        repeat = _store(settings, forwarder.chunk(rows))
        if settings.capabilities.exactly_once:
            assert (repeat.messages, repeat.dropped) == (0, 10)
            assert _ids(stored()) == _ids(rows)
        else:
            assert set(_ids(stored())) == set(_ids(rows))
            with pytest.raises(pydantic.ValidationError, match="cannot store exactly once"):
                type(settings).model_validate({**dict(settings), "quality": "exactly_once"})

    def test_of_a_chunk_that_was_given_in_part_the_rest_is_stored(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(10)
        _store(settings, forwarder.chunk(rows[:7]))
        rest = _store(settings, forwarder.chunk(rows))
        assert set(_ids(stored())) == set(_ids(rows))
        if settings.capabilities.exactly_once:
            assert (rest.messages, rest.dropped) == (3, 7)
            assert _ids(stored()) == _ids(rows)

    def test_at_least_once_stores_what_it_is_given(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(5)
        for _ in range(2):
            _store(settings, forwarder.chunk(rows, prefix=AGAIN), exactly_once=False)
        assert sorted(map(str, _ids(stored()))) == sorted(map(str, _ids(rows) * 2))

    def test_each_lane_has_a_mark_of_its_own(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        """Messages that were set aside are stored after later ones."""
        late, *rows = forwarder.messages(6, shard=0)
        for row in rows:
            forwarder.learn(_store(settings, forwarder.chunk([row])))
        lane = forwarder.chunk([late], lane=Kind.RETRY)
        for _ in range(2):
            _store(settings, lane)
        if settings.capabilities.exactly_once:
            assert _ids(stored()) == _ids([*rows, late])
        else:
            assert set(_ids(stored())) == set(_ids([late, *rows]))

    def test_it_says_how_far_the_lanes_of_a_chunk_are_stored(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        """Asking for marks stores nothing of the chunk, for any caller."""
        rows = forwarder.messages(10)
        _store(settings, forwarder.chunk(rows[:5]))
        first = forwarder.learn(_store(settings, forwarder.chunk(rows[:7])))
        with closing(settings.open("conformance")) as one:
            marks = one.marks(forwarder.chunk(rows))
        assert {place: mark for place, mark in marks.items() if mark != NOTHING} == first.marks
        if settings.capabilities.exactly_once:
            assert _ids(stored()) == _ids(rows[:7])

    def test_an_empty_chunk_is_taken(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        """Storing an empty chunk also fences the previous owner."""
        rows = forwarder.messages(2)
        zombie = forwarder.chunk(rows)
        forwarder.epoch += 1
        done = _store(settings, forwarder.chunk([]))
        assert (done.messages, done.dropped, done.marks) == (0, 0, {})
        if settings.capabilities.fences:
            with pytest.raises(Fenced):
                _store(settings, zombie)
        assert _ids(stored()) == []

    # Fenced, and honest

    def test_an_older_epoch_stores_nothing(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(4)
        zombie = forwarder.chunk(rows)
        forwarder.epoch += 1
        _store(settings, forwarder.chunk(rows))
        if settings.capabilities.fences:
            with pytest.raises(Fenced):
                _store(settings, zombie)
        else:
            with suppress(Fenced):  # fencing here is allowed, but not promised
                _store(settings, zombie)
        self._is_there(settings, stored, rows)

    @pytest.mark.parametrize("quality", [MAIN, AGAIN, ONCE])
    @pytest.mark.parametrize("lane", [None, Kind.RETRY])
    def test_an_older_epoch_stores_nothing_in_another_lane(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        lane: Kind | None,
        quality: str,
    ) -> None:
        """The new owner may handle parked or at-most-once messages elsewhere."""
        rows = forwarder.messages(4, shard=0)
        zombie = forwarder.chunk(rows[:2], lane=lane, prefix=quality)
        forwarder.epoch += 1
        _store(settings, forwarder.chunk(rows[2:], lane=Kind.REPLAY))
        if settings.capabilities.fences:
            with pytest.raises(Fenced):
                _store(settings, zombie)
        self._is_there(settings, stored, rows[2:])

    def test_who_was_set_back_is_named(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(4)
        before = dict(forwarder.known)
        marks = forwarder.learn(_store(settings, forwarder.chunk(rows))).marks
        if not settings.capabilities.exactly_once:
            assert marks == {}  # nothing to compare
            return
        assert set(marks) == {("", shard) for shard in range(SHARDS)}
        assert settings.known("conformance", forwarder.source, role="test").marks == marks
        forwarder.next_batch()
        later = forwarder.messages(4)
        ahead = {p: replace(mark, position=mark.position + 100) for p, mark in marks.items()}
        with pytest.raises(Behind):
            _store(settings, forwarder.chunk(later, known=ahead))
        with pytest.raises(Ahead):
            _store(settings, forwarder.chunk(later, known=before))
        assert _ids(stored()) == _ids(rows)
        _store(settings, forwarder.chunk(later))
        assert _ids(stored()) == _ids([*rows, *later])

    @pytest.mark.parametrize("lane", [None, Kind.RETRY])
    @pytest.mark.parametrize("quality", [MAIN, AGAIN])
    def test_a_source_that_has_forgotten_what_it_had_set_aside_is_named(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        lane: Kind | None,
        quality: str,
    ) -> None:
        """It would send such a message again, while the marks show it as stored."""
        if not settings.capabilities.exactly_once:
            return  # it has no marks
        rows = forwarder.messages(4, shard=0)
        options = {"exactly_once": quality == MAIN}
        forwarder.learn(_store(settings, forwarder.chunk(rows[:1])))
        forwarder.set_aside_at = {0: [CREATED_AT], 1: [CREATED_AT]}
        _store(settings, forwarder.chunk(rows[1:2], lane=lane, prefix=quality), **options)
        marks = settings.known("conformance", forwarder.source, role="test").marks
        moments = {place: mark.set_aside_at for place, mark in marks.items() if mark.set_aside_at}
        assert moments == {(MAIN, 0): CREATED_AT}
        later = CREATED_AT + timedelta(microseconds=1)
        for forgotten in ({}, {0: [later]}):
            forwarder.set_aside_at = forgotten
            with pytest.raises(Ahead):
                _store(settings, forwarder.chunk(rows[2:3], lane=lane, prefix=quality), **options)
        forwarder.set_aside_at = {0: [CREATED_AT, later]}
        for row in rows[2:]:  # also after the mark has the later time
            _store(settings, forwarder.chunk([row], lane=lane, prefix=quality), **options)
        assert set(_ids(stored())) == set(_ids(rows))

    # Killed

    @pytest.mark.parametrize("point", ["mom_insert", "mom_commit"])
    def test_a_process_that_is_killed_at_its_commit_loses_nothing(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read, point: str
    ) -> None:
        rows = forwarder.messages(20)
        chunk = forwarder.chunk(rows)
        with start(settings, [chunk], fail_point=point) as victim:
            assert victim.stdout is not None
            victim.stdout.read()
            assert victim.wait(timeout=120) in (-signal.SIGKILL, 0)  # 0: the kind lacks this point
        _store(settings, chunk)
        self._is_there(settings, stored, rows)

    def test_a_process_that_is_killed_at_any_moment_loses_nothing(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows = forwarder.messages(400)
        chunks = [forwarder.chunk(rows[first : first + 4]) for first in range(0, 400, 4)]
        with start(settings, chunks) as victim:
            assert victim.stdout is not None
            assert json.loads(victim.stdout.readline()) == READY
            for _ in range(7):
                victim.stdout.readline()
            os.killpg(victim.pid, signal.SIGKILL)
            assert victim.wait(timeout=60) == -signal.SIGKILL
        with closing(settings.open("conformance")) as destination:
            for chunk in chunks:
                destination.store(chunk, exactly_once=settings.capabilities.exactly_once)
        self._is_there(settings, stored, rows)

    def _is_there(self, settings: DestinationSettings, stored: Read, rows: Sequence[Row]) -> None:
        if settings.capabilities.exactly_once:
            assert _ids(stored()) == _ids(rows)
        else:
            assert set(_ids(stored())) == set(_ids(rows))

    def test_of_two_that_store_the_same_at_the_same_time_nothing_is_there_twice(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        """A task runs twice at the same time: neither run is older than the other."""
        rows = forwarder.messages(80)
        chunks = [forwarder.chunk(rows[first : first + 4]) for first in range(0, 80, 4)]
        with start(settings, chunks) as one, start(settings, chunks) as other:
            for process in (one, other):
                assert process.stdout is not None
                process.stdout.read()
                assert process.wait(timeout=120) == 0
        self._is_there(settings, stored, rows)

    # As they were sent

    def test_each_key_arrives_in_its_order(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        rows: list[Row] = []
        with closing(settings.open("conformance")) as destination:
            for _ in range(5):
                rows += (batch := forwarder.messages(20))
                once = settings.capabilities.exactly_once
                forwarder.learn(destination.store(forwarder.chunk(batch), exactly_once=once))
                forwarder.next_batch()
        arrived = _ids(stored())
        for key in {row["key"] for row in rows}:
            sent = [row["message_id"] for row in rows if row["key"] == key]
            assert [item for item in arrived if item in sent] == sent

    def test_every_column_arrives_as_it_was_sent(
        self,
        settings: DestinationSettings,
        destination: Destination,
        forwarder: Forwarder,
        stored: Read,
    ) -> None:
        own, capabilities = destination.identity(), settings.capabilities
        hard = [one for name, one in HARD.items() if capabilities.takes_dialogs or name != DIALOG]
        sent = [forwarder.message(**columns) for columns in hard]
        sent.append(forwarder.message(to_broker=own))
        _store(settings, forwarder.chunk(sent))
        for row, arrived in zip(sent, stored(), strict=True):
            for name in self.columns:
                if name == "headers" and row[name] is not None:
                    assert json.loads(arrived[name]) == json.loads(row[name])
                else:
                    assert arrived[name] == row[name], name

    def test_the_largest_body_arrives(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        most = settings.capabilities.largest_body
        body = b"0123456789abcdef" * (min(most or DEFAULT_MAX_BYTES, DEFAULT_MAX_BYTES) // 16)
        _store(settings, forwarder.chunk([forwarder.message(body=body)]))
        (row,) = stored()
        assert row["body"] == body

    # Refused

    def test_a_service_that_is_not_known_is_named_and_nothing_stored(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        request: pytest.FixtureRequest,
    ) -> None:
        known, other = forwarder.message(), forwarder.message(to_service="nobody")
        waiting: dict[str, Any] = {"behind": frozenset(["nobody"])}
        if settings.capabilities.knows_services:
            request.getfixturevalue("know")(SERVICE)
            waiting = {}
        error, refused = _refused(settings, forwarder.chunk([known, other], **waiting))
        assert isinstance(error, UnknownService)
        assert (error.services, refused) == (["nobody"], _ids([other]))
        assert _ids(stored()) == []
        _store(settings, forwarder.chunk([known]))
        assert _ids(stored()) == _ids([known])

    def test_what_is_addressed_to_another_broker_is_refused(
        self, settings: DestinationSettings, forwarder: Forwarder, stored: Read
    ) -> None:
        stranger = uuid4()
        rows = [forwarder.message(), forwarder.message(to_broker=stranger)]
        error, refused = _refused(settings, forwarder.chunk(rows))
        assert isinstance(error, AnotherBroker)
        assert (error.others, refused) == ([str(stranger)], _ids(rows[1:]))
        assert _ids(stored()) == []
        _store(settings, forwarder.chunk(rows[:1]))
        assert _ids(stored()) == _ids(rows[:1])

    def test_a_message_that_is_rejected_leaves_its_neighbours(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        rejected: Row | None,
    ) -> None:
        rows = forwarder.messages(5, shard=0)
        if rejected is None:
            _store(settings, forwarder.chunk(rows))
            assert _ids(stored()) == _ids(rows)
            return
        rows[2] |= rejected
        with pytest.raises(Rejected):
            _store(settings, forwarder.chunk(rows))
        assert _ids(stored()) == []
        for batch in (rows[:2], rows[3:]):
            _store(settings, forwarder.chunk(batch))
        assert _ids(stored()) == _ids([*rows[:2], *rows[3:]])

    def test_a_login_that_is_refused_says_so_without_its_secrets(
        self, refused: DestinationSettings
    ) -> None:
        with (
            pytest.raises(SafError) as caught,
            closing(refused.open("conformance")) as destination,
        ):
            destination.connect()
        assert "conformance" in str(caught.value) or "database" in str(caught.value)
        shown = f"{caught.value} {caught.value!r} {refused!r} {refused} {refused.model_dump_json()}"
        for secret in _secrets(refused):
            assert secret not in shown

    def test_it_may_be_unavailable_and_come_back(
        self,
        settings: DestinationSettings,
        forwarder: Forwarder,
        stored: Read,
        unavailable: WhileUnavailable,
    ) -> None:
        rows = forwarder.messages(6)
        once = settings.capabilities.exactly_once
        with closing(settings.open("conformance")) as destination:
            forwarder.learn(destination.store(forwarder.chunk(rows[:3]), exactly_once=once))
            with unavailable():
                for _ in range(2):
                    with pytest.raises(Unavailable):
                        destination.store(forwarder.chunk(rows[3:]), exactly_once=once)
            destination.store(forwarder.chunk(rows[3:]), exactly_once=once)
        self._is_there(settings, stored, rows)

    # Identity and contents

    def test_it_is_the_same_one_whoever_asks(
        self, settings: DestinationSettings, destination: Destination
    ) -> None:
        identity = destination.identity()
        copy = pickle.loads(pickle.dumps(settings))  # noqa: S301 - our own  # nosec B301
        assert copy.identity("conformance") == identity
        with closing(copy.open("conformance")) as another:
            assert another.identity() == identity
        if (broker := settings.broker()) is not None:
            assert isinstance(broker, Dsn)
        assert [*settings.problems("conformance")] == []

    def test_what_it_holds_can_be_compared(
        self, settings: DestinationSettings, forwarder: Forwarder
    ) -> None:
        rows = forwarder.messages(8)
        rows.append(forwarder.message(to_service="a topic", shard=1))
        old = timedelta(days=1)
        rows.append(forwarder.message(created_at=CREATED_AT - old, shard=3))
        _store(settings, forwarder.chunk(rows))
        if not settings.capabilities.reads_back:
            with pytest.raises(CannotReadBack, match="conformance"):
                settings.reading("conformance").__enter__()
            return
        question = Compared(
            source=forwarder.source, shards=SHARDS, since=CREATED_AT, until=None, topics=["a topic"]
        )
        with settings.reading("conformance") as reading:
            assert reading.name == "conformance"
            assert reading.identity() == settings.identity("conformance")
            figures = {figure.shard: figure for figure in reading.figures(question)}
            held = [entry[0] for entry in reading.stored(question, [0])]
            beginnings = dict(reading.begun(forwarder.source, ["a topic"]))
        assert sum(figure.stored for figure in figures.values()) == 9
        assert sum(figure.plain for figure in figures.values()) == 8
        wanted = [r["message_id"].bytes for r in rows if r["to_service"] == "a topic"]
        if set(figures) == set(range(SHARDS)):
            wanted += [r["message_id"].bytes for r in rows[:8] if r["shard"] == 0]
            assert sorted(held) == held
        assert set(wanted) <= set(held)
        assert beginnings == {"a topic": CREATED_AT}


def _store(
    settings: DestinationSettings, chunk: Chunk, *, exactly_once: bool | None = None
) -> Stored:
    """Store a chunk as a separate process would."""
    return all_stored(_answer(settings, chunk, exactly_once=exactly_once))


def _refused(settings: DestinationSettings, chunk: Chunk) -> tuple[SafError, list[UUID]]:
    """Return why a chunk is refused, and the messages that the refusal names."""
    refusal = _answer(settings, chunk)
    assert isinstance(refusal, Refusal)
    assert refusal.rows is not None
    return refusal.error, [UUID(bytes=one) for one in refusal.rows["message_id"].to_pylist()]


def _answer(
    settings: DestinationSettings, chunk: Chunk, *, exactly_once: bool | None = None
) -> Stored | Refusal:
    once = settings.capabilities.exactly_once if exactly_once is None else exactly_once
    with closing(settings.open("conformance")) as destination:
        return destination.store(chunk, exactly_once=once)


def _ids(rows: Sequence[Mapping[str, Any]]) -> list[UUID]:
    return [row["message_id"] for row in rows]


def _secrets(settings: DestinationSettings) -> Iterator[str]:
    for value in dict(settings).values():
        if isinstance(value, pydantic.SecretStr):
            yield value.get_secret_value()
        elif isinstance(value, Dsn) and value.parts.get("password"):
            yield str(value.parts["password"])
