"""What was sent at most once, and may have arrived or not, is said to be dead."""

from __future__ import annotations

import pytest

from saf.database import Dsn, fetch
from saf.engine import releasing
from saf.engine.parts import Part
from saf.engine.releasing import Releasing
from saf.engine.work import Receipt
from saf.errors import SafError
from saf.failpoints import arm
from saf.setaside import backoff
from saf.setaside.lane import Lane
from tests.destinations import count, subscription
from tests.dying import Crash, crash
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forwarding_rules,
    let_time_pass,
    outlive_lease,
    send,
)

pytestmark = pytest.mark.usefixtures("disarmed")

TEXTS = [str(number) for number in range(5)]


@pytest.fixture(autouse=True)
def all_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which chunk the forwarder ends in is counted, so none is left for a later run."""
    monkeypatch.setattr(releasing, "RELEASE_SECONDS", 600.0)


def run(app: Dsn, **where: Dsn) -> None:
    with Cycle(app, forwarding_rules("at_most_once", 2, **where)) as cycle:
        cycle.default = None
        cycle.run()


def route(app: Dsn) -> None:
    with connect(app) as connection:
        connection.execute("INSERT INTO saf.route (destination) VALUES ('mom')")


def dead(app: Dsn) -> list[str]:
    with connect(app) as connection:
        rows = fetch(connection, "SELECT body, error FROM saf.dead_letter ORDER BY dead_letter_id")
    assert all("it may have arrived, or not" in error for _, error in rows)
    return [bytes(body).decode() for body, _ in rows]


@pytest.mark.parametrize(
    ("point", "arrived"), [("mom_insert", TEXTS[4:]), ("mom_commit", [*TEXTS[2:4], TEXTS[4]])]
)
def test_of_a_batch(app: Dsn, mom: Dsn, point: str, arrived: list[str]) -> None:
    with connect(app) as connection:
        for text in TEXTS:
            send(connection, text)
    route(app)
    arm(f"{point}:2", crash)
    with pytest.raises(Crash):
        run(app, mom=mom)
    run(app, mom=mom)
    assert bodies(mom) == [*TEXTS[:2], *arrived]
    assert dead(app) == TEXTS[2:4]
    run(app, mom=mom)
    assert dead(app) == TEXTS[2:4]


def test_what_may_have_left_does_not_wait_to_be_sent_again(app: Dsn, mom: Dsn, other: Dsn) -> None:
    with connect(app) as connection:
        for text in TEXTS:
            send(connection, text)
    route(app)
    arm("mom_commit:2", crash)
    with pytest.raises(Crash):
        run(app, mom=mom, other=other)
    with connect(app) as connection:
        backoff.postpone(
            connection, subscription(connection), {Lane(destination="mom"): SafError("down")}
        )
    run(app, mom=mom, other=other)
    assert dead(app) == TEXTS[2:4]
    assert count(app, "parked") == 1
    let_time_pass(app)
    run(app, mom=mom, other=other)
    assert bodies(mom) == TEXTS


@pytest.mark.parametrize(
    ("point", "arrived", "doubtful"),
    [
        ("unpark:1", TEXTS, []),
        ("unpark_commit:1", TEXTS[2:], TEXTS[:2]),
        ("mom_commit:1", TEXTS, TEXTS[:2]),
        ("mom_commit:2", TEXTS, TEXTS[2:4]),
    ],
)
def test_of_a_lane(app: Dsn, mom: Dsn, point: str, arrived: list[str], doubtful: list[str]) -> None:
    with connect(app) as connection:
        for text in TEXTS:
            send(connection, text)
    run(app, mom=mom)
    assert count(app, "parked") == 5, "without a route"
    route(app)
    let_time_pass(app)
    arm(point, crash)
    with pytest.raises(Crash):
        run(app, mom=mom)
    for _ in range(3):
        let_time_pass(app)
        run(app, mom=mom)
    assert bodies(mom) == arrived
    assert dead(app) == doubtful
    assert count(app, "parked") == count(app, "backoff") == 0


def test_a_zombie_sends_nothing_of_a_lane_after_what_the_new_owner_has_sent(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection:
        send(connection, "1", "key")
    run(app, mom=mom)
    route(app)
    let_time_pass(app)

    def cycle() -> Cycle:
        one = Cycle(app, forwarding_rules("at_most_once", 2, mom=mom))
        one.default = None
        return one

    with cycle() as zombie, cycle() as owner:

        def take_over() -> None:
            outlive_lease(app)
            let_time_pass(app)
            owner.run()
            with connect(app) as connection:
                send(connection, "2", "key")
            owner.run()

        zombie.open()
        arm("unpark_commit", take_over)
        receipts = zombie.deliver()
    assert bodies(mom) == ["2"]
    assert any("newer owner" in (said.error or "") for said in receipts)
    assert dead(app) == ["1"]


def test_a_zombie_sends_nothing_of_a_lane_that_the_new_owner_has_read(
    app: Dsn, mom: Dsn, other: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination cannot fence it: it has heard nothing of the new owner yet."""
    route(app)
    with connect(app) as connection:
        backoff.postpone(
            connection, subscription(connection), {Lane(destination="mom"): SafError("down")}
        )
        send(connection, "1", "key")
    run(app, mom=mom, other=other)
    assert count(app, "parked") == 1
    let_time_pass(app)

    def cycle() -> Cycle:
        one = Cycle(app, forwarding_rules("at_most_once", 2, mom=mom, other=other))
        one.default = None
        return one

    doubt, begun, receipts = Releasing._doubt, list[Part](), list[Receipt]()
    with cycle() as zombie, cycle() as owner:

        def meanwhile(releasing: Releasing, part: Part) -> None:
            begun.append(part)
            if len(begun) == 1:
                receipts.extend(zombie.deliver())
            doubt(releasing, part)

        zombie.open()
        outlive_lease(app)
        owner.open()
        monkeypatch.setattr(Releasing, "_doubt", meanwhile)
        owner.deliver()
    assert len(begun) == 2
    assert bodies(mom) == ["1"]
    assert any("newer owner" in (receipt.error or "") for receipt in receipts)
    assert dead(app) == []
