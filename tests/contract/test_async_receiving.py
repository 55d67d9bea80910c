"""Receiving under asyncio: the same promises, and nothing that waits blocks the event loop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from structlog.testing import capture_logs

import saf
from saf.broker.services import create_service
from saf.database import Dsn, fetch
from saf.errors import StopTimeout, UsageError
from saf.receiving import link
from saf.receiving.asynchronous import EventLoop, aconnected
from saf.receiving.inbox import inbox_status
from saf.receiving.worker import Detached, OwnLoop
from saf.signing.signer import Key
from tests import dialogs
from tests.pipeline import connect
from tests.programs import ROOT, environment, url
from tests.receivers import (
    SUBSCRIPTION,
    by_key,
    dead,
    effect,
    effects,
    let_keys_be_due,
    let_the_server_notice,
    put,
    running,
    store,
    waiting,
)
from tests.waits import until

EFFECT = "INSERT INTO effect (key, body) VALUES (%s, %s)"
Connection = psycopg.AsyncConnection[Any]


async def aeffect(connection: Connection, message: saf.Received) -> None:
    await connection.execute(EFFECT, [message.key, message.text()])


def sqlalchemy(inbox: Dsn, driver: str = "psycopg") -> AsyncEngine:
    # without a pool, which would have to be disposed of in the event loop of its connections
    address = url(inbox).replace("+psycopg", f"+{driver}")
    return create_async_engine(address, poolclass=sa.NullPool)


def pool(inbox: Dsn) -> Callable[[], Any]:
    """A callable, as a pool's ``connection`` is one."""

    @asynccontextmanager
    async def connection() -> AsyncIterator[Connection]:
        async with await psycopg.AsyncConnection.connect(inbox.conninfo) as given:
            yield given

    return connection


def unread(inbox: Dsn) -> int:
    with connect(inbox) as connection:
        (status,) = inbox_status(connection)
    return int(status.unread)


# saf.areceive


@pytest.mark.every_postgresql
@pytest.mark.parametrize("kind", ["dsn", "callable"])
def test_what_is_received_and_what_is_done_commit_together(inbox: Dsn, kind: str) -> None:
    put(inbox, "1", "2", "3", key="k")
    engine = inbox if kind == "dsn" else pool(inbox)

    async def main() -> None:
        async with saf.areceive(engine, SUBSCRIPTION) as delivery:
            assert isinstance(delivery.connection, psycopg.AsyncConnection)
            for message in delivery:
                await aeffect(delivery.connection, message)
            assert effects(inbox) == []
        async with saf.areceive(engine, SUBSCRIPTION) as delivery:
            assert not delivery

    asyncio.run(main())
    assert effects(inbox) == ["1", "2", "3"]


