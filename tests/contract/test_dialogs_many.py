"""Many dialogs and many receivers: each conversation from 1 to N, no gap and no repeat."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from uuid import UUID

import pytest

import saf
from saf.database import Dsn, fetch
from tests.dialog_programs import TABLES, hear, target
from tests.dialogs import SHOP, WAREHOUSE, forward, prepare, receive, states
from tests.pipeline import connect
from tests.processes import run, start, wait
from tests.receivers import dead, let_the_server_notice, waiting
from tests.tiers import sized

POINTS = ("receive_read", "receive_handled", "receive_settled", "receive_committed")


@pytest.fixture(autouse=True)
def _ends(app: Dsn, mom: Dsn) -> None:
    prepare(app, mom)
    with connect(mom) as connection:
        connection.execute(TABLES)


def heard(mom: Dsn) -> dict[UUID, list[int]]:
    with connect(mom) as connection:
        rows = fetch(connection, "SELECT conversation, body FROM heard ORDER BY number")
    found: dict[UUID, list[int]] = defaultdict(list)
    for conversation, body in rows:
        found[conversation].append(int(body))
    return dict(found)


def answers(app: Dsn) -> dict[UUID | None, list[int]]:
    found: dict[UUID | None, list[int]] = defaultdict(list)
    for message in receive(app, SHOP, max_messages=1000):
        found[message.conversation_id].append(int(message.text()))
    return dict(found)


@pytest.mark.full
@pytest.mark.slow
def test_eight_receivers_with_rollbacks_and_restarts_read_every_conversation_from_1_to_n(
    app: Dsn, mom: Dsn
) -> None:
    dialogs, each = 20, 30
    with app.connect(role="test") as connection:
        ends = [
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE)
            for _ in range(dialogs)
        ]
        for number in range(1, each + 1):
            for one in ends:
                one.send(connection, str(number))
            connection.commit()
    forward(app, mom)
    with connect(mom) as connection:  # a transport that repeats itself
        connection.execute(
            "INSERT INTO saf.inbox (to_service, from_service, key, conversation_id, "
            "from_initiator, sequence, headers, body) "
            "SELECT to_service, from_service, key, conversation_id, from_initiator, sequence, "
            "headers, body FROM saf.inbox ORDER BY random() LIMIT 200"
        )
    chance = random.Random(7)
    for round_ in range(2):
        points = [f"{chance.choice(POINTS)}:{chance.randint(1, 8)}" for _ in range(8)]
        processes = [
            start(target, mom, 10 * round_ + number, failpoint=point)
            for number, point in enumerate(points)
        ]
        assert {wait(process) for process in processes} <= {0, -signal.SIGKILL}
    let_the_server_notice(mom)
    assert run(target, mom, 99) == 0
    expected = {one.conversation_id: list(range(1, each + 1)) for one in ends}
    assert heard(mom) == expected
    assert dead(mom) == []
    assert waiting(mom) == []
    forward(app, mom)
    assert answers(app) == expected
    assert set(states(app)) == set(states(mom)) == {"conversing"}


@pytest.mark.full
@pytest.mark.slow
def test_many_dialogs_are_open_at_once(app: Dsn, mom: Dsn) -> None:
    count = sized(1_500, 10_000)
    with app.connect(role="test") as connection:
        ends = [
            saf.begin_dialog(connection, from_service=SHOP, to_service=WAREHOUSE, lifetime=3600)
            for _ in range(count)
        ]
        for number in (1, 2):
            for one in ends:
                one.send(connection, str(number))
    forward(app, mom)
    started = time.monotonic()
    received = receive(mom, WAREHOUSE, hear, max_messages=1000)
    assert len(received) == 2 * count
    assert set(map(tuple, heard(mom).values())) == {(1, 2)}
    forward(app, mom)
    assert len(answers(app)) == count
    assert time.monotonic() - started < 120
    with connect(mom) as connection:
        assert len(saf.conversations(connection, states=["conversing"])) == count
