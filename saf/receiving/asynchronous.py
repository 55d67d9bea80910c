"""Receive under asyncio: messages in order, exactly once, in the consumer's own transaction.

    async with saf.areceive(engine, "billing", wait_seconds=5) as delivery:
        for message in delivery:
            await delivery.connection.execute(…)

This runs `saf.receive` in a thread while the task awaits it, so the event loop never waits for a
database. `saf.receiving.async_link` lists the possible values of ``engine``.

A task that is cancelled while it waits for messages gets none. A task that is cancelled inside the
block has failed, as with any other exception: everything is rolled back, and the messages are
delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from saf.receiving.async_link import aconnected
from saf.receiving.delivery import Delivery
from saf.receiving.event_loop import EventLoop
from saf.receiving.receive import one_delivery
from saf.receiving.retries import Policy
from saf.signing.keys import Key
from saf.signing.signer import Signer
from saf.signing.verifier import Trust
from saf.tracing import spans

if TYPE_CHECKING:
    from saf.receiving.link import AsyncEngine

T = TypeVar("T")


@asynccontextmanager
async def areceive(
    engine: AsyncEngine,
    subscription: str,
    *,
    max_messages: int = 100,
    wait_seconds: float = 0.0,
    policy: Policy | None = None,
    require_signed: bool = False,
    keys: Mapping[str, Key] | None = None,
    signer: Signer | None = None,
) -> AsyncIterator[Delivery[Any]]:
    """Receive messages of a subscription under asyncio, in order and exactly once.

    Args:
        engine: where the inbox and the consumer's tables are: a SQLAlchemy AsyncEngine on psycopg,
            a dsn, or a callable that gives psycopg's AsyncConnections by ``async with``.
        subscription: the subscription to receive from; each service has a subscription of its own
            name.
        max_messages: the most messages in one delivery, which is one transaction.
        wait_seconds: how long to wait for the first message; after that, the delivery is empty.
        policy: how to treat messages whose handling fails.
        require_signed: hand out only messages that are signed with one of the ``keys``.
        keys: the keys that senders sign with; as for `saf.receive`.
        signer: signs what the receiver sends on the messages' dialogs.

    Raises:
        ConfigurationError, UsageError, SchemaMissing, SchemaMismatch, Restored, Unavailable: as
            `saf.receive`.
    """
    trust = Trust.of(keys, required=require_signed)
    stopping = Event()
    with ThreadPoolExecutor(1, "saf areceive") as thread:

        async def step(call: Callable[..., T], *args: Any) -> tuple[T, BaseException | None]:
            """Run a call in the thread to its end; return this task's cancellation too, if any."""
            future = asyncio.get_running_loop().run_in_executor(thread, call, *args)
            cancelled = None
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError as error:
                    cancelled = error
                    stopping.set()
            return future.result(), cancelled

        receiving = one_delivery(
            aconnected(engine, EventLoop(asyncio.get_running_loop())),
            subscription,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            policy=policy,
            trust=trust,
            signer=signer,
            stopping=stopping,
        )
        delivery, cancelled = await step(receiving.__enter__)
        if cancelled is not None:
            await step(receiving.__exit__, type(cancelled), cancelled, None)
            raise cancelled
        try:
            with spans.receiving(subscription, delivery):
                yield delivery
        except BaseException as error:
            suppressed, _ = await step(receiving.__exit__, type(error), error, error.__traceback__)
            if not suppressed:
                raise
        else:
            _, cancelled = await step(receiving.__exit__, None, None, None)
            if cancelled is not None:
                raise cancelled