def test_an_async_engine_of_sqlalchemy_gives_its_own_connection(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k")

    async def main() -> None:
        engine = sqlalchemy(inbox)
        statement = sa.text("INSERT INTO effect (key, body) VALUES (:key, :body)")
        async with saf.areceive(engine, SUBSCRIPTION, max_messages=1) as delivery:
            for message in delivery:
                row = {"key": message.key, "body": message.text()}
                await delivery.connection.execute(statement, row)
        with suppress(ZeroDivisionError):
            async with saf.areceive(engine, SUBSCRIPTION) as delivery:
                await delivery.connection.execute(statement, {"key": "k", "body": "undone"})
                raise ZeroDivisionError
        await engine.dispose()

    asyncio.run(main())
    assert effects(inbox) == ["1"]
    assert unread(inbox) == 1


@pytest.mark.parametrize("failure", [ZeroDivisionError, asyncio.CancelledError])
def test_a_block_that_fails_or_is_cancelled_leaves_nothing_and_its_messages_come_again(
    inbox: Dsn, failure: type[BaseException]
) -> None:
    put(inbox, "1", "2", key="k")

    async def once() -> None:
        async with saf.areceive(inbox, SUBSCRIPTION) as delivery:
            for message in delivery:
                await aeffect(delivery.connection, message)
            raise failure

    async def main() -> list[str]:
        with pytest.raises(failure):
            await once()
        received: list[str] = []
        while len(received) < 2:
            async with saf.areceive(inbox, SUBSCRIPTION, wait_seconds=10) as delivery:
                for message in delivery:
                    await aeffect(delivery.connection, message)
                    received.append(message.text())
        return received

    assert asyncio.run(main()) == ["1", "2"]
    assert effects(inbox) == ["1", "2"]


def test_while_it_waits_for_messages_other_tasks_go_on_and_it_can_be_cancelled(inbox: Dsn) -> None:
    async def receive() -> None:
        async with saf.areceive(inbox, SUBSCRIPTION, wait_seconds=30):
            pytest.fail("there is nothing")

    async def main() -> None:
        task = asyncio.create_task(receive())
        latest = 0.0
        for _ in range(20):
            began = time.monotonic()
            await asyncio.sleep(0.01)
            latest = max(latest, time.monotonic() - began)
        assert latest < 1, "the event loop stood still"
        assert not task.done()
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 10

    asyncio.run(main())


def test_a_message_comes_while_it_is_waited_for(inbox: Dsn) -> None:
    async def main() -> list[str]:
        async def later() -> None:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(put, inbox, "1")

        task = asyncio.create_task(later())
        async with saf.areceive(inbox, SUBSCRIPTION, wait_seconds=30) as delivery:
            received = [message.text() for message in delivery]
        await task
        return received

    assert asyncio.run(main()) == ["1"]


def test_a_connection_is_given_back_as_it_was(inbox: Dsn) -> None:
    """With its notices, and with what is prepared on it under names of its own."""

    async def main() -> None:
        notices: list[str | None] = []
        async with await psycopg.AsyncConnection.connect(inbox.conninfo, autocommit=True) as given:
            given.add_notice_handler(lambda notice: notices.append(notice.message_primary))

            @asynccontextmanager
            async def same() -> AsyncIterator[Connection]:
                yield given

            for number in range(12):
                await given.execute("SELECT %s::int", [number])
                put(inbox, str(number), key="k")
                async with saf.areceive(same, SUBSCRIPTION, max_messages=1) as delivery:
                    for message in delivery:
                        await aeffect(delivery.connection, message)
                    await given.execute("DO $$ BEGIN RAISE NOTICE 'inside'; END $$")
            await given.execute("DO $$ BEGIN RAISE NOTICE 'outside'; END $$")
            assert given.prepare_threshold == 5
            assert notices == ["inside"] * 12 + ["outside"]
            assert given.autocommit

    asyncio.run(main())
    assert effects(inbox) == [str(number) for number in range(12)]


def test_a_call_that_is_cancelled_keeps_its_connection_until_its_thread_has_ended(
    inbox: Dsn,
) -> None:
    put(inbox, "1")
    begun, ended = threading.Event(), threading.Event()

    def slowly(connection: psycopg.Connection[Any]) -> None:
        begun.set()
        connection.execute("SELECT pg_sleep(0.3)")
        ended.set()

    async def main() -> None:
        async with saf.areceive(inbox, SUBSCRIPTION) as delivery:
            task = asyncio.create_task(delivery.connection.run_sync(slowly))
            await asyncio.to_thread(begun.wait)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended.is_set()
            await aeffect(delivery.connection, delivery[0])

    asyncio.run(main())
    assert effects(inbox) == ["1"]


@pytest.mark.parametrize("kind", ["dsn", "callable"])
def test_to_commit_inside_of_a_block_is_refused_and_a_savepoint_is_not(
    inbox: Dsn, kind: str
) -> None:
    put(inbox, "1")
    engine = inbox if kind == "dsn" else pool(inbox)

    async def main() -> None:
        async with saf.areceive(engine, SUBSCRIPTION) as delivery:
            with suppress(ZeroDivisionError):
                async with delivery.connection.transaction():
                    await aeffect(delivery.connection, delivery[0])
                    raise ZeroDivisionError
            async with delivery.connection.transaction():
                await aeffect(delivery.connection, delivery[0])
            await delivery.connection.commit()

    with pytest.raises(psycopg.ProgrammingError, match="Explicit commit"):
        asyncio.run(main())
    assert unread(inbox) == 1
    assert effects(inbox) == []


def test_a_handler_that_commits_has_failed_and_nothing_of_it_is_left(inbox: Dsn) -> None:
    """Also of what was read ahead, whose position is written before the handler is called."""
    put(inbox, *map(str, range(20)), key="k")
    worker = saf.Worker(pool(inbox), SUBSCRIPTION, max_messages=1)

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        await aeffect(connection, message)
        if message.text() == "12":
            await connection.commit()

    worker.drain()
    assert effects(inbox) == [str(number) for number in range(12)]
    assert waiting(inbox) == ["k"]


def test_what_gives_no_connection_of_asyncio_is_refused_by_name(inbox: Dsn) -> None:
    async def enter(engine: Any) -> None:
        async with saf.areceive(engine, SUBSCRIPTION):
            pytest.fail("refused")

    plain = sa.create_engine(url(inbox))
    with pytest.raises(UsageError, match="create_async_engine"):
        asyncio.run(enter(plain))
    with pytest.raises(UsageError, match=r"psycopg 3.*asyncpg"):
        asyncio.run(enter(sqlalchemy(inbox, "asyncpg")))
    with pytest.raises(UsageError, match="AsyncConnection"):
        asyncio.run(enter(lambda: None))
    with pytest.raises(UsageError, match=r"builtins\.int"):
        asyncio.run(enter(7))
    with (
        pytest.raises(UsageError, match="areceive"),
        saf.receive(
            sqlalchemy(inbox),  # type: ignore[arg-type]
            SUBSCRIPTION,
        ),
    ):
        pytest.fail("refused")
    worker = saf.Worker(pool(inbox), SUBSCRIPTION)
    worker.handler()(effect)
    with pytest.raises(UsageError, match="async handlers"):
        worker.drain()


# Workers with async handlers


class Waiter:
    """A worker whose handlers wait a little, and fail on what they are told to."""

    def __init__(self, inbox: Any, *bad: str, seconds: float = 0.0, **options: Any) -> None:
        self.bad = set(bad)
        self.seconds = seconds
        self.worker = saf.Worker(inbox, SUBSCRIPTION, **options)
        self.worker.handler()(self.handle)
        self.at_once = self.most = 0
        self.calls: Counter[str] = Counter()

    async def handle(self, message: saf.Received, connection: Connection) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.calls[message.text()] += 1
        try:
            # of those that are numbered, the first ones take longest
            text = message.text()
            await asyncio.sleep(self.seconds / (1 + int(text) if text.isdigit() else 1))
            await aeffect(connection, message)
            if message.text() in self.bad:
                raise ValueError(f"{message.text()} will not do")
        finally:
            self.at_once -= 1


@pytest.mark.every_postgresql
@pytest.mark.parametrize("concurrency", [1, 8])
def test_messages_are_handled_in_the_order_of_their_keys_and_once(
    inbox: Dsn, concurrency: int
) -> None:
    store(inbox, 10, 20)
    waiter = Waiter(inbox, seconds=0.02, concurrency=concurrency, max_messages=50)
    assert waiter.worker.drain() == 200
    assert by_key(inbox) == {f"k{key}": [*range(1, 21)] for key in range(1, 11)}
    assert (waiter.most > 1) == (concurrency > 1)
    assert waiter.most <= concurrency
    assert waiter.worker.summary.handled == 200


def test_so_many_handlers_as_are_asked_for_wait_at_the_same_time(inbox: Dsn) -> None:
    put(inbox, *"abcdef")
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=6)
    barrier: list[asyncio.Barrier] = []

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        barrier[:] = barrier or [asyncio.Barrier(6)]
        async with asyncio.timeout(30):
            await barrier[0].wait()
        await aeffect(connection, message)

    assert worker.drain() == 6
    assert sorted(effects(inbox)) == [*"abcdef"]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_message_that_fails_waits_with_its_key_and_others_go_on(
    inbox: Dsn, concurrency: int
) -> None:
    put(inbox, "1", "2", "3", key="k")
    for body in "abc":
        put(inbox, body, key=body)
    waiter = Waiter(inbox, "2", seconds=0.02, concurrency=concurrency)
    waiter.worker.drain()
    assert sorted(effects(inbox)) == ["1", "a", "b", "c"]
    assert waiting(inbox) == ["k"]
    waiter.bad.clear()
    let_keys_be_due(inbox)
    waiter.worker.drain()
    assert effects(inbox)[4:] == ["2", "3"]
    assert waiting(inbox) == []
    assert dead(inbox) == []


