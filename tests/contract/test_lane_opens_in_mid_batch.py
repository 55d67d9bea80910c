"""A lane that opens while a batch is taken up again holds what the batch had set aside before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saf.database import Dsn
from saf.failpoints import arm
from tests.destinations import NOWHERE, count, route, send_to
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, let_time_pass


class Crash(BaseException):
    """The process dies here."""


@pytest.fixture
def run(app: Dsn, mom: Dsn, other: Dsn) -> Callable[..., None]:
    """A cycle in chunks of two messages."""

    def run(**more: Dsn) -> None:
        rules = forwarding_rules("exactly_once", 2, **{"mom": mom, "other": other, **more})
        with Cycle(app, rules) as cycle:
            cycle.run()

    return run


def die() -> None:
    raise Crash


def test_what_was_set_aside_before_a_crash_is_not_passed_by_what_comes_after_it_in_its_batch(
    app: Dsn, mom: Dsn, other: Dsn, run: Callable[..., None]
) -> None:
    with connect(app) as connection:
        route(connection, "audit", "other")
        send_to(connection, "billing", "1")
        send_to(connection, "audit", "a")
        run(mom=NOWHERE)
        assert count(app, "parked") == 1

        for service, body in [("billing", "2"), ("audit", "b"), ("billing", "3"), ("audit", "c")]:
            send_to(connection, service, body)
        arm("set_aside", die)
        with pytest.raises(Crash):
            run()
        assert count(app, "parked") == 2, "the second waits behind the first"

        let_time_pass(app)
        for _ in range(3):
            run()
            let_time_pass(app)
    assert bodies(mom) == ["1", "2", "3"]
    assert bodies(other) == ["a", "b", "c"]
    assert count(app, "parked") == count(app, "backoff") == 0
