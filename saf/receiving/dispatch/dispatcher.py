"""Dispatchers: each sends the messages of a subscription to its endpoint, session after session.

    dispatcher = Dispatcher("billing", endpoint, dsn)
    run([dispatcher])                       # until SIGTERM; or from a shell: saf dispatch --loop

Guarantees:

- *At least once.* A message is marked after its endpoint has answered. A dispatcher that is killed
  at any point leaves only those messages in doubt that were in flight, or answered and not marked;
  they are sent again, with the same ids.
- *One at a time, in order.* One message of each key is in flight, and the next one follows when it
  is done. Any number of processes share the shards, so no two processes send for the same key. A
  process that was stopped for longer than its lease and wakes up may still have a request in
  flight.
- *No transaction waits for an endpoint.*
- *A failure stays at its endpoint.* `run` runs dispatchers side by side in one process, until it is
  told to stop. If one fails, the others continue.

Endpoints stored in brokers may be added or removed while dispatchers run: ``find`` returns the
present ones. A dispatcher whose endpoint was removed or replaced ends in order; a new one begins.

A dispatcher needs two sessions of the database, which must not be a pooler's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg

from saf.broker import health, services
from saf.database import Dsn, check_schema, reason_of, unavailable_if_lost
from saf.database.background import Background
from saf.errors import EndpointRemoved, Fenced, Refused, SafError, Unavailable, UsageError
from saf.receiving.dispatch import source
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.session import Session
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.failures import exception
from saf.receiving.hand import Reader
from saf.receiving.membership import Membership
from saf.receiving.stopping import STOP_SECONDS
from saf.receiving.summary import Summary
from saf.signals import stop_on_signals
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from saf.signing.signer import Signer

RECONNECT_SECONDS = 2.0
"""Wait between a failed session and the next one, in seconds."""

LEASE_SECONDS = 30.0
"""Default term of the lease on shards, in seconds."""

FIND_SECONDS = 5.0
"""Interval between searches for endpoints, in seconds."""

AGAIN_SECONDS = 60.0
"""Time after which a failed endpoint is tried again, in seconds."""

KNOWN = (SafError, psycopg.Error)
"""Errors that are the fault of an endpoint or a database."""

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
                        raise Unavailable(self._what, reason_of(error)) from error
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
            services.refuse_fair(found, "dispatchers")
        return Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            signer=self.signer,
        )


Find = Callable[[], Sequence[Dispatcher]]


def run(
    dispatchers: Sequence[Dispatcher], *, drain: bool = False, find: Find | None = None
) -> None:
    """Run dispatchers side by side until SIGTERM or SIGINT; with ``drain``, until all have drained.

    With ``find``, the dispatchers that it returns run too, for as long as it returns them. A
    dispatcher that fails does not stop the others; unless they drain, it is tried again later. The
    end does not wait for ``find``, which may hang.

    Raises:
        SafError: without ``find``, all dispatchers have ended, and at least one has failed.
    """
    with _runner() as runner:
        runner.run(_Running(dispatchers, drain=drain, find=find).run())


def _runner() -> asyncio.Runner:
    """Return a runner with uvloop, which takes less processor time, or with asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class _Running:
    def __init__(
        self, dispatchers: Sequence[Dispatcher], *, drain: bool, find: Find | None
    ) -> None:
        self._given = dispatchers
        self._drain = drain
        self._follows = find is not None
        self._find = find or (lambda: dispatchers)
        self._told = asyncio.Event()
        self._at_work: dict[str, tuple[Dispatcher, asyncio.Event, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._failed: dict[str, tuple[float, Exception]] = {}
        """Failed endpoints among those at work, each with the time and the error."""
        self._problem = ""
        self._finding = Background(1, "saf dispatch find")
        """Brokers may hang during a search, and the end does not wait for them."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(self._told.set)

        with stop_on_signals(stop):
            for dispatcher in self._given:
                self._begin(dispatcher)
            stop_request = asyncio.create_task(self._told.wait())
            find_at = time.monotonic() + FIND_SECONDS
            while not self._told.is_set() and (self._follows or self._busy()):
                left = None if self._drain else max(0.0, find_at - time.monotonic())
                waiting_for = {stop_request, *self._busy()}
                await asyncio.wait(waiting_for, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not self._drain and time.monotonic() >= find_at:
                    search = asyncio.create_task(self._look(self._find))
                    await asyncio.wait({stop_request, search}, return_when=asyncio.FIRST_COMPLETED)
                    if search.done():
                        search.result()
                    else:
                        search.cancel()
                    find_at = time.monotonic() + FIND_SECONDS
            problems = [] if self._told.is_set() else [error for _, error in self._failed.values()]
            stop_request.cancel()
            self._finding.dismiss()
            for name in [*self._at_work]:
                self._end(name)
            ended = await asyncio.gather(*self._ending, return_exceptions=True)
        errors = [*(result for result in ended if result is not None), *problems]
        if errors:
            raise errors[0]

    def _busy(self) -> list[asyncio.Task[None]]:
        return [task for _, _, task in self._at_work.values() if not task.done()]

    def _begin(self, dispatcher: Dispatcher) -> None:
        stopping = asyncio.Event()
        task = asyncio.create_task(self._work(dispatcher, stopping))
        self._at_work[dispatcher.name] = (dispatcher, stopping, task)

    async def _work(self, dispatcher: Dispatcher, stopping: asyncio.Event) -> None:
        """Run a dispatcher. If its endpoint or its database fails, the others continue."""
        try:
            await dispatcher.run(stopping, drain=self._drain)
        except Exception as error:
            log.warning("endpoint_not_dispatched", endpoint=dispatcher.name, **_said(error))
            _, _, task = self._at_work.get(dispatcher.name, (None, None, None))
            if task is asyncio.current_task():  # no other dispatcher has taken its name since
                self._failed[dispatcher.name] = time.monotonic(), error
        except BaseException:
            self._told.set()
            raise

    def _end(self, name: str) -> None:
        self._failed.pop(name, None)
        _, stopping, task = self._at_work.pop(name)
        stopping.set()
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._ending.discard(task)

    async def _look(self, find: Find) -> None:
        """Begin new endpoints, and end removed ones."""
        try:
            future = asyncio.wrap_future(self._finding.submit(find))
            found = {one.name: one for one in await future}
        except KNOWN as error:
            if str(error) != self._problem:
                log.warning("endpoints_not_read", detail=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        for name, (failed_at, failure) in [*self._failed.items()]:
            is_due = time.monotonic() - failed_at > AGAIN_SECONDS
            # an endpoint that was removed and is found may have been added again since
            if is_due or isinstance(failure, EndpointRemoved):
                self._end(name)  # it begins again below
        for name, (dispatcher, _, _) in [*self._at_work.items()]:
            if name not in found or found[name].endpoint != dispatcher.endpoint:
                log.info("endpoint_ends", endpoint=name)
                self._end(name)
        for name, dispatcher in found.items():
            if name not in self._at_work:
                log.info("endpoint_begins", endpoint=name)
                self._begin(dispatcher)


def _said(error: Exception) -> dict[str, Any]:
    """Return the log fields of an error; for errors of saf's own code, with the stack."""
    return {"detail": str(error)} if isinstance(error, KNOWN) else exception(error)