def test_after_its_attempts_a_message_is_dead_and_each_attempt_counts_once(inbox: Dsn) -> None:
    put(inbox, "bad", key="k")
    put(inbox, "good", key="other")
    waiter = Waiter(inbox, "bad", concurrency=4, policy=saf.Policy(max_attempts=3))
    for _ in range(3):
        assert dead(inbox) == []
        waiter.worker.drain()
        let_keys_be_due(inbox)
    assert dead(inbox) == [("bad", "failed")]
    assert effects(inbox) == ["good"]


def test_what_handlers_had_done_when_another_one_failed_is_there_once(inbox: Dsn) -> None:
    for body in ("a", "wrong", "b"):
        put(inbox, body, key=body)
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=3)

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        await aeffect(connection, message)
        await asyncio.sleep(0.05)  # all have written something by now
        if message.text() == "wrong":
            raise ZeroDivisionError

    worker.drain()
    assert sorted(effects(inbox)) == ["a", "b"]
    assert waiting(inbox) == ["wrong"]


def test_a_statement_that_fails_fails_no_handler_that_runs_at_the_same_time(inbox: Dsn) -> None:
    for body in ("a", "wrong", "b", "swallowed", "c"):
        put(inbox, body, key=body)
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=5)

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        if message.text() == "wrong":
            await connection.execute("SELECT 1 / 0")
        if message.text() == "swallowed":
            try:
                await connection.execute("SELECT 1 / 0")
            except psycopg.errors.DivisionByZero:
                return
        await asyncio.sleep(0.05)
        await aeffect(connection, message)

    worker.drain()
    assert effects(inbox) == ["a", "b", "c"]
    assert waiting(inbox) == ["swallowed", "wrong"]


