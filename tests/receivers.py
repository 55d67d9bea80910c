"""Consumers for tests: what they do on receipt, and programs of them that may be killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any

import psycopg

import saf
from saf.broker import services
from saf.database import Dsn, fetch
from saf.failpoints import fail_point
from saf.log.shards import shard_of
from saf.receiving import fair
from saf.receiving.link import connected
from saf.receiving.loop import Loop
from saf.receiving.receive import Receiver
from tests.pipeline import connect, let_time_pass

SUBSCRIPTION = "billing"
SHARDS = 64


def keys_of_one_shard(number: int) -> list[str]:
    """So many keys that share a shard of an inbox."""
    one = shard_of("one shard", SHARDS)
    return list(islice((key for key in map(str, count()) if shard_of(key, SHARDS) == one), number))


TABLES = """
CREATE TABLE effect (number bigint GENERATED ALWAYS AS IDENTITY, key text, body text);
CREATE TABLE balance (key text PRIMARY KEY, last int NOT NULL)
"""


def prepare(mom: Dsn) -> None:
    """The service, and the consumer's tables beside the inbox."""
    with connect(mom) as connection:
        services.create_service(connection, SUBSCRIPTION)
        connection.execute(TABLES)


def store(mom: Dsn, keys: int, each: int, *, transactions: int = 1) -> None:
    """Messages 1 … each of some keys, whose body is their number, as a forwarder stores them."""
    with mom.connect(role="test") as connection:
        size = each // transactions
        for first in range(1, each + 1, size):
            connection.execute(
                "INSERT INTO saf.inbox (to_service, key, body) "
                "SELECT 'billing', 'k' || k, n::text::bytea AS body "
                "FROM generate_series(%s::int, %s) n, generate_series(1, %s::int) k ORDER BY n, k",
                [first, min(first + size - 1, each), keys],
            )
            connection.commit()


def put(mom: Dsn, *bodies: str, key: str | None = None, **columns: Any) -> None:
    """One message after the other, with more columns as they are."""
    names = "".join(f", {name}" for name in columns)
    places = ", %s" * len(columns)
    with connect(mom) as connection:
        for body in bodies:
            connection.execute(
                f"INSERT INTO saf.inbox (to_service, key, body{names}) "
                f"VALUES ('billing', %s, %s{places})",
                [key, body.encode(), *columns.values()],
            )


DOUBLE = """
INSERT INTO saf.inbox (id, txid, message_id, to_service, key, body, source, created_at)
OVERRIDING SYSTEM VALUE
SELECT id, txid, message_id, to_service, key, body, source, created_at FROM saf.inbox
"""


def double(mom: Dsn) -> None:
    """Store each message of the inbox twice, as a backup that is restored over it does."""
    with connect(mom) as store:
        store.execute(DOUBLE)


