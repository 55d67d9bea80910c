"""A dispatcher: sends the messages of a subscription to its endpoint, session after session.

    dispatcher = Dispatcher("billing", endpoint, dsn)
    running.run([dispatcher])               # until SIGTERM; or from a shell: saf dispatch --loop

Guarantees:

- *At least once.* A message is marked after its endpoint has answered. A dispatcher that is killed
  at any point leaves only those messages in doubt that were in flight, or answered and not marked;
  they are sent again, with the same ids.
- *One at a time, in order.* One message of each key is in flight, and the next one follows when it
  is done. Any number of processes share the shards, so no two processes send for the same key. A
  process that was stopped for longer than its lease and wakes up may still have a request in
  flight.
- *No transaction waits for an endpoint.*

A dispatcher needs two sessions of the database, which must not be a pooler's.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from saf.broker import health, services
from saf.database import Dsn, check_schema, unavailable_if_lost
from saf.dispatch import source
from saf.dispatch.http import Client
from saf.dispatch.session import Session
from saf.dispatch.settings import Endpoint
from saf.errors import Fenced, Refused, SafError, Unavailable, UsageError
from saf.logger import Log
from saf.receiving.failures import exception
from saf.receiving.hand import Reader
from saf.receiving.membership import Membership
from saf.receiving.stopping import STOP_SECONDS
from saf.receiving.summary import Summary

if TYPE_CHECKING:
    from saf.signing.signer import Signer

RECONNECT_SECONDS = 2.0

LEASE_SECONDS = 30.0

log = Log("saf.dispatch")


class Dispatcher:
    """Sends a subscription's messages to its endpoint; see the module's docstring."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        dsn: Dsn,
        *,
        lease_seconds: float = LEASE_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        signer: Signer | None = None,
        summary: Summary | None = None,
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.dsn = dsn
        self.lease_seconds = lease_seconds
        self.stop_seconds = stop_seconds
        self.signer = signer
        """Signs replies."""
        self.summary = Summary() if summary is None else summary
        """Results so far, including those of earlier dispatchers given the same summary."""
        self._held_up = False

    @property
    def exit_code(self) -> int:
        """Exit code of a run that has sent the messages that were due."""
        return self.summary.exit_code or (Unavailable.exit_code if self._held_up else 0)

    async def run(self, stopping: asyncio.Event, *, drain: bool = False) -> None:
        """Dispatch until told to stop; with ``drain``, until no message is due.

        Raises:
            ConfigurationError: the subscription does not exist.
            EndpointRemoved: the endpoint was stored in a broker, and has been removed.
            UsageError: a message cannot be dispatched, or a drain lacks a right.
            Refused: the database denies this login access.
            Unavailable: a drain's database does not answer, or a lock is held for too long.
        """
        while not stopping.is_set():
            try:
                await self._session(stopping, drain=drain)
            except (UsageError, Refused):
                raise
            except Fenced as error:
                log.warning("taken_over", endpoint=self.name, detail=str(error))
            except Exception as error:
                # whatever went wrong, messages that were not marked are sent again
                if drain:
                    with unavailable_if_lost(self._what):
                        raise
                fields = exception(error)
                if isinstance(error, (SafError, psycopg.Error)):
                    del fields["stack"]
                log.warning("session_failed", endpoint=self.name, **fields)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECONNECT_SECONDS):
                        await stopping.wait()
            else:
                return

    async def _session(self, stopping: asyncio.Event, *, drain: bool) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"saf dispatch {self.name}")
        try:
            async with AsyncExitStack() as stack:
                connection = await loop.run_in_executor(thread, self._connect)
                stack.push_async_callback(loop.run_in_executor, thread, connection.close)
                reader = await loop.run_in_executor(thread, self._reader, connection)
                make = partial(Membership, self.dsn, reader.subscription_id, self.lease_seconds)
                membership = await loop.run_in_executor(thread, make)
                stack.push_async_callback(loop.run_in_executor, thread, membership.leave)
                client = await stack.enter_async_context(Client(self.endpoint))
                session = Session(
                    name=self.name,
                    endpoint=self.endpoint,
                    reader=replace(reader, owner=membership.member.member_id),
                    connection=connection,
                    membership=membership,
                    client=client,
                    thread=thread,
                    summary=self.summary,
                )
                try:
                    await session.run(stopping, drain=drain, stop_seconds=self.stop_seconds)
                    self._held_up = not session.judge.condition.sends or (
                        drain
                        and await loop.run_in_executor(thread, source.any_waits, connection, reader)
                    )
                except psycopg.OperationalError as error:
                    if connection.closed:
                        raise Unavailable(self._what, str(error).splitlines()[0]) from error
                    raise
        finally:
            thread.shutdown(wait=False)

    @property
    def _what(self) -> str:
        return f"the database of endpoint {self.name!r}"

    def _connect(self) -> psycopg.Connection[Any]:
        return self.dsn.connect(role="dispatch", autocommit=True)

    def _reader(self, connection: psycopg.Connection[Any]) -> Reader:
        with unavailable_if_lost(self._what):
            check_schema(connection)
            subscription = self.endpoint.subscription or self.name
            health.refuse(connection, "inbox", reader=f"inbox/{subscription}")
            found = services.subscription(connection, subscription)
        return Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            signer=self.signer,
        )