def test_batch_handlers_may_be_async_too(inbox: Dsn) -> None:
    put(inbox, "1", "2", key="k", message_type="many")
    put(inbox, "3", key="k", message_type="one")
    put(inbox, "4", key="k", message_type="many")
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=3)
    batches: list[int] = []

    @worker.batch_handler("many")
    async def many(messages: list[saf.Received], connection: Connection) -> None:
        batches.append(len(messages))
        for message in messages:
            await aeffect(connection, message)

    @worker.handler("one")
    async def one(message: saf.Received, connection: Connection) -> None:
        await aeffect(connection, message)

    assert worker.drain() == 4
    assert batches == [2, 1]
    assert effects(inbox) == ["1", "2", "3", "4"]


def test_a_message_without_a_handler_waits_and_those_before_it_are_handled(inbox: Dsn) -> None:
    put(inbox, "1", key="k", message_type="known")
    put(inbox, "2", key="k", message_type="new")
    put(inbox, "3", key="k", message_type="known")
    put(inbox, "4", key="other", message_type="known")
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=4)

    @worker.handler("known")
    async def known(message: saf.Received, connection: Connection) -> None:
        await asyncio.sleep(0.02)
        await aeffect(connection, message)

    worker.drain()
    assert sorted(effects(inbox)) == ["1", "4"]
    assert waiting(inbox) == ["k"]


def test_related_dialogs_are_never_handled_at_the_same_time(app: Dsn, mom: Dsn) -> None:
    """Nor is a dialog's end, which has no handler and takes effect by itself, lost."""
    dialogs.prepare(app, mom)
    begun = [dialogs.begin(app) for _ in range(4)]
    with app.connect(role="test") as connection:
        for number, dialog in enumerate(begun):
            dialog.send(connection, {"amount": number}, message_type="order")
    dialogs.end(app, begun[0])
    dialogs.forward(app, mom)
    worker = saf.Worker(mom, dialogs.WAREHOUSE, concurrency=8)
    at_once: list[int] = []
    running = [0]

    @worker.handler("order")
    async def handle(message: saf.Received, connection: Any) -> None:
        running[0] += 1
        at_once.append(running[0])
        await asyncio.sleep(0.01)
        dialog = message.dialog
        assert dialog is not None
        if message.json()["amount"]:  # the other end of the first has ended
            await connection.run_sync(dialog.send, b"", message_type="delivery")
        running[0] -= 1

    assert worker.drain() == 5
    assert at_once == [1] * 4
    with connect(mom) as connection:
        ((sent,),) = fetch(
            connection, "SELECT count(*) FROM saf.outbox WHERE message_type = 'delivery'"
        )
    assert sent == 3
    assert sorted(dialogs.states(mom)) == ["closed", "conversing", "conversing", "conversing"]


def test_what_is_not_signed_is_refused_also_there(inbox: Dsn) -> None:
    put(inbox, "unsigned")
    key = Key("hmac-sha256", "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlY3JldA==")
    waiter = Waiter(inbox, concurrency=2, require_signed=True, keys={"shop-1": key})
    waiter.worker.drain()
    assert dead(inbox) == [("unsigned", "unsigned")]
    assert not waiter.calls

    async def main() -> None:
        put(inbox, "again")
        async with saf.areceive(
            inbox, SUBSCRIPTION, require_signed=True, keys={"shop-1": key}
        ) as delivery:
            assert not delivery

    asyncio.run(main())
    assert [reason for _, reason in dead(inbox)] == ["unsigned", "unsigned"]


