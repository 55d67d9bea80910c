"""One round: writers, forwarders and faults; then everything drains and is checked."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg
from psycopg import sql

from saf.database import Dsn
from saf_demo.servers import free_port
from tests.crash import consumers, dashboard, faults, named, set_backs, stall, streams
from tests.crash.bugs import with_bug
from tests.crash.checker import left, unreceived
from tests.crash.forwarders import forwarder, looping_forwarder, purger, spark_forwarder
from tests.crash.hearing import unheard
from tests.crash.hostile import hostile
from tests.crash.hubs import router
from tests.crash.outcome import Outcome, judge
from tests.crash.past import Past
from tests.crash.plan import Plan
from tests.crash.set_backs import Refusals
from tests.crash.site import Site
from tests.crash.talks import DESK, STOCK, listener
from tests.crash.transforms import tables
from tests.crash.writers import writer
from tests.processes import start

DRAIN_SECONDS = 30.0
SPARK_DRAIN_SECONDS = 120.0
WRITING_SECONDS = 60.0

Started = tuple[BaseProcess, Any]
"""A process, and what starts another like it."""

APPLICATIONS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE application_name = 'saf application'
"""


SOME_SENT = "SELECT FROM sent OFFSET 100 LIMIT 1"
MOVED = "SELECT FROM saf.cursor WHERE position > 0 OR batch > 1 LIMIT 1"


