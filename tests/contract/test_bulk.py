"""Bulk: a decision about many dead letters is made some at a time, and can be stopped."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.operating import decide
from saf.operating.decide import in_chunks
from saf.setaside import audit
from saf.setaside.selection import DeadLetters
from tests.pipeline import bodies, connect, run, send

REFUSE = "ALTER TABLE saf.inbox ADD CONSTRAINT polite CHECK (convert_from(body, 'UTF8') !~ 'bad')"
ALLOW = "ALTER TABLE saf.inbox DROP CONSTRAINT polite"


@pytest.fixture
def rejected(app: Dsn, mom: Dsn) -> list[str]:
    """Seven dead letters of one key, in order."""
    with connect(mom) as store, connect(app) as connection:
        store.execute(REFUSE)
        for number in range(7):
            send(connection, f"bad {number}", key="k")
    run(app, mom=mom)
    with connect(mom) as store:
        store.execute(ALLOW)
    return [f"bad {number}" for number in range(7)]


def letters(connection: psycopg.Connection[Any]) -> int:
    return DeadLetters().count(connection, 1000).messages


def test_many_are_retried_some_at_a_time_and_arrive_in_order(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection:
        done = in_chunks(connection, decide.retry, DeadLetters(), "try", person="ann", chunk=3)
        assert [len(ids) for ids in done] == [3, 3, 1]
        assert [(one.messages, one.person, one.who) for one in audit.audited(connection)] == [
            (1, "ann", "postgres"),
            (3, "ann", "postgres"),
            (3, "ann", "postgres"),
        ]
    run(app, mom=mom)
    assert bodies(mom) == rejected


def test_what_is_stopped_leaves_the_rest_as_it_was(app: Dsn, rejected: list[str]) -> None:
    with connect(app) as connection:
        chunks = 0

        def stop() -> bool:
            return chunks == 1

        for _ in in_chunks(connection, decide.discard, DeadLetters(), "", chunk=2, stop=stop):
            chunks += 1
        assert letters(connection) == len(rejected) - 2


def test_what_dies_after_the_decision_is_not_touched(
    app: Dsn, mom: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection, connect(mom) as store:
        chunks = in_chunks(connection, decide.discard, DeadLetters(), "", chunk=3)
        next(chunks)
        store.execute(REFUSE)
        send(connection, "bad later", key="k")
        run(app, mom=mom)
        assert sum(map(len, chunks)) == len(rejected) - 3
        assert letters(connection) == 1


def test_dead_letters_are_redirected_to_another_destination_in_order(
    app: Dsn, mom: Dsn, other: Dsn, rejected: list[str]
) -> None:
    with connect(app) as connection:
        elsewhere = decide.redirect("other")
        (ids,) = in_chunks(
            connection, elsewhere, DeadLetters(destination="mom"), "mom is too strict"
        )
        assert len(ids) == len(rejected)
        assert [one.action for one in audit.audited(connection)] == ["redirect to other"]
    run(app, mom=mom, other=other)
    assert (bodies(mom), bodies(other)) == ([], rejected)


def test_a_receivers_dead_letter_is_not_redirected(mom: Dsn) -> None:
    with connect(mom) as store:
        create_service(store, "billing")
        ((subscription,),) = fetch(
            store, "SELECT subscription_id FROM saf.subscription WHERE name = 'billing'"
        )
        store.execute(
            "INSERT INTO saf.dead_letter (subscription_id, destination, shard, id, reason, error,"
            " to_service, body) VALUES (%s, '', 0, 1, 'failed', 'no', 'billing', '')",
            [subscription],
        )
        assert decide.redirect("other")(store, DeadLetters(), "") == []
        assert letters(store) == 1


def test_a_count_has_a_bound_and_says_that_there_are_more(app: Dsn, rejected: list[str]) -> None:
    with connect(app) as connection:
        few = DeadLetters().count(connection, 3)
        assert (few.messages, few.more) == (3, True)
        all_of_them = DeadLetters(error="POLITE").count(connection, len(rejected))
        assert (all_of_them.messages, all_of_them.more) == (len(rejected), False)
        assert DeadLetters(error="%").count(connection, 3).messages == 0