def test_all_threads_of_a_worker_share_one_event_loop(inbox: Dsn) -> None:
    store(inbox, 40, 2)
    worker = saf.Worker(inbox, SUBSCRIPTION, threads=3, max_messages=2, concurrency=2)
    loops: set[object] = set()
    done = threading.Event()

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0.002)
        await aeffect(connection, message)

    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        until(lambda: len(effects(inbox)) == 80)
    finally:
        worker.stop()
        thread.join()
        done.set()
    assert len(loops) == 1
    del worker, thread
    gc.collect()
    until(lambda: not [one for one in threading.enumerate() if one.name == "saf handlers"])


def test_workers_of_a_process_run_again_and_again_with_connections_of_one_pool(inbox: Dsn) -> None:
    """Connections of asyncio belong to the event loop in which they were first waited for."""
    engine = create_async_engine(url(inbox))
    calls: Counter[str] = Counter()

    async def handle(message: saf.Received, connection: Any) -> None:
        calls[message.text()] += 1
        statement = sa.text("INSERT INTO effect (key, body) VALUES (:key, :body)")
        await connection.execute(statement, {"key": message.key, "body": message.text()})

    workers = [saf.Worker(engine, SUBSCRIPTION, concurrency=3) for _ in range(2)]
    for worker in workers:
        worker.handler()(handle)
    for number in range(4):
        for key in "abc":
            put(inbox, f"{key}{number}", key=key)
        assert workers[number % 2].drain() == 3
    assert calls == {f"{key}{number}": 1 for key in "abc" for number in range(4)}
    asyncio.run(engine.dispose())


def test_a_worker_runs_again_though_a_handler_blocks_its_event_loop(inbox: Dsn) -> None:
    put(inbox, "1")
    worker = saf.Worker(inbox, SUBSCRIPTION, stop_timeout=0.1)
    at_it, go_on, gone_on = threading.Event(), threading.Event(), threading.Event()

    @worker.handler()
    async def handle(_: saf.Received, __: Connection) -> None:
        at_it.set()
        go_on.wait(30)
        gone_on.set()

    def run() -> None:
        with pytest.raises(StopTimeout):
            worker.run()

    thread = threading.Thread(target=run)
    thread.start()
    assert at_it.wait(60)
    worker.stop()
    thread.join(60)
    other = Waiter(inbox)
    until(lambda: other.worker.drain() or effects(inbox) == ["1"])
    assert not gone_on.is_set()
    go_on.set()
    assert effects(inbox) == ["1"]


def test_why_handlers_that_ran_at_the_same_time_were_undone_is_logged(inbox: Dsn) -> None:
    for body in ("a", "wrong", "b"):
        put(inbox, body, key=body)
    waiter = Waiter(inbox, "wrong", concurrency=3)
    with capture_logs() as lines:
        waiter.worker.drain()
    undone, failed = lines
    assert (undone["event"], undone["log_level"]) == ("together_failed", "warning")
    assert undone["error"] == "ValueError: *** will not do", "bodies are not logged"
    assert undone["messages"] == 3
    assert failed["event"] == "message_failed"


@pytest.mark.parametrize("kind", ["dsn", "sqlalchemy", "callable"])
def test_a_worker_takes_whatever_gives_connections_of_asyncio(inbox: Dsn, kind: str) -> None:
    """Whatever either side prepares, neither takes a name of the other's."""
    bodies = [str(number) for number in range(30)]
    put(inbox, *bodies, key="k")
    engine: Any = inbox.conninfo
    if kind != "dsn":
        engine = pool(inbox) if kind == "callable" else sqlalchemy(inbox)
    worker = saf.Worker(engine, SUBSCRIPTION, max_messages=1)

    @worker.handler()
    async def handle(message: saf.Received, connection: Any) -> None:
        if kind == "sqlalchemy":
            await connection.run_sync(
                lambda plain: plain.exec_driver_sql(EFFECT, (message.key, message.text()))
            )
        else:
            await aeffect(connection, message)

    assert worker.drain() == 30
    assert effects(inbox) == bodies


def test_handlers_may_share_a_connection_of_sqlalchemy_at_the_same_time(inbox: Dsn) -> None:
    store(inbox, 10, 3)
    worker = saf.Worker(sqlalchemy(inbox), SUBSCRIPTION, concurrency=10)
    statement = sa.text("INSERT INTO effect (key, body) VALUES (:key, :body) RETURNING number")

    @worker.handler()
    async def handle(message: saf.Received, connection: Any) -> None:
        found = await connection.execute(statement, {"key": message.key, "body": message.text()})
        assert found.scalar_one() > 0

    assert worker.drain() == 30
    assert by_key(inbox) == {f"k{key}": [1, 2, 3] for key in range(1, 11)}


