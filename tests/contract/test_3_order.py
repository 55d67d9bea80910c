"""Guarantee 3: messages of one key written under one lock arrive in the order they were written."""

from __future__ import annotations

import random
import threading

import pytest

from saf.database import Dsn
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, let_time_pass, send

pytestmark = pytest.mark.every_postgresql


def test_an_older_transaction_that_got_the_lock_later_comes_later(app: Dsn, mom: Dsn) -> None:
    """Its transaction id is lower: order by transaction id would turn the two around."""
    with connect(app) as setup:
        setup.execute("CREATE TABLE account (id int PRIMARY KEY, version int)")
        setup.execute("INSERT INTO account VALUES (1, 0)")
    with app.connect(role="test") as older, app.connect(role="test") as newer:
        older.execute("SELECT pg_current_xact_id()")
        for connection, body in ((newer, "first"), (older, "second")):
            connection.execute("UPDATE account SET version = version + 1 WHERE id = 1")
            send(connection, body, key="account 1")
            connection.commit()
    forward(app, mom=mom)
    assert bodies(mom) == ["first", "second"]


def test_many_writers_of_few_keys_stay_in_order_across_batches_and_restarts(
    app: Dsn, mom: Dsn
) -> None:
    """Each account's row lock gives its messages their number; they must arrive by number."""
    accounts = 5
    with connect(app) as setup:
        setup.execute("CREATE TABLE account (id int PRIMARY KEY, version int NOT NULL)")
        setup.execute("INSERT INTO account SELECT generate_series(1, %s), 0", [accounts])
    done = threading.Event()

    def write(writer: int) -> None:
        chance = random.Random(writer)
        with app.connect(role="test") as connection:
            for _ in range(60):
                # a message before the lock, too: it holds the transaction id, not the order
                if chance.random() < 0.3:
                    connection.execute("SELECT pg_current_xact_id()")
                account = chance.randint(1, accounts)
                row = connection.execute(
                    "UPDATE account SET version = version + 1 WHERE id = %s RETURNING version",
                    [account],
                ).fetchone()
                assert row is not None
                send(connection, f"{account} {row[0]}", key=str(account))
                if chance.random() < 0.2:
                    connection.execute("SELECT pg_sleep(0.002)")
                if chance.random() < 0.15:
                    connection.rollback()
                connection.commit()

    def forward_and_restart() -> None:
        while not done.is_set():
            with Cycle(app, forwarding_rules(mom=mom, chunk_rows=7)) as cycle:
                for _ in range(3):
                    cycle.run()

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(5)]
    forwarder = threading.Thread(target=forward_and_restart)
    for thread in (*threads, forwarder):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    forwarder.join()
    forward(app, mom=mom)
    arrived: dict[str, list[int]] = {}
    for body in bodies(mom):
        account, version = body.split()
        arrived.setdefault(account, []).append(int(version))
    with connect(app) as connection:
        versions = connection.execute("SELECT id::text, version FROM account").fetchall()
    assert arrived == {account: list(range(1, version + 1)) for account, version in versions}


def test_order_holds_when_a_destination_fails_in_the_middle(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for number in range(10):
            send(connection, str(number), key="k")
    nowhere = Dsn("host=/nonexistent dbname=mom")
    with Cycle(app, forwarding_rules(mom=mom, chunk_rows=4)) as cycle:
        cycle.open()
        whole, cycle.rules = cycle.rules, forwarding_rules(mom=nowhere, chunk_rows=4)
        (receipt, *_) = cycle.deliver()
        assert receipt.error_kind == "Unavailable"
        assert not receipt.complete
        cycle.rules = whole
        let_time_pass(app)
        cycle.run()
    assert bodies(mom) == [str(number) for number in range(10)]
