"""A small cycle of the forwarder's own process: few questions, closed with its last chunk, once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import adbc_driver_manager.dbapi as adbc
import psycopg
import pytest

from saf.config import load
from saf.database import Dsn, fetch
from saf.engine.source_session import SourceSession
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import InProcess, item_alone
from tests.destinations import NOWHERE, count, know, send_to
from tests.kept import _nothing_stays
from tests.pipeline import Cycle, bodies, connect, forwarding_rules, send
from tests.programs import configuration

__all__ = ["_nothing_stays"]

QUESTIONS = 19
"""How many statements a cycle of one message makes, with three of leaving and looking
and five for messages that follow soon."""

OPEN = "SELECT count(*) FROM saf.cursor WHERE open IS NOT NULL"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The statements of this process."""
    counted: Counter[str] = Counter()
    execute, bulk = psycopg.Cursor.execute, adbc.Cursor.execute

    def by_psycopg(self: Any, query: Any, *more: Any, **options: Any) -> Any:
        counted[" ".join(str(query).split())] += 1
        return execute(self, query, *more, **options)

    def by_adbc(self: Any, query: Any, *more: Any, **options: Any) -> Any:
        counted[" ".join(str(query).split())] += 1
        return bulk(self, query, *more, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", by_psycopg)
    monkeypatch.setattr(adbc.Cursor, "execute", by_adbc)
    return counted


def test_a_cycle_of_one_message_asks_few_questions(
    app: Dsn, mom: Dsn, tmp_path: Path, asked: Counter[str]
) -> None:
    file = configuration(tmp_path / "saf.toml", {"app": app}, {"mom": mom})
    driver = Forwarder(load(file), InProcess())
    driver.roster.once = False
    with connect(app) as connection:
        for number in range(3):
            send(connection, str(number), "A-1")
            asked.clear()
            assert driver.cycle()
    driver.roster.leave()
    assert bodies(mom) == ["0", "1", "2"]
    assert asked.total() <= QUESTIONS, "\n".join(asked)


def test_a_batch_is_closed_by_the_transaction_of_its_last_chunk(app: Dsn, mom: Dsn) -> None:
    rules = forwarding_rules(mom=mom, chunk_rows=2)
    with connect(app) as source, Cycle(app, rules) as cycle:
        for body in "abcde":
            send(source, body)
        receipts = InProcess().run(cycle.open(), rules, "")
        assert [one.closed for one in receipts if one.destination is None] == [True]
        assert fetch(source, OPEN) == [(0,)]
        transactions = "SELECT DISTINCT xmin::text FROM saf.cursor WHERE done::text <> '1:1:'"
        acknowledged = "SELECT xmin::text FROM saf.acknowledged"
        assert len(set(fetch(source, transactions)) & set(fetch(source, acknowledged))) == 1
        assert cycle.open() == []
    assert bodies(mom) == [*"abcde"]


def test_a_task_that_may_run_twice_leaves_its_batch_open(app: Dsn, mom: Dsn) -> None:
    rules = forwarding_rules("exactly_once", mom=mom)
    with connect(app) as source, Cycle(app, rules) as cycle:
        for body in "abc":
            send(source, body)
        (work,) = cycle.open()
        for dropped in (0, 3):
            receipts = item_alone(0, work, rules)
            assert sum(receipt.dropped for receipt in receipts) == dropped
            assert {receipt.error for receipt in receipts} == {None}
        assert fetch(source, OPEN) != [(0,)]
        cycle.close(receipts)
        assert fetch(source, OPEN) == [(0,)]
    assert bodies(mom) == [*"abc"]


def test_the_last_chunk_is_settled_once_although_the_answer_got_lost(
    app: Dsn, mom: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(mom, "billing")
    rules = forwarding_rules(mom=mom, other=NOWHERE)
    asked = SourceSession.__call__
    lost: list[str] = []

    def answer_lost(self: SourceSession, write: Any) -> Any:
        result = asked(self, write)
        if write.__qualname__.startswith("Task._settle"):
            lost.append(write.__qualname__)
            return asked(self, write)
        return result

    with connect(app) as source, Cycle(app, rules) as cycle:
        send_to(source, "billing", "here")
        send_to(source, "shipping", "nowhere")
        work = cycle.open()
        monkeypatch.setattr(SourceSession, "__call__", answer_lost)
        receipts = InProcess().run(work, rules, "")
        assert lost
        assert {one.error for one in receipts} == {None}
        assert [one.complete for one in receipts if one.destination is None] == [True]
        assert fetch(source, OPEN) == [(0,)]
    assert bodies(mom) == ["here"]
    assert count(app, "parked") == 1
