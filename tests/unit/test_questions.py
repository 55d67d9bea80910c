"""Questions: those that hang hold up no other, and no more are asked at a time than was said."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from threading import Event

import pytest

from saf.operating.watch import MOST_TIMES, Questions
from tests.waits import until

PATIENCE = 20.0
"""Much longer than it takes: what hangs would hang for ever."""


def test_those_that_hang_hold_up_no_other() -> None:
    over, questions = Event(), Questions(4, "test")
    for _ in range(3 * 4):
        questions.ask(over.wait)
    healthy = questions.ask(lambda: "fine")
    questions.wait([healthy], PATIENCE)
    assert healthy.done()
    over.set()


def test_brokers_in_doubt_hold_up_none_that_has_answered_however_many_they_are() -> None:
    over, questions = Event(), Questions(2, "test")
    hung = [questions.ask(over.wait, in_doubt=True) for _ in range(4 * MOST_TIMES)]
    healthy = [questions.ask(lambda: "fine") for _ in range(20)]
    questions.wait(healthy, PATIENCE)
    assert all(one.done() for one in healthy)
    assert not any(one.done() for one in hung)
    over.set()


def test_no_more_are_asked_at_a_time_and_threads_are_bounded() -> None:
    lock, at_work, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.01)
        with lock:
            at_work -= 1

    questions = Questions(3, "brief")
    questions.wait([questions.ask(work) for _ in range(60)], PATIENCE)
    assert 1 <= most <= 3 * MOST_TIMES
    over, questions = Event(), Questions(1, "hangs")
    hung = [questions.ask(over.wait) for _ in range(10)]
    questions.wait(hung, 4)
    assert sum(one.running() for one in hung) <= MOST_TIMES
    over.set()
    questions.wait(hung, PATIENCE)
    assert all(one.done() for one in hung)
    until(lambda: not any(one.name == "hangs" for one in threading.enumerate()))


def test_at_the_end_nobody_waits_and_nothing_more_is_asked() -> None:
    over, questions = Event(), Questions(1, "test")
    hung, later = questions.ask(over.wait), questions.ask(lambda: "asked")
    ending = threading.Timer(0.1, questions.close)
    ending.start()
    questions.wait([hung, later], PATIENCE)
    with pytest.raises(CancelledError):
        later.result(0)
    over.set()
