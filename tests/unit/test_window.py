"""The window of a dispatcher: what it holds, whose it is, and what goes with a shard."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from saf.errors import Fenced
from saf.received import READ, Received
from saf.receiving.dispatch.progress import InHand
from saf.receiving.dispatch.window import State, Window
from saf.receiving.outcome import HANDLED, Parked
from saf.receiving.retries import FailedAttempt, Waiting
from saf.setaside.lane import Kind


def message(id_: int, key: str = "a", shard: int = 1, parked_id: int | None = None) -> Received:
    columns: dict[str, Any] = {
        "id": id_,
        "shard": shard,
        "message_id": UUID(int=id_).bytes,
        "key": key,
        "body": b"12345",
    }
    return Received(tuple(columns.get(name) for name in READ), parked_id)


def hand(shard: int = 1, epoch: int = 1, **more: Any) -> InHand:
    given: dict[str, Any] = {"batch": 1, "done": "1:1:", "open": "9:9:", "position": 0} | more
    return InHand(shard=shard, epoch=epoch, **given)


def failed(lane: str, shard: int = 1) -> FailedAttempt:
    return FailedAttempt(lane=lane, shard=shard, id=1, attempts=1, error="HTTP 503")


@pytest.fixture
def window() -> Window:
    """It has shards 1 and 2, each with a message in memory."""
    one = Window()
    one.own([hand(1), hand(2)])
    one.add(message(1, "a", 1))
    one.add(message(2, "b", 2))
    return one


def test_a_shard_that_went_and_came_back_is_read_anew(window: Window) -> None:
    """Its epoch says so: another member may have answered what is in memory here."""
    assert window.own([hand(1), hand(2, epoch=2)]) == [2]
    assert window.shards[2].epoch == 2
    assert [*window.lanes] == ["a"]
    assert (window.held, window.bytes) == (1, 5)
    sent = window.next()
    assert sent is not None
    assert sent.message.shard == 1
    assert window.next() is None
    window.put_back(sent)
    assert window.own([hand(1), hand(2, epoch=2)]) == []


def test_a_shard_that_stays_keeps_what_is_in_memory(window: Window) -> None:
    before = window.shards[1]
    assert window.own([hand(1, position=99), hand(2)]) == []
    assert window.shards[1] is before
    assert window.held == 2


def test_no_shard_is_let_go_while_a_message_of_it_is_in_flight(window: Window) -> None:
    sent = window.next()
    assert sent is not None
    with pytest.raises(Fenced):
        window.own([hand(3 - sent.message.shard)])
    window.put_back(sent)
    assert window.own([hand(3 - sent.message.shard)]) == [sent.message.shard]


def test_no_shard_is_let_go_before_its_answers_are_marked(window: Window) -> None:
    sent = window.next()
    assert sent is not None
    window.done(sent)
    assert window.busy() == {sent.message.shard}
    with pytest.raises(Fenced):
        window.own([])
    assert window.marks() is not None
    assert window.own([]) == [1, 2]


def test_of_shards_that_leave_nothing_more_is_sent(window: Window) -> None:
    window.leaving = frozenset({1})
    assert window.anything_ready
    sent = window.next()
    assert sent is not None
    assert sent.message.shard == 2
    assert window.next() is None
    assert not window.anything_ready


def test_of_a_key_one_message_is_in_flight_at_a_time(window: Window) -> None:
    window.add(message(3, "a", 1))
    first, second = window.next(), window.next()
    assert {one.message.id for one in (first, second) if one} == {1, 2}
    assert window.next() is None
    assert first is not None
    window.put_back(first)
    again = window.next()
    assert again is not None
    assert again.message.id == first.message.id
    window.done(again)
    following = window.next()
    assert following is not None
    assert following.message.id == 3


def test_while_a_later_message_of_a_key_is_in_flight_the_key_does_not_get_a_second_turn(
    window: Window,
) -> None:
    window.add(message(3, "a", 1))
    first = window.next()
    assert first is not None
    assert window.next_of(first) is not None
    window.put_back(first)
    sent = window.next()
    assert sent is not None
    assert sent.message.shard == 2
    assert window.next() is None


def test_what_follows_a_key_that_waits_parks_behind_it_until_that_is_written(
    window: Window,
) -> None:
    sent = window.next()
    assert sent is not None
    window.add(message(3, sent.message.lane, sent.message.shard))
    window.wait(
        sent, Waiting(lane=sent.message.lane, shard=sent.message.shard, attempts=1, error="503")
    )
    window.add(message(4, sent.message.lane, sent.message.shard))
    marks = window.marks()
    assert marks is not None
    behind = dict.fromkeys([sent.message.id, 3, 4], Parked.of(Kind.KEY, sent.message.lane))
    assert {one.id: outcome for one, outcome in marks.outcomes.items()} == behind
    assert sent.message.lane in window.known_lanes
    window.written(marks)
    assert sent.message.lane not in window.known_lanes
    window.add(message(5, sent.message.lane, sent.message.shard))
    assert window.held == 2


def test_a_key_whose_attempt_is_counted_stays_known_until_its_next_failure_is_written(
    window: Window,
) -> None:
    window.own([hand(1), hand(2), hand(3)])
    window.count([failed("c", shard=3)])
    earlier = window.marks()
    assert earlier is not None
    window.add_parked("c", 3, [message(7, "c", 3, parked_id=17)])
    while (sent := window.next()) is not None and sent.message.lane != "c":
        pass
    assert sent is not None
    window.wait(sent, Waiting(lane="c", shard=3, attempts=1, error="503"))
    window.written(earlier)
    assert "c" in window.known_lanes
    marks = window.marks()
    assert marks is not None
    window.written(marks)
    assert "c" not in window.known_lanes


def test_a_message_whose_time_has_come_is_not_read_again_before_its_end_is_written() -> None:
    window = Window()
    window.own([hand(1)])
    window.add(message(1, parked_id=11))
    assert window.known_late == [11]
    sent = window.next()
    assert sent is not None
    window.done(sent)
    assert window.known_late == [11]
    marks = window.marks()
    assert marks is not None
    assert [(one.parked_id, outcome) for one, outcome in marks.outcomes.items()] == [(11, HANDLED)]
    assert marks.timed == {1}
    assert window.known_late == []


def test_a_message_whose_time_has_come_goes_behind_its_key_if_that_waits() -> None:
    window = Window()
    window.own([hand(1)])
    window.add(message(1, parked_id=11), Parked.of(Kind.KEY, "a"))
    window.add(message(2, shard=2, parked_id=12))
    marks = window.marks()
    assert marks is not None
    assert [(one.parked_id, outcome) for one, outcome in marks.outcomes.items()] == [
        (11, Parked.of(Kind.KEY, "a"))
    ]
    assert marks.timed == {1}
    assert window.known_late == []
    assert window.held == 0


def test_what_was_late_goes_with_its_shard() -> None:
    window = Window()
    window.own([hand(1), hand(2)])
    window.add(message(1, "a", 1, parked_id=11))
    window.add(message(2, "b", 2, parked_id=12))
    assert window.own([hand(2)]) == [1]
    assert window.known_late == [12]


def test_a_shard_whose_attempts_are_counted_is_not_let_go_before_they_are_written(
    window: Window,
) -> None:
    counted = failed("c")
    window.count([counted])
    assert window.busy() == {1}
    with pytest.raises(Fenced):
        window.own([hand(2)])
    marks = window.marks()
    assert marks is not None
    assert marks.counted == {"c": counted}
    assert [mark.shard for mark in marks.cursors] == [1]
    assert window.own([hand(2)]) == [1]


def test_a_key_in_memory_does_not_wait_because_an_earlier_attempt_is_counted(
    window: Window,
) -> None:
    window.count([failed("a")])
    assert window.marks() is None


def test_a_key_that_rests_is_not_woken_after_its_shard_has_gone(window: Window) -> None:
    sent = window.next()
    assert sent is not None
    window.rest(sent)
    assert window.resting == 1
    window.own([hand(3 - sent.message.shard)])
    assert window.resting == 0
    window.wake(sent.message.lane)
    other = window.next()
    assert other is not None
    assert other.message.lane != sent.message.lane
    assert window.next() is None


def test_a_key_whose_turn_has_come_again_does_not_wait_for_a_failure_before(
    window: Window,
) -> None:
    window.count([failed("a")])
    assert window.marks() is None


def test_a_batch_ends_though_its_end_is_learned_after_its_last_mark(window: Window) -> None:
    for _ in range(2):
        walk = window.next()
        assert walk is not None
        window.done(walk)
    marks = window.marks()
    assert marks is not None
    assert not any(cursor.closed for cursor in marks.cursors)
    window.written(marks)
    window.shards[1].whole = True
    marks = window.marks()
    assert marks is not None
    assert [(cursor.shard, cursor.closed) for cursor in marks.cursors] == [(1, True)]


def test_a_walk_names_its_message_and_its_state(window: Window) -> None:
    sent = window.next()
    assert sent is not None
    named = f"message {sent.message.message_id} of '{sent.message.lane}'"
    assert str(sent) == f"{named}, in flight"
    window.reject(sent, "rejected", "HTTP 400")
    assert str(sent) == f"{named}, ended: {sent.outcome}"


def test_a_walk_that_has_ended_takes_no_further_step(window: Window) -> None:
    sent = window.next()
    assert sent is not None
    window.done(sent)
    with pytest.raises(AssertionError, match="it cannot be in flight"):
        sent.step(State.IN_FLIGHT, State.QUEUED)
