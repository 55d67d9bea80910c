"""Dead letters: what a person does with them is done once, in order, and remembered."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.operating import decide
from saf.operating.decide import Decision
from saf.setaside import audit as audits
from saf.setaside import dead
from saf.setaside.selection import DeadLetters
from tests.destinations import NOWHERE
from tests.destinations import run as attempt
from tests.pipeline import (
    Cycle,
    bodies,
    connect,
    forwarding_rules,
    let_time_pass,
    run,
    send,
)

REFUSE = "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') !~ 'bad')"
ALLOW = "ALTER TABLE saf.inbox DROP CONSTRAINT polite"


@pytest.fixture
def rejected(app: Dsn, mom: Dsn) -> list[str]:
    """Ten messages of one key, of which every second one was rejected."""
    with connect(mom) as store, connect(app) as connection:
        store.execute(REFUSE)
        for number in range(10):
            send(connection, f"{'bad' if number % 2 else 'good'} {number}", key="k")
    run(app, chunk_rows=3, mom=mom)
    assert bodies(mom) == [f"good {number}" for number in range(0, 10, 2)]
    return [f"bad {number}" for number in range(1, 10, 2)]


def audit(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    return fetch(
        connection, "SELECT who, action, cardinality(message_ids), why FROM saf.audit ORDER BY 1, 2"
    )


def test_retried_messages_arrive_in_order_and_with_their_ids(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection, connect(mom) as store:
        found = DeadLetters().rows(connection)
        store.execute(ALLOW)
        ids = decide.retry(connection, DeadLetters(), "the check was wrong")
        assert ids == [letter.message_id for letter in found]
        run(app, chunk_rows=3, mom=mom)
        assert bodies(mom)[5:] == rejected
        stored = fetch(store, "SELECT message_id FROM saf.inbox ORDER BY id OFFSET 5")
        assert [message_id for (message_id,) in stored] == ids
        assert audit(connection) == [("postgres", "retry", 5, "the check was wrong")]
        assert fetch(connection, "SELECT FROM saf.backoff") == []


def test_retrying_again_retries_nothing_and_what_is_rejected_again_is_dead_again(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection, connect(mom) as store:
        first = decide.retry(connection, DeadLetters(), "")
        assert decide.retry(connection, DeadLetters(), "") == []
        run(app, chunk_rows=3, mom=mom)
        again = DeadLetters().rows(connection)
        assert [letter.message_id for letter in again] == first
        store.execute(ALLOW)
        decide.retry(connection, DeadLetters(), "")
        run(app, chunk_rows=3, mom=mom)
        assert bodies(mom)[5:] == rejected


def test_retries_one_after_the_other_are_all_delivered_in_whatever_order_they_were_chosen(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection, connect(mom) as store:
        store.execute(ALLOW)
        numbers = [letter.dead_letter_id for letter in DeadLetters().rows(connection)]
        for number in reversed(numbers):
            decide.retry(connection, DeadLetters(numbers=[number]), "")
        run(app, chunk_rows=3, mom=mom)
    assert bodies(mom)[5:] == rejected[::-1]


def test_a_retry_beside_a_destination_that_is_down_waits_its_turn(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    nowhere = Dsn("host=/nonexistent dbname=mom")
    with connect(app) as connection, connect(mom) as store:
        store.execute(ALLOW)
        decide.retry(connection, DeadLetters(), "")
        with Cycle(app, forwarding_rules(mom=nowhere)) as cycle:
            cycle.run()
        assert len(bodies(mom)) == 5
        connection.execute("UPDATE saf.backoff SET next_attempt_at = now()")
        run(app, chunk_rows=3, mom=mom)
    assert bodies(mom)[5:] == rejected


def test_a_filter_chooses_and_a_discarded_message_is_gone_and_remembered(
    app: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection:
        assert DeadLetters(reason="expired").rows(connection) == []
        assert decide.discard(connection, DeadLetters(service="nobody"), "") == []
        (first, *_) = DeadLetters(key="k", destination="mom").rows(connection)
        assert dead.body(connection, first.dead_letter_id) == rejected[0].encode()
        chosen = DeadLetters(numbers=[first.dead_letter_id])
        assert decide.discard(connection, chosen, "a test order") == [first.message_id]
        assert dead.body(connection, first.dead_letter_id) is None
        assert len(DeadLetters().rows(connection)) == 4
        assert audit(connection) == [("postgres", "discard", 1, "a test order")]


def test_what_had_expired_is_delivered_all_the_same_when_a_person_retries_it(
    app: Dsn, mom: Dsn
) -> None:
    with connect(mom) as connection:
        create_service(connection, "billing")
    with connect(app) as connection:
        connection.execute(
            "INSERT INTO saf.outbox (to_service, body, expires_at) "
            "VALUES ('billing', 'late', now() - interval '1 s')"
        )
        run(app, chunk_rows=3, mom=mom)
        assert [one.reason for one in DeadLetters().rows(connection)] == ["expired"]
        decide.retry(connection, DeadLetters(), "better late")
        run(app, chunk_rows=3, mom=mom)
    with saf.receive(mom, "billing") as delivery:
        assert [message.text() for message in delivery] == ["late"]


def test_retries_are_numbered_one_at_a_time(app: Dsn, rejected: list[str]) -> None:
    """One that commits late must not come after a higher one was delivered."""
    with connect(app) as one, app.connect(role="test") as two:
        two.execute("SET lock_timeout = '200ms'")
        two.commit()
        with one.transaction():
            one.execute(audits.ONE_AT_A_TIME)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                decide.retry(two, DeadLetters(), "")
        two.rollback()
        assert len(decide.retry(two, DeadLetters(), "")) == len(rejected)


@pytest.mark.parametrize("decision", [decide.discard, decide.retry, decide.redirect("mom")])
def test_what_an_open_batch_is_not_past_stays_and_says_why(
    app: Dsn, mom: Dsn, decision: Decision
) -> None:
    with connect(app) as connection:
        send(connection, "late", key="k")
        connection.execute("UPDATE saf.outbox SET expires_at = now()")
        send(connection, "plain", key="k")
        # the only destination, so that the batch stays open
        assert attempt(app, mom=NOWHERE) == ["Unavailable"]
        (letter,) = DeadLetters().rows(connection)
        assert letter.stays == "batch"
        assert DeadLetters().count(connection, 10).stays == {"batch": 1}
        assert decision(connection, DeadLetters(), "too early") == []
        for _ in range(2):
            let_time_pass(app)
            assert attempt(app, mom=NOWHERE) == ["Unavailable"]
        (still,) = DeadLetters().rows(connection)
        assert (still.dead_letter_id, still.stays) == (letter.dead_letter_id, "batch")

        let_time_pass(app)
        run(app, mom=mom)
        assert DeadLetters().count(connection, 10).messages == 1
        assert decision(connection, DeadLetters(), "now") == [letter.message_id]
        run(app, mom=mom)
        assert DeadLetters().rows(connection) == []
    assert bodies(mom) == (["plain"] if decision is decide.discard else ["plain", "late"])


def test_what_cannot_go_elsewhere_stays_and_says_why(app: Dsn, rejected: list[str]) -> None:
    with connect(app) as connection:
        connection.execute(
            "UPDATE saf.dead_letter SET conversation_id = gen_random_uuid() "
            "WHERE dead_letter_id = (SELECT min(dead_letter_id) FROM saf.dead_letter)"
        )
        counted = DeadLetters().count(connection, 10, to="mom")
        assert (counted.messages, counted.stays) == (len(rejected) - 1, {"dialog": 1})
        assert len(decide.redirect("mom")(connection, DeadLetters(), "there")) == len(rejected) - 1