class Round:
    """The processes of a plan, on fresh databases of a site.

    ``bug`` names one of `tests.crash.bugs`, which is planted in the forwarders.
    """

    def __init__(self, site: Site, plan: Plan, *, bug: str = "") -> None:
        self.site, self.plan, self.bug = site, plan, bug
        self.app: Dsn = site.prepare(plan)
        self.stores = site.stores(plan)
        self.hubs = site.hubs(plan)
        self.past = Past()
        self.batches_copied = 0
        """How many the application's cursors had opened when a copy was taken."""
        self.refusals = Refusals(site.folder / "refusals")
        self.not_refused: list[str] = []
        self.not_repaired: list[str] = []
        self.commands: list[str] = []
        """What a person's commands have said, whenever something was set back."""
        self.allowed = site.folder / "allowed"
        """What a hostile writer should not have been let do."""
        self.allowed.write_text("")
        self.answers = site.folder / "answers"
        """What a visitor of the dashboard should not have been told."""
        self.answers.write_text("")
        self.died: list[int] = []
        self.in_the_way: list[str] = []
        self._number = 0
        self.writers = [self.start_writer() for _ in range(plan.writers)]
        if plan.hostile:
            self.writers.append(self.start_hostile())
        self.forwarders = [
            self.start_forwarder(skewed=plan.skewed and nth == 0) for nth in range(plan.forwarders)
        ]
        self.listeners = [
            self.start_listener(service) for service in (STOCK, STOCK, DESK) if plan.dialogs
        ]
        if plan.dialogs:
            self.forwarders.append(self.start_returning(self.stores["mom"]))
        self.routers = [self.start_router(hub) for hub in self.hubs.values()]
        self.forwarders += [self.start_returning(hub) for hub in self.hubs.values()]
        self.consumers = [
            self.start_consumer(*arguments)
            for arguments in consumers.chosen(plan, self.stores, site.places(plan))
        ]
        self.others = [self.start_other(nth) for nth in range(len(site.others()))]
        self.stream_places = site.stream_places(self.app)
        self.streams = [self.start_stream()] if plan.streams else []
        self.purgers = [self.start_purger()] if plan.purge else []
        self.port = free_port()
        self.dashboards = [dashboard.start_dashboard(self)] if plan.visited else []
        self.visitors = [dashboard.start_visitor(self)] if plan.visited else []

    @property
    def brokers(self) -> dict[str, Dsn]:
        """All of them, by the names that routes and saf.toml have for them."""
        return {"app": self.app, **self.stores, **self.hubs}

    def run(self) -> Outcome:
        """Let it all happen; leave no process behind."""
        try:
            if self.plan.spark:
                # a job takes seconds to start, and there is little to break before
                self.wait_for(MOVED, SPARK_DRAIN_SECONDS)
            if self.plan.streams:
                self.wait_for(SOME_SENT, SPARK_DRAIN_SECONDS)
                # a driver takes long to start, and longer where others are at work
                with faults.all_stopped(self.writers + self.forwarders + self.purgers):
                    self.wait_for(streams.MOVED, SPARK_DRAIN_SECONDS)
            for fault in self.plan.faults:
                time.sleep(fault.after)
                self.site.fault(fault.kind)(self, fault)
            if self.plan.transactions is not None:
                self._wait_for_the_writers()
            ended = time.monotonic()
            time.sleep(0.1)
            self._end_writers()
            remaining = self._drain()
            if self.past.went_back:
                # what a forwarder had in hand meanwhile may have been noticed by nobody yet
                set_backs.repair(self)
                remaining = self._drain()
            recovery = time.monotonic() - ended
        finally:
            for process, _ in (*self.writers, *self._readers()):
                self._end(process)
        return Outcome(
            plan=self.plan,
            verdict=judge(self),
            left=remaining,
            in_the_way=self.in_the_way,
            died=self.died,
            recovery_seconds=recovery,
            taken_away=self.past.taken_away,
        )

    def told(self) -> dict[str, list[str]]:
        """What is to be kept with a finding besides the databases: files, in lines."""
        return {"commands": self.commands, "refusals": self.refusals.all()}

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """All but the writers are stopped meanwhile."""
        for process, _ in self._readers():
            self._end(process)
        yield
        groups = (self.forwarders, self.listeners, self.routers)
        more = (self.consumers, self.others, self.purgers, self.dashboards, self.visitors)
        for group in (*groups, *more, self.streams):
            group[:] = [anew() for _, anew in group]

    def start_writer(self) -> Started:
        app = self.site.writers_see(self.app)
        return start(writer, app, self._seed(), self.plan), self.start_writer

    def start_hostile(self) -> Started:
        return start(hostile, self.app, self._seed(), self.plan, self.allowed), self.start_hostile

    def start_listener(self, service: str) -> Started:
        where = self.app if service == DESK else self.stores["mom"]
        process = start(listener, where, service, self._seed())
        return process, lambda: self.start_listener(service)

    def start_forwarder(self, *, skewed: bool = False) -> Started:
        stores = self.site.by_proxy(self.plan)
        if self.plan.spark:
            more = tables(self.plan.transforms)
            arguments = (self.app, stores, self.plan.chunk_rows, self.site.folder, more)
            process = start(with_bug, self.bug, spark_forwarder, *arguments)
            return process, self.start_forwarder
        if self.plan.looping and not self.bug:
            rows, refusals = self.plan.chunk_rows, self.refusals.file
            return start(looping_forwarder, self.app, stores, rows, refusals), self.start_forwarder
        process = self._forwarder(self.app, stores, skewed, self.plan.transforms)
        return process, self.start_forwarder

    def start_returning(self, source: Dsn) -> Started:
        """From a MOM store or a hub to the others."""
        places = {name: dsn for name, dsn in self.brokers.items() if dsn != source}
        process = self._forwarder(source, places, skewed=False)
        return process, lambda: self.start_returning(source)

    def start_router(self, hub: Dsn) -> Started:
        return start(router, hub), lambda: self.start_router(hub)

    def start_consumer(self, store: Dsn, service: str, kind: str) -> Started:
        process = start(consumers.consumer, store, service, kind)
        return process, lambda: self.start_consumer(store, service, kind)

    def start_stream(self) -> Started:
        process = start(with_bug, self.bug, streams.driver, self.stream_places)
        return process, self.start_stream

    def start_purger(self) -> Started:
        return start(purger, self.app), self.start_purger

    def start_other(self, nth: int) -> Started:
        program, arguments = self.site.others()[nth]
        return start(program, *arguments), lambda: self.start_other(nth)

    def _forwarder(
        self, source: Dsn, places: Any, skewed: bool, transforms: tuple[str, ...] = ()
    ) -> BaseProcess:
        arguments = (source, places, self.plan.chunk_rows, skewed, self.refusals.file, transforms)
        return start(with_bug, self.bug, forwarder, *arguments)

    def _seed(self) -> str:
        self._number += 1
        return f"{self.plan.seed} {self.plan.round} {self._number}"

    def _readers(self) -> list[Started]:
        """All processes but the writers."""
        started = self.forwarders + self.listeners + self.routers + self.consumers
        more = self.streams + self.dashboards + self.visitors
        return started + self.others + self.purgers + more

    def again(self, group: list[Started], target: int) -> None:
        """Kill one of a group, and start another."""
        if group:
            process, anew = group[target % len(group)]
            self._end(process)
            group[target % len(group)] = anew()

    def _end(self, process: BaseProcess) -> None:
        assert process.pid is not None
        for kill in (os.killpg, os.kill):  # it may be too young for a group of its own
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode not in (-signal.SIGKILL, 0, None):
            self.died.append(process.exitcode)

    def _end_writers(self) -> None:
        """Their sessions have ended, and somebody has decided what they had prepared."""
        for process, _ in self.writers:
            self._end(process)
        self.writers = []
        with self.app.connect(role="crash", autocommit=True) as connection:
            connection.execute(APPLICATIONS)
            for (gid,) in connection.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ).fetchall():
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))
            connection.execute(named.SOON)

    def _wait_for_the_writers(self) -> None:
        """Until each has done what it was to do at most."""
        for process, _ in self.writers:
            process.join(WRITING_SECONDS)

    def wait_for(self, query: str, seconds: float) -> None:
        """Until it finds something in the application's database, but no longer."""
        until = time.monotonic() + seconds
        with psycopg.connect(self.app.conninfo, autocommit=True) as connection:
            while time.monotonic() < until:
                if connection.execute(query).fetchone() is not None:
                    return
                time.sleep(0.1)

    def _drain(self) -> int:
        """How much is left when nothing has moved for a while."""
        on_spark = self.plan.spark or self.plan.streams
        seconds = SPARK_DRAIN_SECONDS if on_spark else DRAIN_SECONDS
        least, until = None, time.monotonic() + seconds
        while (remaining := self._left()) and time.monotonic() < until:
            if remaining > 0 and (least is None or remaining < least):
                least, until = remaining, time.monotonic() + seconds
            if self.refusals.new() and self.past.went_back:
                set_backs.repair(self)
            time.sleep(0.02)
        if remaining:
            self.in_the_way = stall.describe(self.brokers.values(), self._listening())
            if self.plan.streams:
                self.in_the_way += streams.said(self.stream_places)
        return remaining

    def _listening(self) -> list[BaseProcess]:
        """The forwarders that say where they are; on Spark there are other processes in between."""
        return [] if self.plan.spark else [process for process, _ in self.forwarders]

    def _left(self) -> int:
        with contextlib.suppress(psycopg.OperationalError):
            count = left(self.app.conninfo) + self.site.left()
            if self.plan.dialogs:
                count += unheard(self.app.conninfo, self.stores["mom"].conninfo, self.past)
            if self.plan.consumers:
                count += unreceived(self.checked(), consumers.CONSUMED)
            if self.plan.streams:
                count += streams.left(self.stream_places)
            return count
        return -1

    def checked(self) -> list[str]:
        """Where messages are to arrive."""
        return [store.conninfo for store in self.site.checked(self.plan).values()]
