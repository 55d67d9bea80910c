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
from tests.sagas import SERVICES, STEPS, program
from tests.tiers import sized

RECEIVING = ("receive_read", "receive_handled", "receive_settled", "receive_committed")
KINDS: tuple[tuple[str, dict[str, object]], ...] = (
    ("done", {}),
    ("done", {"amount": 2, "total": 30}),
    ("sold out", {"article": "rare"}),
    ("no money", {"customer": "poor"}),
    ("late", {"customer": "silent"}),
)
MONEY = AMOUNT = 100_000


def totals(app: Dsn) -> tuple[int, int]:
    ((money, stock),) = sagas.rows(
        app,
        "SELECT (SELECT sum(balance) FROM account) "
        "       + (SELECT coalesce(sum(total), 0) FROM payment),"
        "       (SELECT sum(amount) FROM article) "
        "       + (SELECT coalesce(sum(amount), 0) FROM reservation)",
    )
    return money, stock


def turn(app: Dsn, where: str = "", point: str = "") -> dict[str, int]:
    """Let each service work in a process of its own; one may be killed at a point."""
    processes = {
        service: start(program, app, service, failpoint=point if service == where else "")
        for service in SERVICES
    }
    return {service: wait(process) for service, process in processes.items()}


def is_over(app: Dsn, orders: int) -> bool:
    allowances = "SELECT count(allowance) FROM saf.cursor"
    open_ends = "SELECT count(*) FROM saf.conversation WHERE state <> 'closed'"
    return (
        len(sagas.outcomes(app)) == orders
        and sagas.rows(app, allowances) == [(0,)]
        and sagas.rows(app, open_ends) == [(0,)]
        and not waiting(app)
    )


def places(seed: int) -> list[tuple[str, str]]:
    """Each step of each service, and how far its receiver gets, in random order."""
    found = [(service, step) for service in SERVICES for step in STEPS[service]]
    found += [(service, point) for service in SERVICES for point in RECEIVING]
    random.Random(seed).shuffle(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(sized(1, 4)))
def test_processes_killed_at_each_step_lose_and_double_neither_money_nor_stock(
    app: Dsn, seed: int
) -> None:
    sagas.prepare(app, money=MONEY, amount=AMOUNT)
    before = totals(app)
    expected: dict[str, str] = {}
    for where, point in places(seed):
        killed = False
        for attempt in range(20):
            for result, changes in KINDS:
                number = f"{point} {attempt} {result} {len(expected)}"
                sagas.place(app, number, **changes)
                expected[number] = result
            for _ in range(6):
                codes = turn(app, where, point)
                assert set(codes.values()) <= {0, -signal.SIGKILL}
                let_the_server_notice(app)
                assert totals(app) == before
                killed = killed or codes[where] == -signal.SIGKILL
                if killed:
                    break
            if killed:
                break
            time.sleep(0.1)
        assert killed, f"{where} never came to {point}"
    deadline = time.monotonic() + 60
    while not is_over(app, len(expected)):
        assert time.monotonic() < deadline, "it does not come to an end"
        assert set(turn(app).values()) == {0}
        let_the_server_notice(app)
        time.sleep(0.05)
    assert totals(app) == before
    sagas.check(app, expected)
    assert dead(app) == []
