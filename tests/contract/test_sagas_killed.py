"""A saga whose processes are killed at each step: money and stock are conserved."""

from __future__ import annotations

import random
import signal
import time

import pytest

from saf.database import Dsn
from tests import sagas
from tests.processes import start, wait
from tests.receivers import dead, let_the_server_notice, waiting
from tests.sagas import ORDERS, SERVICES, STEPS, program
from tests.tiers import sized
from tests.waits import until

RECEIVING = ("receive_read", "receive_handled", "receive_settled", "receive_committed")
KINDS: tuple[tuple[str, dict[str, object]], ...] = (
    ("done", {}),
    ("done", {"amount": 2, "total": 30}),
    ("sold out", {"article": "rare"}),
    ("no money", {"customer": "poor"}),
    ("late", {"customer": "silent"}),
)
MONEY = AMOUNT = 100_000
TOGETHER = sized(False, True)
"""Whether all services work at the same time, in processes of their own."""


def totals(app: Dsn) -> tuple[int, int]:
    ((money, stock),) = sagas.rows(
        app,
        "SELECT (SELECT sum(balance) FROM account) "
        "       + (SELECT coalesce(sum(total), 0) FROM payment),"
        "       (SELECT sum(amount) FROM article) "
        "       + (SELECT coalesce(sum(amount), 0) FROM reservation)",
    )
    return money, stock


def turn(app: Dsn, where: str = "", point: str = "") -> int:
    """Let each service work; one may be killed at a point. Return its exit code."""
    others = [service for service in SERVICES if service != where]
    if not TOGETHER:
        for service in others:
            program(app, service)
    running = [start(program, app, service) for service in others if TOGETHER]
    code = wait(start(program, app, where, failpoint=point)) if where else 0
    assert [wait(process) for process in running] == [0] * len(running)
    let_the_server_notice(app)
    return code


def is_over(app: Dsn, orders: int) -> bool:
    allowances = "SELECT count(allowance) FROM saf.cursor"
    open_ends = "SELECT count(*) FROM saf.conversation WHERE state <> 'closed'"
    return (
        len(sagas.outcomes(app)) == orders
        and sagas.rows(app, allowances) == [(0,)]
        and sagas.rows(app, open_ends) == [(0,)]
        and not waiting(app)
    )


def places(where: str, seed: int) -> list[str]:
    """Each step of a service, and how far its receiver gets, in random order."""
    found = [*STEPS[where], *(RECEIVING if where == ORDERS or TOGETHER else ())]
    random.Random(seed).shuffle(found)
    return found


def let_die(app: Dsn, where: str, point: str, expected: dict[str, str]) -> None:
    """Place orders of all kinds until a process of the service has been killed at the point."""
    for _ in range(20):
        for result, changes in KINDS:
            number = f"{len(expected)} {result}"
            sagas.place(app, number, **changes)
            expected[number] = result
        for _ in range(6):
            code = turn(app, where, point)
            assert code in (0, -signal.SIGKILL)
            if code:
                return
        time.sleep(0.1)
    raise AssertionError(f"{where} never came to {point}")


@pytest.mark.slow
@pytest.mark.parametrize("where", SERVICES)
@pytest.mark.parametrize("seed", range(sized(1, 3)))
def test_processes_killed_at_each_step_lose_and_double_neither_money_nor_stock(
    app: Dsn, seed: int, where: str
) -> None:
    sagas.prepare(app, money=MONEY, amount=AMOUNT)
    before = totals(app)
    expected: dict[str, str] = {}
    for point in places(where, seed):
        let_die(app, where, point, expected)
        assert totals(app) == before
    until(lambda: turn(app) == 0 and is_over(app, len(expected)))
    assert totals(app) == before
    sagas.check(app, expected)
    assert dead(app) == []