@pytest.mark.parametrize("kind", ["dsn", "callable"])
def test_a_worker_under_asyncio_is_notified_too(
    inbox: Dsn, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("saf.log.pauses"), "SHORTEST_SECONDS", 60.0)
    polling = importlib.import_module("saf.receiving.receive")
    monkeypatch.setattr(polling, "LISTENING_PAUSE_SECONDS", 60.0)
    with connect(inbox) as connection:
        link.switch(connection, True)
    waiter = Waiter(inbox if kind == "dsn" else pool(inbox), listen=True)
    with running(waiter.worker):
        for number in range(3):  # the second is notified while it handles, or just after
            put(inbox, str(number))
            until(lambda: len(effects(inbox)) > number, seconds=20)  # noqa: B023 - called at once


def test_what_a_handler_sends_is_sent_if_its_work_commits(inbox: Dsn) -> None:
    put(inbox, "good", key="good")
    put(inbox, "bad", key="bad")
    outbox = saf.Outbox()
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=2)

    @worker.handler()
    async def handle(message: saf.Received, connection: Connection) -> None:
        await outbox.asend(connection, "elsewhere", message.text())
        if message.text() == "bad":
            raise ValueError

    worker.drain()
    with connect(inbox) as connection:
        sent = fetch(connection, "SELECT convert_from(body, 'UTF8') FROM saf.outbox")
    assert sent == [("good",)]


def test_a_worker_runs_in_the_applications_own_event_loop(inbox: Dsn) -> None:
    store(inbox, 5, 4)
    waiter = Waiter(inbox, concurrency=5)

    async def main() -> None:
        loops: set[object] = set()
        waiter.worker.handler("noted")(waiter.handle)

        @waiter.worker.handler("loop")
        async def handle(message: saf.Received, connection: Connection) -> None:
            loops.add(asyncio.get_running_loop())
            await aeffect(connection, message)

        put(inbox, "loop", message_type="loop")
        task = asyncio.create_task(waiter.worker.arun())
        while len(await asyncio.to_thread(effects, inbox)) < 21:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loops == {asyncio.get_running_loop()}
        put(inbox, "drained", key="drained")
        assert await waiter.worker.arun(drain=True) >= 1

    asyncio.run(main())
    assert effects(inbox)[-1] == "drained"
    assert unread(inbox) == 0
    put(inbox, "without it")
    waiter.worker.run(drain=True)
    assert unread(inbox) == 0


def test_threads_for_calls_that_may_hang_end_with_their_event_loop() -> None:
    threads = Detached()
    thread = threads.submit(threading.current_thread).result()
    threads.shutdown()
    thread.join(60)
    assert not thread.is_alive()


def test_what_tasks_do_at_their_end_is_done_before_the_event_loop_of_the_process_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saf.receiving.worker.END_SECONDS", 60.0)
    done: list[bool] = []
    begun = threading.Event()

    async def task() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.1)
            done.append(True)

    own = OwnLoop()
    asyncio.run_coroutine_threadsafe(task(), own.loop)
    assert begun.wait(60)
    del own
    gc.collect()
    assert done == [True]


def test_a_call_that_is_under_way_as_the_handlers_are_cancelled_calls_none() -> None:
    called: list[bool] = []

    async def handler() -> None:
        called.append(True)

    async def main() -> None:
        running = asyncio.get_running_loop()
        loop = EventLoop(running)
        under_way = threading.Event()
        soon = running.call_soon_threadsafe

        def noted(*given: Any, **options: Any) -> asyncio.Handle:
            handle = soon(*given, **options)
            under_way.set()
            return handle

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
            patch.setattr(running, "call_soon_threadsafe", noted)
            call = thread.submit(loop.call, [handler])
            assert under_way.wait(60)  # the event loop does nothing meanwhile
            loop.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wrap_future(call)

    asyncio.run(main())
    assert called == []


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_worker_that_is_cancelled_twice_rolls_back_what_its_handlers_were_at(
    inbox: Dsn, concurrency: int
) -> None:
    put(inbox, "a", "b")

    async def main() -> None:
        waiter = Waiter(inbox, seconds=600, concurrency=concurrency)
        task = asyncio.create_task(waiter.worker.arun())
        while waiter.at_once < concurrency:
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waiter.calls.total() == concurrency, "no handler is called after that"

    asyncio.run(main())
    assert effects(inbox) == []
    assert unread(inbox) == 2
    waiter = Waiter(inbox)
    until(lambda: waiter.worker.drain() >= 0 and len(effects(inbox)) == 2)
    assert unread(inbox) == 0
    assert dead(inbox) == []


