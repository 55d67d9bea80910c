"""Traffic: messages are counted once, by service, whatever commits late, and at a bounded cost."""

from __future__ import annotations

import pytest

from saf.broker.services import create_service
from saf.database import Dsn
from saf.operating import decide, traffic
from saf.operating.traffic import Traffic, meter
from saf.setaside.selection import DeadLetters
from tests.pipeline import connect, run, send
from tests.ui.dead_letters import LETTER

SEND = "INSERT INTO saf.outbox (to_service, key, body) VALUES (%s, 'k', '')"
MANY = """
INSERT INTO saf.outbox (to_service, key, body)
SELECT CASE WHEN n %% 4 = 0 THEN 'mail' ELSE 'billing' END, 'k' || n, ''
FROM generate_series(1, %s) AS n
"""
PARK = """
INSERT INTO saf.parked (subscription_id, kind, subject, shard, id, batch, position, to_service,
                        body)
SELECT subscription_id, %s, 'x', 0, 1, 1, 1, 'billing', ''
FROM saf.subscription WHERE name = 'forwarder'
"""


def test_each_message_that_is_sent_or_stored_is_counted_once_by_its_service(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as shop, connect(mom) as store:
        create_service(store, "billing")
        send(shop, "before the first answer")
        at_shop, at_store = meter(), meter()
        assert at_shop(shop) == Traffic()
        assert at_store(store) == Traffic()
        assert at_shop(shop) == Traffic()
        shop.execute(MANY, [40])
        found = at_shop(shop)
        assert (found.sent, found.stored) == ({"billing": 30, "mail": 10}, {})
        assert at_shop(shop) == Traffic()
        run(app, mom=mom)
        assert at_shop(shop).sent == {}
        assert at_store(store).stored["billing"] == 31
        assert at_store(store) == Traffic()


def test_what_a_long_transaction_sends_is_counted_when_it_commits(app: Dsn) -> None:
    with connect(app) as connection, connect(app) as other:
        ask = meter()
        ask(connection)
        other.execute("BEGIN")
        other.execute(SEND, ["late"])
        send(connection, "soon")
        assert ask(connection).sent == {"billing": 1}
        other.execute("COMMIT")
        assert ask(connection).sent == {"late": 1}


def test_more_messages_than_are_read_are_estimated(app: Dsn) -> None:
    with connect(app) as connection:
        ask = meter()
        ask(connection)
        connection.execute(MANY, [200_000])
        found = ask(connection).sent
    assert sum(found.values()) == pytest.approx(200_000, rel=0.1)
    assert found["mail"] == pytest.approx(50_000, rel=0.1)


def test_dead_letters_and_parked_messages_are_counted_even_if_their_numbers_commit_late(
    app: Dsn,
) -> None:
    with connect(app) as connection, connect(app) as other:
        ask = meter()
        ask(connection)
        other.execute("BEGIN")
        other.execute(LETTER.replace("'billing'", "'late'"), [2])
        connection.execute(LETTER, [3])
        assert ask(connection).dead == {"billing": 3}
        other.execute("COMMIT")
        connection.execute(PARK, ["route"])
        found = ask(connection)
        assert (found.dead, found.parked) == ({"late": 2}, {"billing": 1})
        connection.execute(LETTER, [1])
        found = ask(connection)
        assert (found.dead, found.parked) == ({"billing": 1}, {})


def test_what_waits_for_its_time_or_was_retried_by_an_operator_is_no_failure(
    app: Dsn, mom: Dsn
) -> None:
    with connect(app) as shop, connect(mom) as store:
        create_service(store, "billing")
        shop.execute(LETTER, [2])
        store.execute(
            LETTER.replace("'outbox'", "'inbox'").replace("'forwarder'", "'billing'"), [2]
        )
        at_shop, at_store = meter(), meter()
        at_shop(shop)
        at_store(store)
        for connection in (shop, store):
            assert len(decide.retry(connection, DeadLetters(), "fixed")) == 2
        for kind in ("later", "ahead"):
            shop.execute(PARK, [kind])
        assert at_shop(shop) == Traffic()
        assert at_store(store) == Traffic()


def test_the_rows_that_an_answer_reads_are_bounded(
    app: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "MOST", 10)
    with connect(app) as connection:
        ask = meter()
        ask(connection)
        connection.execute(LETTER, [50])
        assert ask(connection).dead == {"billing": 10}
        send(connection, "x")
        assert ask(connection).dead == {}
