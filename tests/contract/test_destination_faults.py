"""Whose fault an error of a destination is: a message's only if the destination says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from saf.database import Dsn, fetch
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.postgresql.inbox import PostgresInbox
from saf.engine.transforming import Transforming
from saf.engine.work import Receipt
from saf.errors import Rejected, Unavailable
from saf.setaside.waiting import parked, retry_now
from tests.destinations import count, route, send_to
from tests.hostile import dead
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, let_time_pass

INBOX = "saf.destinations.postgresql.inbox.PostgresInbox"


def raising(error: Callable[[], Exception]) -> type[PostgresInbox]:
    class Raising(PostgresInbox):
        """Raises for whatever is to be stored at the destination ``other``."""

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            if self.name == "other":
                raise error()
            return super().store(chunk, exactly_once=exactly_once)

    return Raising


class Rejecting(PostgresInbox):
    """Rejects a chunk that has a message whose body begins with "bad"."""

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        if any(body.startswith(b"bad") for body in chunk.rows["body"].to_pylist()):
            raise Rejected(f"destination {self.name!r}", "it is bad")
        return super().store(chunk, exactly_once=exactly_once)


def send(app: Dsn, *messages: str, service: str = "shipping") -> None:
    with connect(app) as connection:
        for body in messages:
            send_to(connection, service, body)


@pytest.fixture
def several(app: Dsn, mom: Dsn, other: Dsn) -> tuple[Dsn, Dsn, Dsn]:
    return app, mom, other


def problems(receipts: list[Receipt]) -> list[tuple[str | None, str | None]]:
    return [(one.error_kind, one.error) for one in receipts if one.error_kind]


@pytest.mark.parametrize(
    ("error", "quality"),
    [
        (lambda: TypeError("expected bytes, got Buffer"), "exactly_once"),
        (lambda: TypeError("expected bytes, got Buffer"), "at_least_once"),
        (lambda: RuntimeError("the client is in no state to send"), "exactly_once"),
        (lambda: OSError("broken"), "exactly_once"),
    ],
    ids=["TypeError", "at least once", "RuntimeError", "OSError"],
)
def test_what_a_client_raises_makes_no_dead_letters_and_delays_nobody_else(
    several: tuple[Dsn, Dsn, Dsn],
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], Exception],
    quality: str,
) -> None:
    app, mom, other = several
    with connect(app) as connection:
        route(connection, "shipping", "other")
    send(app, *(f"s{number}" for number in range(20)))
    send(app, "b0", "b1", service="billing")
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, raising(error))
        receipts = forward(app, quality, mom=mom, other=other)
    assert dead(app) == []
    assert bodies(mom) == ["b0", "b1"]
    assert [one.destination for one in receipts if one.down] == ["other"]
    with connect(app) as connection:
        ((said,),) = fetch(connection, "SELECT error FROM saf.backoff")
    assert f"{type(error()).__name__}: {error()}" in said
    let_time_pass(app)
    forward(app, quality, mom=mom, other=other)
    assert bodies(other) == [f"s{number}" for number in range(20)]


def test_a_client_that_raises_when_it_is_asked_which_it_is_makes_no_dead_letters(
    several: tuple[Dsn, Dsn, Dsn], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nameless(PostgresInbox):
        def identity(self) -> UUID:
            if self.name == "other":
                raise TypeError("no identity")
            return super().identity()

    app, mom, other = several
    with connect(app) as connection:
        route(connection, "shipping", "other")
    send(app, "s0")
    send(app, "b0", service="billing")
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, Nameless)
        receipts = forward(app, mom=mom, other=other)
    assert [one.destination for one in receipts if one.down] == ["other"]
    assert (dead(app), bodies(mom)) == ([], ["b0"])
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == ["s0"]


def test_the_only_destination_whose_client_raises_keeps_the_batch_open(
    app: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(app, *(f"s{number}" for number in range(20)))
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, raising(lambda: TypeError("no")))
        (problem,) = problems(forward(app, other=other))
    assert problem[0] == "Faulty"
    assert "TypeError: no" in (problem[1] or "")
    assert (dead(app), count(app, "parked")) == ([], 0)
    let_time_pass(app)
    forward(app, other=other)
    assert bodies(other) == [f"s{number}" for number in range(20)]


def test_the_only_destination_that_has_stored_what_follows_a_refused_message_lets_that_one_wait(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Partly(PostgresInbox):
        """Stores all but the first message, and then goes down."""

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            rows = chunk.rows.slice(1)
            super().store(replace(chunk, rows=rows), exactly_once=exactly_once)
            return Refusal(error=Unavailable("destination 'mom'", "it went down"), stored=rows)

    send(app, "s0", "s1", "s2")
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, Partly)
        forward(app, "at_least_once", mom=mom)
    assert (bodies(mom), count(app, "parked")) == (["s1", "s2"], 1)
    let_time_pass(app)
    forward(app, "at_least_once", mom=mom)
    assert bodies(mom) == ["s1", "s2", "s0"]


def test_a_client_that_raised_is_opened_anew_for_the_next_attempt(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stale(PostgresInbox):
        """Raises for ever once it has lost its connection, as clients of libraries may."""

        opened = 0

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            Stale.opened += 1
            self.number = Stale.opened

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            if self.number == 1:
                raise AttributeError("'NoneType' object has no attribute 'send'")
            return super().store(chunk, exactly_once=exactly_once)

    send(app, "one", "two")
    monkeypatch.setattr(INBOX, Stale)
    rules = forwarding_rules(mom=mom)
    with Cycle(app, type(rules)(**{**rules.__dict__, "attempts": 2})) as cycle:
        assert problems(cycle.run()) == []
    assert bodies(mom) == ["one", "two"]


def test_what_a_client_raised_is_shown_without_the_secrets_of_its_settings(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Dsn(f"{mom.conninfo} password=geheim")
    send(app, "one")
    monkeypatch.setattr(INBOX, raising(lambda: ValueError(f"cannot use {there.conninfo}")))
    (problem,) = problems(forward(app, other=there))
    assert "ValueError: cannot use" in (problem[1] or "")
    assert "geheim" not in (problem[1] or "")


@pytest.mark.parametrize("waits", [False, True], ids=["new", "parked"])
def test_more_than_a_few_rejections_in_a_row_stop_a_destination_until_an_operator_lifts_it(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    with connect(app) as connection:
        route(connection, "shipping", "other")
    send(app, *(f"bad {number:02}" for number in range(30)))
    send(app, "b0", "b1", service="billing")
    if waits:
        with monkeypatch.context() as patch:
            patch.setattr(INBOX, raising(lambda: TypeError("no")))
            forward(app, mom=mom, other=other)
        let_time_pass(app)
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, Rejecting)
        (problem,) = problems(forward(app, mom=mom, other=other))
    assert problem[0] == "Braked"
    assert "saf parked retry-now --destination other" in (problem[1] or "")
    assert dead(app) == [(f"bad {number:02}", "rejected") for number in range(10)]
    assert (count(app, "parked"), bodies(mom)) == (20, ["b0", "b1"])

    send(app, "good")
    let_time_pass(app)
    forward(app, mom=mom, other=other)
    assert bodies(other) == [], "no time lifts the brake"
    with connect(app) as connection:
        (lane,) = parked(connection).shown
        assert lane.braked
        assert retry_now(connection, "other") == 1
    forward(app, mom=mom, other=other)
    assert bodies(other) == [*(f"bad {number:02}" for number in range(10, 30)), "good"]


def test_rejections_in_a_row_are_counted_over_runs_and_a_stored_message_ends_the_row(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INBOX, Rejecting)

    def run(*messages: str) -> list[str | None]:
        send(app, *messages)
        return [kind for kind, _ in problems(forward(app, mom=mom))]

    assert run(*(f"bad {number}" for number in range(5))) == []
    assert run("good", *(f"bad {number}" for number in range(9))) == []
    assert run("good") == []
    for number in range(9):
        assert run(f"bad {number}") == []
    assert run("bad") == ["Braked"]
    run("bad", "good")
    assert len(dead(app)) == 5 + 9 + 10


def test_a_destination_that_rejects_nothing_counts_no_rejections(app: Dsn, mom: Dsn) -> None:
    send(app, "good")
    assert [one.rejecting for one in forward(app, mom=mom) if one.destination] == [0]


def test_a_stop_is_heard_between_the_halves_of_what_is_rejected(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Rejecting):
        """Rejects one message of two, and is told to stop after some attempts."""

        attempts = 0

        def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
            Stopped.attempts += 1
            if Stopped.attempts == 20:
                with connect(app) as connection:
                    connection.execute("UPDATE saf.member SET stopping = true")
            return super().store(chunk, exactly_once=exactly_once)

    whole = [f"{'bad' if number % 2 else 'good'} {number:03}" for number in range(100)]
    send(app, *whole)
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, Stopped)
        patch.setattr("saf.engine.context.ASK_SECONDS", 0.0)
        receipts = forward(app, mom=mom)
    assert any(one.stopped for one in receipts)
    assert Stopped.attempts < 30
    stored, buried = bodies(mom), [body for body, _ in dead(app)]
    done = {*stored, *buried}
    assert {*whole[: len(done)]} == done, "the others wait"
    forward(app, mom=mom)
    assert bodies(mom) == [body for body in whole if body not in buried], "in their order"


def test_at_most_once_a_client_that_raises_buries_no_more_than_what_may_have_left(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(app, *(f"s{number}" for number in range(30)))
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, raising(lambda: TypeError("no")))
        for sent in (10, 20):  # the first chunk is new, the second was parked
            forward(app, "at_most_once", 10, other=mom)
            assert [body for body, _ in dead(app)] == [f"s{number}" for number in range(sent)]
            let_time_pass(app)
    forward(app, "at_most_once", 10, other=mom)
    assert bodies(mom) == [f"s{number}" for number in range(20, 30)]


def test_at_most_once_what_a_transform_leaves_out_is_not_buried_with_what_may_have_left(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_b(_: Transforming, rows: pa.Table) -> pa.Table:
        return rows.filter(pc.not_equal(rows["body"], pa.scalar(b"b", rows["body"].type)))

    monkeypatch.setattr(Transforming, "outputs", without_b)
    monkeypatch.setattr(Transforming, "__bool__", lambda _: True)
    monkeypatch.setattr(INBOX, raising(lambda: TypeError("no")))
    send(app, "a", "b", "c")
    forward(app, "at_most_once", other=mom)
    assert [body for body, _ in dead(app)] == ["a", "c"]


def test_at_most_once_rejections_in_a_row_of_parked_messages_stop_a_destination(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(app, *(f"bad {number:02}" for number in range(40)))
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, raising(lambda: TypeError("no")))
        forward(app, "at_most_once", 10, other=mom)
    with monkeypatch.context() as patch:
        patch.setattr(INBOX, Rejecting)
        for _ in range(2):
            let_time_pass(app)
            forward(app, "at_most_once", 10, other=mom)
            assert len(dead(app)) == 20
    with connect(app) as connection:
        (lane,) = parked(connection).shown
        assert lane.braked