def test_workers_in_an_applications_event_loop_leave_its_threads_to_others(inbox: Dsn) -> None:
    other = "shipping"
    with connect(inbox) as connection:
        create_service(connection, other)

    async def handle(message: saf.Received, connection: Connection) -> None:
        await asyncio.to_thread(str)
        await aeffect(connection, message)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        tasks = []
        for subscription in (SUBSCRIPTION, other):
            worker = saf.Worker(inbox, subscription)
            worker.handler()(handle)
            tasks.append(asyncio.create_task(worker.arun()))
        async with asyncio.timeout(30):
            while len(effects(inbox)) < 2:
                await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    put(inbox, "1")
    with connect(inbox) as connection:
        connection.execute("INSERT INTO saf.inbox (to_service, body) VALUES (%s, '2')", [other])
    asyncio.run(main())
    assert sorted(effects(inbox)) == ["1", "2"]


def test_nobody_who_is_cancelled_twice_waits_for_a_handler_that_cannot_be_cancelled(
    inbox: Dsn,
) -> None:
    put(inbox, "1")
    at_it, go_on = threading.Event(), threading.Event()
    worker = saf.Worker(inbox, SUBSCRIPTION, stop_timeout=600)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)
        at_it.set()
        go_on.wait(60)

    async def main() -> None:
        task = asyncio.create_task(worker.arun())
        while not at_it.is_set():
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    let_the_server_notice(inbox)  # the connection is cut
    assert not go_on.is_set()
    go_on.set()
    assert effects(inbox) == []
    assert unread(inbox) == 1


def test_a_worker_that_is_told_to_stop_finishes_what_it_is_at_and_puts_the_rest_back(
    inbox: Dsn,
) -> None:
    store(inbox, 12, 1)
    waiter = Waiter(inbox, seconds=0.5, concurrency=3)
    thread = threading.Thread(target=waiter.worker.run)
    thread.start()
    until(lambda: waiter.at_once == 3)
    waiter.worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert len(effects(inbox)) == 3
    with connect(inbox) as connection:
        ((waits,),) = fetch(connection, "SELECT count(*) FROM saf.parked")
    assert unread(inbox) + waits == 9
    waiter.seconds = 0
    let_keys_be_due(inbox)
    waiter.worker.drain()
    assert by_key(inbox) == {f"k{n}": [1] for n in range(1, 13)}
    assert max(waiter.calls.values()) == 12, "each was called once, and all have the same body"


def test_handlers_that_take_too_long_to_stop_are_rolled_back_and_cancelled(inbox: Dsn) -> None:
    put(inbox, "a", "b")
    waiter = Waiter(inbox, seconds=600, concurrency=2, stop_timeout=0.2)
    raised: list[BaseException] = []
    cancelled: list[str] = []
    inner = waiter.handle

    async def handle(message: saf.Received, connection: Connection) -> None:
        try:
            await inner(message, connection)
        except asyncio.CancelledError:
            cancelled.append(message.text())
            raise

    waiter.worker.handler("x")(handle)
    put(inbox, "c", message_type="x")

    def run() -> None:
        try:
            waiter.worker.run()
        except StopTimeout as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: waiter.at_once == 2)
    waiter.worker.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert "message_id" in str(raised[0])
    assert effects(inbox) == []
    until(lambda: waiter.at_once == 0)
    assert unread(inbox) == 3


PROGRAM = """
import asyncio, os, sys, time
import saf

worker = saf.Worker(os.environ["INBOX"], "billing", policy=saf.Policy(max_attempts=1),
                    stop_timeout=float(os.environ["STOP"]))

@worker.handler()
async def handle(message, connection):
    print("begun", flush=True)
    if os.environ["WAITS"] == "thread":
        await asyncio.to_thread(time.sleep, 600)
    await asyncio.sleep(600)

if __name__ == "__main__":
    try:
        worker.run()
    except KeyboardInterrupt:
        sys.stdin.read()
        raise
"""


