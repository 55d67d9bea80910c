"""A worker beside an application: it begins and ends with a block, and no error is silent."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

import saf
from saf.broker.services import remove_service
from saf.database import Dsn
from saf.errors import ConfigurationError, StopTimeout
from saf.receiving import worker as workers
from tests.pipeline import connect
from tests.receivers import SUBSCRIPTION, dead, effects, prepare, put, waiting

Connection = psycopg.AsyncConnection[Any]
NOTE = "INSERT INTO effect (key, body) VALUES (%s, %s)"


@pytest.fixture
def inbox(mom: Dsn) -> Dsn:
    prepare(mom)
    return mom


def noting(inbox: Dsn, subscription: str = SUBSCRIPTION, **options: Any) -> saf.Worker:
    """A worker that notes each message, in its database."""
    worker = saf.Worker(inbox, subscription, **options)

    @worker.handler
    async def handle(message: saf.Received, connection: Connection) -> None:
        await connection.execute(NOTE, [message.key, message.text()])

    return worker


async def noted(inbox: Dsn, *bodies: str) -> None:
    async with asyncio.timeout(30):
        while await asyncio.to_thread(effects, inbox) != [*bodies]:
            await asyncio.sleep(0.02)


def test_it_receives_while_the_block_runs_and_not_after_it(inbox: Dsn) -> None:
    worker = noting(inbox)

    async def main() -> None:
        for body in ("first", "second"):  # an application may start again in its process
            put(inbox, body)
            async with worker.running() as task:
                assert not task.done()
                await noted(inbox, *("first", "second")[: 1 + (body == "second")])
            assert task.done()
            assert task.exception() is None

    with capture_logs() as logs:
        asyncio.run(main())
    assert logs == []
    put(inbox, "third")
    assert effects(inbox) == ["first", "second"]


def test_the_block_begins_when_the_worker_receives(inbox: Dsn) -> None:
    worker = noting(inbox)

    async def main() -> None:
        async with worker.running():
            assert worker._begun.is_set()

    asyncio.run(main())


def test_a_message_in_hand_is_finished_at_the_end_of_the_block(inbox: Dsn) -> None:
    worker, begun = saf.Worker(inbox, SUBSCRIPTION), asyncio.Event()

    @worker.handler
    async def handle(message: saf.Received, connection: Connection) -> None:
        begun.set()
        await asyncio.sleep(0.3)
        await connection.execute(NOTE, [message.key, message.text()])

    async def main() -> None:
        async with worker.running():
            await asyncio.wait_for(begun.wait(), 30)

    put(inbox, "slow", "later", key="k")
    asyncio.run(main())
    assert effects(inbox) == ["slow"]
    assert (waiting(inbox), dead(inbox)) == ([], [])


def test_a_worker_that_cannot_receive_keeps_the_block_from_beginning(inbox: Dsn) -> None:
    worker = noting(inbox, "biling")
    began: list[bool] = []

    async def main() -> None:
        async with worker.running():
            began.append(True)

    with pytest.raises(ConfigurationError, match="'biling'"):
        asyncio.run(main())
    assert began == []


def test_a_worker_whose_database_does_not_answer_does_not_delay_the_block_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "BEGIN_SECONDS", 0.2)
    worker = noting(Dsn("postgresql://nobody@127.0.0.1:1/nothing"))

    async def main() -> bool:
        async with worker.running() as task:
            return not task.done()

    with capture_logs() as logs:
        assert asyncio.run(main())
    assert {one["event"] for one in logs} == {"delivery_failed"}


def test_a_worker_that_ends_early_is_logged_at_once_and_raised_at_the_end(inbox: Dsn) -> None:
    worker = noting(inbox)
    before: list[str] = []

    async def main() -> None:
        with capture_logs() as logs:
            async with worker.running() as task:
                with connect(inbox) as connection:
                    remove_service(connection, SUBSCRIPTION)
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE starts_with(application_name, 'saf receive') "
                        "AND datname = current_database()"
                    )
                await asyncio.wait([task], timeout=30)
                await asyncio.sleep(0)
                before.extend(one["event"] for one in logs)

    with pytest.raises(ConfigurationError, match=SUBSCRIPTION):
        asyncio.run(main())
    assert before[-1] == "worker_ended"


def test_an_error_of_the_block_stops_the_worker_and_is_raised(inbox: Dsn) -> None:
    worker = noting(inbox)
    tasks: list[asyncio.Task[int]] = []

    async def main() -> None:
        async with worker.running() as task:
            tasks.append(task)
            raise LookupError("of the application")

    with pytest.raises(LookupError, match="of the application"):
        asyncio.run(main())
    assert tasks[0].done()
    assert not tasks[0].cancelled()


def test_a_block_that_is_cancelled_stops_the_worker_in_order(inbox: Dsn) -> None:
    worker = noting(inbox)

    async def main() -> None:
        begun = asyncio.Event()

        async def block() -> None:
            async with worker.running():
                begun.set()
                await asyncio.sleep(600)

        task = asyncio.create_task(block())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    put(inbox, "afterwards")
    assert effects(inbox) == []


def test_a_handler_that_does_not_end_is_rolled_back_and_raised_at_the_end(inbox: Dsn) -> None:
    worker, begun = saf.Worker(inbox, SUBSCRIPTION, stop_timeout=0.2), asyncio.Event()

    @worker.handler
    async def handle(message: saf.Received, connection: Connection) -> None:
        await connection.execute(NOTE, [message.key, message.text()])
        begun.set()
        await asyncio.sleep(600)

    async def main() -> None:
        async with worker.running():
            await asyncio.wait_for(begun.wait(), 30)

    put(inbox, "endless")
    with pytest.raises(StopTimeout):
        asyncio.run(main())
    assert effects(inbox) == []
