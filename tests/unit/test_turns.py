"""Turns: of idle readers, one asks for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from saf.log.pauses import READERS, Turn

NEVER = float("inf")


def test_one_reader_asks_at_a_time_and_passes_the_turn_on() -> None:
    turn, stopping = Turn(3), threading.Event()
    inside: list[int] = []
    most: list[int] = []

    def ask(number: int) -> None:
        with turn.taken(NEVER, stopping):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    "end",
    [
        lambda stopping: (NEVER, stopping.set),
        lambda _: (time.monotonic() + 0.2, lambda: None),
    ],
    ids=["stopped", "deadline"],
)
def test_a_reader_waits_for_its_turn_until_it_should_stop(
    end: Callable[[threading.Event], tuple[float, Callable[[], None]]],
) -> None:
    turn, stopping, ended = Turn(2), threading.Event(), threading.Event()
    deadline, stop = end(stopping)

    def ask() -> None:
        with turn.taken(deadline, stopping):
            ended.set()

    with turn.taken(NEVER, stopping):
        thread = threading.Thread(target=ask)
        thread.start()
        assert not ended.wait(0.05)
        stop()
        assert ended.wait(5)
        thread.join()
    with turn.taken(NEVER, threading.Event()):  # nobody else has released it
        pass


def test_the_turn_comes_as_often_as_all_would_ask_up_to_some() -> None:
    asked = {}
    for readers in (1, 4, READERS, 1000):
        turn = Turn(readers)
        turn._pauses._since = -NEVER  # nothing was found for ever
        asked[readers] = turn.next(0.5)
    assert asked == {1: 0.5, 4: 0.125, READERS: 0.5 / READERS, 1000: 0.5 / READERS}
