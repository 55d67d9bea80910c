"""The garbage collector waits for more objects while a chunk is in Python, and no longer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from saf.sources.garbage import MANY, rarely_collected


@pytest.fixture(autouse=True)
def _before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


def test_blocks_of_two_threads_share_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rarely_collected:
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with rarely_collected:
        thread.start()
        assert entered.wait(10)
        assert gc.get_threshold() == (MANY, 11, 12)
    assert gc.get_threshold() == (MANY, 11, 12)
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 11, 12)


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="bad"), rarely_collected:
        raise ValueError("bad")
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("threshold", [0, 10 * MANY])
def test_an_application_that_has_set_it_higher_or_disabled_it_keeps_that(threshold: int) -> None:
    gc.set_threshold(threshold, 11, 12)
    with rarely_collected:
        assert gc.get_threshold() == (threshold, 11, 12)
    assert gc.get_threshold() == (threshold, 11, 12)


def test_garbage_in_a_block_is_collected_in_the_end() -> None:
    collected: list[int] = []
    gc.callbacks.append(lambda phase, _: collected.append(1) if phase == "stop" else None)
    try:
        with rarely_collected:
            kept = [[number] for number in range(MANY // 2)]
            assert not collected
            kept += [[number] for number in range(MANY)]
            assert collected
    finally:
        gc.callbacks.pop()
