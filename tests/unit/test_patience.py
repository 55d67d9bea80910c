"""The watch that ends waits without file descriptors, and which answers are asked for again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from saf.database import bounds
from saf.database.bounds import while_unavailable
from saf.destinations import Refusal
from saf.errors import Refused, Rejected, Unavailable

PROGRAM = """
import os, resource, socket, threading
from saf.database.bounds import answer_within, shut

here, there = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    threading.Timer(1, lambda: [os.close(one) for one in taken]).start()
with answer_within(0.1, lambda: shut([here.fileno()])):
    assert here.recv(1) == b""
"""


def test_a_wait_that_cannot_be_ended_for_want_of_descriptors_is_ended_later() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], timeout=20, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def answering(*answers: Refusal | Exception) -> Callable[[], Refusal]:
    left = iter(answers)

    def answer() -> Refusal:
        one = next(left)
        if isinstance(one, Exception):
            raise one
        return one

    return answer


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(bounds, "LONGEST_WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_reports_an_outage_is_asked_for_again_like_a_raised_error() -> None:
    down = Unavailable("destination 'mom'", "it is down")
    rejected = Refusal(error=Rejected("destination 'mom'", "it is bad"))
    for first in (Refusal(error=down), down):
        answer = answering(first, rejected, down)
        assert while_unavailable(3, answer, lambda found: found.error) is rejected


@pytest.mark.usefixtures("impatient")
def test_the_last_answer_is_returned_and_the_last_error_raised() -> None:
    first, last = (Refusal(error=Unavailable("destination 'mom'", why)) for why in ("a", "b"))
    assert while_unavailable(2, answering(first, last), lambda found: found.error) is last
    with pytest.raises(Unavailable, match="b"):
        while_unavailable(2, answering(first, last.error), lambda found: found.error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "error",
    [
        Refused("destination 'mom'", "the login", "fix it"),
        Unavailable("destination 'mom'", "it hangs", hangs=True),
    ],
    ids=["refused", "hangs"],
)
def test_an_answer_that_no_retry_changes_is_returned_at_once(error: Unavailable) -> None:
    refusal = Refusal(error=error)
    assert while_unavailable(3, answering(refusal), lambda found: found.error) is refusal
