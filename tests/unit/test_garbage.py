"""The garbage collector rests while a chunk is in Python, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from saf.sources import garbage
from saf.sources.garbage import uncollected


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_blocks_of_two_threads_share_one_rest() -> None:
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="bad"), uncollected():
        raise ValueError("bad")
    assert gc.isenabled()


def test_an_application_that_has_disabled_its_collector_keeps_it_disabled() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_blocks_that_always_overlap_do_not_keep_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LONGEST_SECONDS", 0.0)
    with uncollected():
        lost = weakref.ref(Cycle())
        with uncollected():
            assert lost() is not None
        assert lost() is None


def test_what_is_in_hand_for_a_moment_is_not_looked_through() -> None:
    with uncollected():
        lost = weakref.ref(Cycle())
        with uncollected():
            pass
        assert lost() is not None