def effect(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    connection.execute(
        "INSERT INTO effect (key, body) VALUES (%s, %s)", [message.key, message.text()]
    )


def count_up(connection: psycopg.Connection[Any], message: saf.Received) -> None:
    """Fails unless the numbers of each key come one after the other."""
    connection.execute("INSERT INTO balance VALUES (%s, 0) ON CONFLICT DO NOTHING", [message.key])
    moved = connection.execute(
        "UPDATE balance SET last = last + 1 WHERE key = %s AND last + 1 = %s",
        [message.key, int(message.body)],
    )
    assert moved.rowcount == 1, f"{message} out of order"
    effect(connection, message)


@contextmanager
def running(loop: Loop) -> Iterator[None]:
    """In this process, until the block ends, however it does."""
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield
    finally:
        loop.stop()
        thread.join()


def writes_nothing(database: Dsn, act: Callable[[], object]) -> bool:
    """Return whether an act leaves the server's transaction ids alone, once in five times.

    Autovacuum takes ids at times; an act that writes takes one each time.
    """
    with connect(database) as connection:

        def next_id() -> object:
            return fetch(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())")

        def is_quiet() -> bool:
            before = next_id()
            act()
            return next_id() == before

        return any(is_quiet() for _ in range(5))


def effects(mom: Dsn) -> list[str]:
    """The bodies in the order in which they took effect."""
    with connect(mom) as connection:
        rows = connection.execute("SELECT body FROM effect ORDER BY number").fetchall()
    return [body for (body,) in rows]


def by_key(mom: Dsn) -> dict[str, list[int]]:
    with connect(mom) as connection:
        rows = connection.execute("SELECT key, body FROM effect ORDER BY number").fetchall()
    found: dict[str, list[int]] = {}
    for key, body in rows:
        found.setdefault(key, []).append(int(body))
    return found


def let_keys_be_due(mom: Dsn) -> None:
    """The next attempts of all keys that wait are due, but for those that wait for a person."""
    let_time_pass(mom)


def let_the_server_notice(mom: Dsn) -> None:
    """The server ends the session of a client that is gone when it comes to it."""
    with connect(mom) as connection:
        while connection.execute(
            "SELECT FROM pg_stat_activity "
            "WHERE datname = current_database() AND starts_with(application_name, 'saf receive')"
        ).rowcount:
            time.sleep(0.01)


def waiting(mom: Dsn) -> list[str]:
    """The keys that wait."""
    with connect(mom) as connection:
        rows = connection.execute(
            "SELECT subject FROM saf.backoff WHERE shard IS NOT NULL ORDER BY 1"
        ).fetchall()
    return [key for (key,) in rows]


def dead(mom: Dsn) -> list[tuple[str, str]]:
    """Body and reason of the dead letters."""
    with connect(mom) as connection:
        rows = connection.execute(
            "SELECT convert_from(body, 'UTF8'), reason FROM saf.dead_letter ORDER BY dead_letter_id"
        ).fetchall()
    return [(body, reason) for body, reason in rows]


# Programs, for tests.processes


def consumer(mom: Dsn, seed: int) -> None:
    """Receive until nothing is left, in small deliveries, some of them rolled back."""
    consume(mom, seed, SUBSCRIPTION, count_up)


def impatient_consumer(mom: Dsn, seed: int) -> None:
    """The same; if the subscription is fair, it looks for arrivals before each delivery."""
    fair.REFRESH_SECONDS, fair.REFRESH_RATIO = 0, 0
    consumer(mom, seed)


def consume(
    mom: Dsn,
    seed: int | str,
    subscription: str,
    handle: Callable[[psycopg.Connection[Any], saf.Received], object],
) -> None:
    """The same, for any subscription and handler, by a receiver that stays and reads ahead."""
    chance = random.Random(seed)
    policy = saf.Policy(max_attempts=1000, first_wait_seconds=0.01, longest_wait_seconds=0.05)
    with connected(mom) as link:
        receiver = Receiver(link, subscription, policy, chance.choice((1, 3, 20)))
        while _receive(receiver, chance, handle):
            fail_point("receive_committed")


def _receive(
    receiver: Receiver,
    chance: random.Random,
    handle: Callable[[psycopg.Connection[Any], saf.Received], object],
) -> bool:
    with suppress(ZeroDivisionError), receiver.delivery(wait_seconds=0.3) as delivery:
        if not delivery:
            return False
        for message in delivery:
            handle(delivery.connection, message)
        if chance.random() < 0.15:
            raise ZeroDivisionError
    return True


def doomed(mom: Dsn) -> None:
    """One delivery, whose handling kills the process if a message says so."""
    with saf.receive(mom, SUBSCRIPTION, max_messages=20) as delivery:
        for message in delivery:
            if message.text().startswith("poison"):
                os.killpg(0, signal.SIGKILL)
            effect(delivery.connection, message)


def worker(mom: Dsn) -> None:
    """A worker with a thread or two, that runs until nothing is left."""
    made = saf.Worker(
        mom,
        SUBSCRIPTION,
        max_messages=7,
        policy=saf.Policy(first_wait_seconds=0.01, longest_wait_seconds=0.05),
    )

    @made.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        count_up(connection, message)

    made.drain()
