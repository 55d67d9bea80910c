"""Guarantee 2: each committed message is delivered, however the commits interleave."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from saf.database import Dsn
from tests.pipeline import Cycle, bodies, connect, forward, forwarding_rules, send

pytestmark = pytest.mark.every_postgresql


@contextmanager
def transaction(app: Dsn) -> Iterator[psycopg.Connection[object]]:
    with app.connect(role="test") as connection:
        yield connection


def test_a_late_committer_with_a_lower_id_is_not_lost(app: Dsn, mom: Dsn) -> None:
    with transaction(app) as slow, transaction(app) as fast:
        send(slow, "drawn first")
        send(fast, "committed first")
        fast.commit()
        forward(app, mom=mom)
        assert bodies(mom) == ["committed first"]
        slow.commit()
        forward(app, mom=mom)
        assert bodies(mom) == ["committed first", "drawn first"]


def test_the_naive_reader_of_ids_above_the_last_loses_that_message(app: Dsn) -> None:
    """The control: shows that the schedule above is one that loses."""
    last, read = 0, []

    def poll() -> None:
        nonlocal last
        with connect(app) as connection:
            rows = connection.execute(
                "SELECT id, body FROM saf.outbox WHERE id > %s ORDER BY id", [last]
            ).fetchall()
        for last, body in rows:  # noqa: B007 - last is the reader's mark
            read.append(bytes(body).decode())

    with transaction(app) as slow, transaction(app) as fast:
        send(slow, "drawn first")
        send(fast, "committed first")
        fast.commit()
        poll()
        slow.commit()
        poll()
    assert read == ["committed first"]


def test_one_long_transaction_delays_nobody_else(app: Dsn, mom: Dsn) -> None:
    with transaction(app) as slow:
        send(slow, "slow")
        for number in range(5):
            with transaction(app) as other:
                send(other, str(number))
            forward(app, mom=mom)
        assert bodies(mom) == ["0", "1", "2", "3", "4"]
        slow.commit()
    forward(app, mom=mom)
    assert bodies(mom)[-1] == "slow"


def test_what_a_savepoint_rolled_back_is_not_sent_and_the_rest_is(app: Dsn, mom: Dsn) -> None:
    with transaction(app) as connection:
        send(connection, "before")
        with connection.transaction():
            send(connection, "in a savepoint")
        with connection.transaction():
            send(connection, "rolled back")
            raise psycopg.Rollback
        send(connection, "after")
        forward(app, mom=mom)
        assert bodies(mom) == []
    forward(app, mom=mom)
    assert bodies(mom) == ["before", "in a savepoint", "after"]


def test_a_prepared_transaction_is_forwarded_when_it_commits(app: Dsn, mom: Dsn) -> None:
    with connect(app) as connection:
        for gid in ("kept", "dropped"):
            connection.execute("BEGIN")
            send(connection, gid)
            connection.execute(f"PREPARE TRANSACTION '{app.database}_{gid}'")
        send(connection, "meanwhile")
        forward(app, mom=mom)
        assert bodies(mom) == ["meanwhile"]
        connection.execute(f"COMMIT PREPARED '{app.database}_kept'")
        connection.execute(f"ROLLBACK PREPARED '{app.database}_dropped'")
        forward(app, mom=mom)
    assert bodies(mom) == ["meanwhile", "kept"]


def test_a_message_committed_while_a_batch_is_open_is_in_the_next_one(app: Dsn, mom: Dsn) -> None:
    with Cycle(app, forwarding_rules(mom=mom)) as cycle, connect(app) as connection:
        send(connection, "first")
        cycle.open()
        send(connection, "second")
        cycle.close(cycle.deliver())
        assert bodies(mom) == ["first"]
        cycle.run()
    assert bodies(mom) == ["first", "second"]


def test_concurrent_writers_and_a_forwarder_lose_and_repeat_nothing(app: Dsn, mom: Dsn) -> None:
    """Writers hold their transactions open at random, so ids and commits are well mixed."""
    sent: list[str] = []
    done = threading.Event()

    def write(writer: int) -> None:
        chance = random.Random(writer)
        with transaction(app) as connection:
            for number in range(60):
                body = f"{writer}-{number}"
                send(connection, body, key=body)
                if chance.random() < 0.3:
                    connection.execute("SELECT pg_sleep(%s)", [chance.random() / 100])
                if chance.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                    sent.append(body)

    def keep_forwarding() -> None:
        with Cycle(app, forwarding_rules(mom=mom)) as cycle:
            while not done.is_set():
                cycle.run()

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(6)]
    forwarder = threading.Thread(target=keep_forwarding)
    for thread in (*writers, forwarder):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    forwarder.join()
    forward(app, mom=mom)
    assert sorted(bodies(mom)) == sorted(sent)


def test_a_poll_that_finds_nothing_new_writes_nothing(app: Dsn, mom: Dsn) -> None:
    with Cycle(app, forwarding_rules(mom=mom)) as cycle, connect(app) as connection:
        send(connection, "one")
        cycle.run()
        rows = "SELECT shard, xmin::text FROM saf.cursor ORDER BY shard"
        before = connection.execute(rows).fetchall()
        for _ in range(3):
            assert cycle.open() == []
        assert connection.execute(rows).fetchall() == before
