"""Status: what is pending is counted to the message, and how old the oldest one is."""

from __future__ import annotations

from saf.database import Dsn
from saf.operating.status import broker_status
from tests.pipeline import Cycle, connect, forward, forwarding_rules, send


def pending(app: Dsn) -> int:
    with connect(app) as connection:
        return broker_status(connection).pending


def test_what_is_marked_of_a_batch_in_hand_is_not_pending(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key=str(number))
    assert pending(app) == 10
    with Cycle(app, forwarding_rules(mom=mom)) as cycle:
        cycle.open()
        assert pending(app) == 10
        cycle.deliver()  # and not closed
        assert pending(app) == 0
        with connect(app) as connection:
            send(connection, "next")
        assert pending(app) == 1


def test_what_committed_late_is_pending(app: Dsn, mom: Dsn) -> None:
    with app.connect(role="test") as late:
        send(late, "late")
        with connect(app) as connection:
            send(connection, "early")
        forward(app, mom=mom)
        assert pending(app) == 0, "it is not there before its commit"
        late.commit()
    assert pending(app) == 1
    forward(app, mom=mom)
    assert pending(app) == 0


def test_the_oldest_pending_message_says_how_far_behind_it_is(app: Dsn) -> None:
    with connect(app) as connection:
        for key in ("a", "b"):
            for hours in (1, 3, 2):
                connection.execute(
                    "INSERT INTO saf.outbox (to_service, key, body, created_at) "
                    "VALUES ('billing', %s, '', now() - make_interval(hours => %s))",
                    [key, hours if key == "a" else 10 * hours],
                )
        status = broker_status(connection)
    lags = sorted(round(s.lag_seconds) for s in status.shards if s.lag_seconds is not None)
    assert [round(lag / 3600) for lag in lags] == [3, 30]
    assert status.oldest_pending_seconds is not None
    assert round(status.oldest_pending_seconds / 3600) == 30
