"""A server's clock that goes back: nothing is decided by two of its readings."""

from __future__ import annotations

from datetime import timedelta

import pytest

from saf.database import Dsn, fetch
from saf.failpoints import arm
from tests.dying import Crash
from tests.dying import crash as die
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, let_time_pass, send


def clock_goes_back(app: Dsn, by: timedelta) -> None:
    """What a batch in hand looks like after that: it was opened in the future."""
    with connect(app) as connection:
        connection.execute("UPDATE saf.cursor SET opened_at = opened_at + %s", [by])


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize("rejected", [False, True], ids=["parked", "dead"])
def test_a_forwarder_that_dies_after_the_clock_went_back_has_stored_nothing_twice(
    app: Dsn, mom: Dsn, rejected: bool
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('billing')")
        if rejected:
            store.execute("ALTER TABLE saf.inbox ADD CONSTRAINT no CHECK (key <> 'no')")
        for number in range(4):
            connection.execute(
                "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, %s, %s)",
                ("billing" if rejected else "unknown", "no", str(number).encode()),
            )
            send(connection, f"other {number}", key=str(number))
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            cycle.open()
            clock_goes_back(app, timedelta(seconds=10))
            cycle.open()
            arm("mark_forwarded" if rejected else "set_aside", die)
            with pytest.raises(Crash):
                cycle.deliver()
        arm("")
        store.execute("INSERT INTO saf.service (name) VALUES ('unknown')")
        store.execute("ALTER TABLE saf.inbox DROP CONSTRAINT IF EXISTS no")
        for _ in range(3):
            let_time_pass(app)
            forward(app, mom=mom)
        dead = fetch(connection, "SELECT body FROM saf.dead_letter")
    found = bodies(mom) + [bytes(body).decode() for (body,) in dead]
    assert sorted(found) == sorted([*map(str, range(4)), *(f"other {n}" for n in range(4))])


def test_what_an_earlier_batch_parked_goes_on_in_order_after_the_clock_went_back(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute("INSERT INTO saf.service (name) VALUES ('other')")
        send(connection, "0", key="k")
        forward(app, mom=mom)
        assert bodies(mom) == []
        # the clock goes back: what was parked before is in the future
        connection.execute("UPDATE saf.parked SET parked_at = parked_at + interval '1 hour'")
        send(connection, "1", key="k")
        forward(app, mom=mom)
        store.execute("INSERT INTO saf.service (name) VALUES ('billing')")
        let_time_pass(app)
        forward(app, mom=mom)
    assert bodies(mom) == ["0", "1"]
