"""Savepoints: handlers that are quick share one, and each message's work is there once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import saf
from saf.database import Dsn
from saf.receiving import savepoints
from tests.receivers import (
    SUBSCRIPTION,
    dead,
    effect,
    effects,
    let_keys_be_due,
    put,
    waiting,
)

Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, handlers count as quick."""
    monkeypatch.setattr(savepoints, "SHARE_SECONDS", 60.0)


class Picky:
    """A worker that refuses some messages, after it has had their effects."""

    def __init__(self, inbox: Dsn, *bad: str, **options: Any) -> None:
        self.bad, self.calls = [*bad], list[str]()
        self.worker = saf.Worker(inbox, SUBSCRIPTION, **options)
        self.worker.handler()(self.handle)

    def handles_by(self, handle: Callable[[saf.Received, Connection], None]) -> None:
        self.worker._handlers.clear()
        self.worker.handler()(handle)

    def handle(self, message: saf.Received, connection: Connection) -> None:
        self.calls.append(message.text())
        effect(connection, message)
        if message.text() in self.bad:
            raise ValueError(f"{message.text()} will not do")


@pytest.mark.every_postgresql
def test_when_one_of_many_fails_the_work_of_the_others_is_there_once(inbox: Dsn) -> None:
    for number in range(1, 10):
        put(inbox, str(number), key=str(number))
    picky = Picky(inbox, "4", "8")
    picky.worker.drain()
    assert effects(inbox) == ["1", "2", "3", "5", "6", "7", "9"]
    assert waiting(inbox) == ["4", "8"]
    assert picky.worker.summary.handled == 7


def test_a_message_that_fails_is_called_once_for_each_attempt(inbox: Dsn) -> None:
    for number in range(1, 5):
        put(inbox, str(number), key=str(number))
    picky = Picky(inbox, "3", policy=saf.Policy(max_attempts=2))
    picky.worker.drain()
    assert picky.calls == ["1", "2", "3", "1", "2", "4"]
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert picky.calls[6:] == ["3"]
    assert dead(inbox) == [("3", "failed")]


def test_one_that_fails_as_it_is_done_again_holds_up_the_later_ones_of_its_key(inbox: Dsn) -> None:
    put(inbox, "1", key="a")
    put(inbox, "2", "3", "4", key="b")
    picky = Picky(inbox, "3", policy=saf.Policy(max_attempts=1))

    def moody(message: saf.Received, connection: Connection) -> None:
        if message.text() == "2" and picky.calls.count("2"):
            picky.bad.append("2")
        picky.handle(message, connection)

    picky.worker.policy = saf.Policy(max_attempts=2)
    picky.handles_by(moody)
    picky.worker.drain()
    assert effects(inbox) == ["1"]
    assert waiting(inbox) == ["b"]
    picky.bad.clear()
    picky.handles_by(picky.handle)
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert effects(inbox) == ["1", "2", "3", "4"]


def test_what_was_done_behind_one_that_fails_as_it_is_done_again_is_not_done_again(
    inbox: Dsn,
) -> None:
    """Else its work would be there before that of the earlier one of its key, and once more later.

    Two of its neighbours fail: one at its first attempt, the other one as it is done again.
    """
    put(inbox, "1", "2", key="a")
    put(inbox, "3", key="b")
    picky = Picky(inbox, "3")

    def moody(message: saf.Received, connection: Connection) -> None:
        picky.bad[:] = ["3"] if picky.calls.count("3") == 0 else []
        if message.text() == "1" and picky.calls.count("1") == 1:
            picky.bad.append("1")
        picky.handle(message, connection)

    picky.handles_by(moody)
    picky.worker.drain()
    assert effects(inbox) == []
    assert waiting(inbox) == ["a", "b"]
    assert picky.worker.summary.handled == 0
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert sorted(effects(inbox)) == ["1", "2", "3"]
    assert [one for one in effects(inbox) if one != "3"] == ["1", "2"]


def test_what_was_done_before_one_of_its_key_that_has_failed_is_there_after_another_failure(
    inbox: Dsn,
) -> None:
    put(inbox, "1", "2", "3", key="a")
    put(inbox, "4", key="b")
    picky = Picky(inbox, "2", "4")
    picky.worker.drain()
    assert effects(inbox) == ["1"]
    assert waiting(inbox) == ["a", "b"]
    picky.bad.clear()
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert sorted(effects(inbox)) == ["1", "2", "3", "4"]


def test_one_that_fails_as_it_is_done_again_waits_though_a_later_one_of_its_key_does(
    inbox: Dsn,
) -> None:
    put(inbox, "1", "2", key="a")
    put(inbox, "3", key="b")
    picky = Picky(inbox, "2", "3")

    def moody(message: saf.Received, connection: Connection) -> None:
        if message.text() == "1" and picky.calls.count("1") == 2:
            picky.bad.append("1")
        picky.handle(message, connection)

    picky.handles_by(moody)
    picky.worker.drain()
    assert picky.calls.count("1") == 3
    assert effects(inbox) == []
    picky.bad.clear()
    let_keys_be_due(inbox)
    picky.worker.drain()
    assert [one for one in effects(inbox) if one != "3"] == ["1", "2"]


def test_a_slow_handler_is_not_called_again_because_a_later_one_fails(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savepoints, "SHARE_SECONDS", 0.0)
    for number in range(1, 5):
        put(inbox, str(number), key=str(number))
    picky = Picky(inbox, "3")
    picky.worker.drain()
    assert picky.calls == ["1", "2", "3", "4"]
    assert effects(inbox) == ["1", "2", "4"]


def test_quick_handlers_ask_the_database_for_no_savepoint_each(
    inbox: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    execute = psycopg.Connection.execute

    def counted(self: Any, query: Any, *rest: Any, **named: Any) -> Any:
        asked.append(query)
        return execute(self, query, *rest, **named)

    monkeypatch.setattr(psycopg.Connection, "execute", counted)
    for number in range(50):
        put(inbox, str(number), key=str(number))
    worker = saf.Worker(inbox, SUBSCRIPTION)
    worker.handler()(lambda _message, _connection: None)
    asked.clear()
    assert worker.drain() == 50
    assert [query for query in asked if query == savepoints.NEXT] == []
