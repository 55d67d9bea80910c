"""The condition of an endpoint: its own, whatever others have, and at which moment it changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from saf.broker import services
from saf.database import Dsn, fetch
from saf.receiving.dispatch import condition
from saf.receiving.dispatch.condition import Book
from tests.pipeline import connect

Connection = psycopg.Connection[Any]


@pytest.fixture
def at(mom: Dsn) -> Iterator[Connection]:
    with connect(mom) as connection:
        for name in ("billing", "shipping"):
            services.create_service(connection, name)
        yield connection


@pytest.fixture
def books(at: Connection) -> tuple[Book, Book]:
    """Those of two subscriptions, whose endpoints have the same name."""
    one, other = (
        Book(subscription_id=services.subscription(at, name).subscription_id, endpoint="partner")
        for name in ("billing", "shipping")
    )
    return one, other


def due(at: Connection, seconds: float = 0.0) -> None:
    at.execute(
        "UPDATE saf.breaker SET next_probe_at = clock_timestamp() + make_interval(secs => %s)",
        [seconds],
    )


def test_an_endpoint_that_goes_down_and_comes_up_is_no_other_subscriptions(
    at: Connection, books: tuple[Book, Book]
) -> None:
    mine, others = books
    for book in books:
        book.down(at, "503", 1000)
    mine.up(at)
    assert [book.look(at).state for book in books] == ["closed", "open"]
    mine.disable(at, "410")
    assert [book.look(at).state for book in books] == ["disabled", "open"]
    assert [book.look(at).failures for book in books] == [1, 1]
    others.pause(at)
    assert [book.look(at).paused for book in books] == [False, True]
    mine.resume(at)
    assert [book.look(at).state for book in books] == ["closed", "open"]
    assert [book.look(at).paused for book in books] == [False, True]


def test_a_probe_is_one_members_at_a_time_and_only_of_an_endpoint_that_is_open_and_due(
    at: Connection, books: tuple[Book, Book]
) -> None:
    mine, others = books
    assert mine.probe(at, 1000) is None
    for book in books:
        book.down(at, "503", 1000)
    assert mine.probe(at, 1000) is None, "it is not due"
    due(at)
    assert mine.look(at).probe_due
    assert mine.probe(at, 1000) == 1
    assert mine.probe(at, 1000) is None, "another one sends it"
    assert others.probe(at, 1000) == 1
    due(at)
    mine.pause(at)
    assert mine.probe(at, 1000) is None
    assert not mine.look(at).probe_due
    assert others.probe(at, 1000) == 1
    others.disable(at, "410")
    assert others.probe(at, 1000) is None


def test_a_failure_is_counted_once_and_an_endpoint_is_disabled_after_its_longest_time(
    at: Connection, books: tuple[Book, Book]
) -> None:
    mine, others = books
    for book in (mine, mine, others):
        book.down(at, "503", 1000)
    assert [book.look(at).failures for book in books] == [1, 1], "another dispatcher was first"
    at.execute("UPDATE saf.breaker SET failing_since = clock_timestamp() - interval '100 s'")
    mine.still_down(at, "503", 5, longest=1000)
    mine.down(at, "503", 1000)
    assert (mine.look(at).state, mine.look(at).failures) == ("open", 2)
    probe_in = mine.look(at).probe_in
    assert probe_in is not None
    assert 0 < probe_in <= 5
    mine.still_down(at, "503", 5, longest=99)
    assert (mine.look(at).state, mine.look(at).probe_in) == ("disabled", None)
    mine.still_down(at, "503", 5, longest=1000)
    mine.down(at, "503", 5)
    assert mine.look(at).state == "disabled"
    mine.up(at)
    assert mine.look(at).state == "disabled", "only a person resumes it"
    assert (others.look(at).state, others.look(at).failures) == ("open", 1)


def test_the_last_attempts_are_kept_of_each_subscription(
    at: Connection, books: tuple[Book, Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(condition, "KEPT_ATTEMPTS", 2)
    for book in (*books, *books, *books):
        at.execute(
            "INSERT INTO saf.attempt (subscription_id, message_id, seconds, outcome, error) "
            "VALUES (%s, gen_random_uuid(), 0, 'failed', 'no')",
            [book.subscription_id],
        )
    mine, others = books
    mine.trim(at)
    kept = "SELECT count(*) FROM saf.attempt WHERE subscription_id = %(number)s"
    counts = [fetch(at, kept, {"number": one.subscription_id})[0][0] for one in (mine, others)]
    assert counts == [3, 3], "one more than are kept may stay"
    monkeypatch.setattr(condition, "KEPT_ATTEMPTS", 1)
    mine.trim(at)
    counts = [fetch(at, kept, {"number": one.subscription_id})[0][0] for one in (mine, others)]
    assert counts == [2, 3]