@contextmanager
def program(
    folder: Path, inbox: Dsn, *arguments: str, waits: str, stop_seconds: float
) -> Iterator[subprocess.Popen[str]]:
    """A worker in a process of its own, whose handler has begun."""
    (folder / "consumers.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(
            INBOX=inbox.conninfo, PYTHONPATH=str(ROOT), WAITS=waits, STOP=str(stop_seconds)
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("waits", ["loop", "thread"])
def test_a_second_signal_ends_a_worker_at_once_and_its_message_has_not_failed(
    inbox: Dsn, tmp_path: Path, waits: str
) -> None:
    put(inbox, "1", key="k")
    with program(tmp_path, inbox, "consumers.py", waits=waits, stop_seconds=600) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # until it has heard of the first one, which nothing tells
        process.send_signal(signal.SIGINT)
        let_the_server_notice(inbox)  # that the delivery has come to its end, however it did
        _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert dead(inbox) == []
    assert waiting(inbox) == []
    assert unread(inbox) == 1


WORKER = ("-m", "saf", "worker", "consumers:worker")


@pytest.mark.parametrize("arguments", [("consumers.py",), WORKER, (*WORKER, "--processes", "1")])
def test_a_handler_in_a_thread_that_never_ends_keeps_no_worker_from_ending(
    inbox: Dsn, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    put(inbox, "1", key="k")
    with program(tmp_path, inbox, *arguments, waits="thread", stop_seconds=0.2) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert "longer than stop_timeout" in err
    assert process.returncode == (75 if "worker" in arguments else 1)
    assert unread(inbox) == 1


MODULE = """
import asyncio, os
import saf

worker = saf.Worker(os.environ["INBOX"], "billing", max_messages=20, concurrency=4)

@worker.handler()
async def handle(message, connection):
    await asyncio.sleep(0.01)
    await connection.execute("INSERT INTO effect (key, body) VALUES (%s, %s)",
                             [message.key, message.text()])
"""


@pytest.mark.slow
def test_a_worker_with_async_handlers_that_is_killed_leaves_nothing_half_done(
    inbox: Dsn, tmp_path: Path
) -> None:
    store(inbox, 10, 30)
    (tmp_path / "consumers.py").write_text(MODULE)

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "saf", "worker", "consumers:worker", *arguments],
            cwd=tmp_path,
            env=environment(INBOX=inbox.conninfo, PYTHONPATH=str(ROOT)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    for least in (20, 80, 140):
        process = start()
        until(lambda: len(effects(inbox)) >= least)  # noqa: B023 - called before the next
        process.send_signal(signal.SIGKILL)
        process.wait()
    for _ in range(60):
        process = start("--drain")
        assert process.wait(60) in (0, 75)
        let_keys_be_due(inbox)
        if len(effects(inbox)) == 300:
            break
    assert by_key(inbox) == {f"k{key}": [*range(1, 31)] for key in range(1, 11)}


# What is refused


def test_handlers_of_one_worker_are_all_async_or_none_is(inbox: Dsn) -> None:
    worker = saf.Worker(inbox, SUBSCRIPTION)

    @worker.handler("a")
    async def first(message: saf.Received, connection: Connection) -> None: ...

    with pytest.raises(UsageError, match=r"first is async, and .*second is not"):

        @worker.handler("b")
        def second(message: saf.Received, connection: Any) -> None: ...


def test_handlers_that_do_not_wait_cannot_run_at_the_same_time(inbox: Dsn) -> None:
    worker = saf.Worker(inbox, SUBSCRIPTION, concurrency=2)

    @worker.handler()
    def handle(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        effect(connection, message)

    with pytest.raises(UsageError, match="threads"):
        worker.drain()
    with pytest.raises(UsageError, match="concurrency"):
        saf.Worker(inbox, SUBSCRIPTION, concurrency=0)


def test_a_processor_cannot_be_async() -> None:
    async def later(self: object, message: saf.Received, connection: Any) -> None: ...

    with pytest.raises(UsageError, match=r"only those of saf\.Worker"):
        type("Waits", (saf.Processor,), {"any": saf.handles()(later)})


_: Callable[..., Coroutine[Any, Any, None]] = aeffect


def test_a_connection_beside_that_of_asyncio_is_set_as_that_one(inbox: Dsn) -> None:
    async def main() -> tuple[object, ...]:
        loop = EventLoop(asyncio.get_running_loop())
        async with await psycopg.AsyncConnection.connect(inbox.conninfo, autocommit=True) as own:
            await own.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)

            @asynccontextmanager
            async def given() -> AsyncIterator[Connection]:
                yield own

            def seen() -> tuple[object, ...]:
                with aconnected(given, loop) as link:
                    return link.raw.autocommit, link.raw.isolation_level

            return await asyncio.to_thread(seen)

    assert asyncio.run(main()) == (True, psycopg.IsolationLevel.SERIALIZABLE)
