"""One round: writers, forwarders and faults; then everything drains and is checked."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import psycopg
from psycopg import sql

from saf.database import Dsn
from tests.crash import stall
from tests.crash.checker import Verdict, check, left, listen, unheard
from tests.crash.forwarders import forwarder, purger, spark_forwarder
from tests.crash.plan import Plan
from tests.crash.site import Site
from tests.crash.talks import DESK, STOCK, listener
from tests.crash.writers import writer
from tests.processes import start

DRAIN_SECONDS = 30.0
SPARK_DRAIN_SECONDS = 120.0
FOREVER = 3600.0

Started = tuple[BaseProcess, Any]
"""A process, and what starts another like it."""

APPLICATIONS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE application_name = 'saf application'
"""


MOVED = "SELECT FROM saf.cursor WHERE position > 0 OR batch > 1 LIMIT 1"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a round came to."""

    plan: Plan
    verdict: Verdict
    left: int
    """Messages that the forwarders had not dealt with when the time was over."""
    in_the_way: list[str]
    """What the databases looked like then, in lines."""
    died: list[int]
    """Exit codes of forwarders that ended by themselves."""
    recovery_seconds: float
    """From the end of the last fault to the last message dealt with."""

    @property
    def good(self) -> bool:
        return not (self.verdict.findings or self.left or self.died)


class Round:
    """The processes of a plan, on fresh databases of a site."""

    def __init__(self, site: Site, plan: Plan) -> None:
        self.site, self.plan = site, plan
        self.app: Dsn = site.prepare(plan)
        self.stores = site.stores(plan)
        self.died: list[int] = []
        self.in_the_way: list[str] = []
        self._number = 0
        self.writers = [self.start_writer() for _ in range(plan.writers)]
        self.forwarders = [
            self.start_forwarder(skewed=plan.skewed and nth == 0) for nth in range(plan.forwarders)
        ]
        self.listeners = [
            self.start_listener(service) for service in (STOCK, STOCK, DESK) if plan.dialogs
        ]
        if plan.dialogs:
            self.forwarders.append(self.start_returning())
        self.others = [self.start_other(nth) for nth in range(len(site.others()))]
        self.purgers = [start(purger, self.app)] if plan.purge else []

    def run(self) -> Outcome:
        """Let it all happen; leave no process behind."""
        try:
            if self.plan.spark:
                self._wait_for_the_first()
            for fault in self.plan.faults:
                time.sleep(fault.after)
                self.site.fault(fault.kind)(self, fault)
            ended = time.monotonic()
            time.sleep(0.1)
            self._end_writers()
            remaining = self._drain()
            recovery = time.monotonic() - ended
        finally:
            started = self.writers + self.forwarders + self.listeners + self.others
            for process in [process for process, _ in started] + self.purgers:
                self._end(process)
        stores = [store.conninfo for store in self.site.checked(self.plan).values()]
        verdict = check(self.app.conninfo, stores, self.site.qualities, self.site.arrived())
        if self.plan.dialogs:
            listen(self.app.conninfo, self.stores["mom"].conninfo, verdict)
        return Outcome(
            plan=self.plan,
            verdict=verdict,
            left=remaining,
            in_the_way=self.in_the_way,
            died=self.died,
            recovery_seconds=recovery,
        )

    def start_writer(self) -> Started:
        self._number += 1
        seed = f"{self.plan.seed} {self.plan.round} {self._number}"
        process = start(writer, self.app, seed, self.plan.poison, self.plan.dialogs, FOREVER)
        return process, self.start_writer

    def start_listener(self, service: str) -> Started:
        self._number += 1
        where = self.app if service == DESK else self.stores["mom"]
        process = start(listener, where, service, self._number)
        return process, lambda: self.start_listener(service)

    def start_forwarder(self, *, skewed: bool = False) -> Started:
        stores = self.site.by_proxy(self.plan)
        if self.plan.spark:
            process = start(
                spark_forwarder, self.app, stores, self.plan.chunk_rows, self.site.folder
            )
            return process, self.start_forwarder
        return start(
            forwarder, self.app, stores, self.plan.chunk_rows, skewed
        ), self.start_forwarder

    def start_returning(self) -> Started:
        """From the MOM store to the application."""
        stores = {"app": self.app}
        process = start(forwarder, self.stores["mom"], stores, self.plan.chunk_rows, False)
        return process, self.start_returning

    def start_other(self, nth: int) -> Started:
        program, arguments = self.site.others()[nth]
        return start(program, *arguments), lambda: self.start_other(nth)

    def again(self, group: list[Started], target: int) -> None:
        """Kill one of a group, and start another."""
        process, anew = group[target % len(group)]
        self._end(process)
        group[target % len(group)] = anew()

    def _end(self, process: BaseProcess) -> None:
        assert process.pid is not None
        for kill in (os.killpg, os.kill):  # it may be too young for a group of its own
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode not in (-signal.SIGKILL, None):
            self.died.append(process.exitcode or 0)

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

    def _wait_for_the_first(self) -> None:
        """A Spark job takes seconds to start, and there is little to break before."""
        until = time.monotonic() + SPARK_DRAIN_SECONDS
        with psycopg.connect(self.app.conninfo, autocommit=True) as connection:
            while time.monotonic() < until:
                if connection.execute(MOVED).fetchone() is not None:
                    return
                time.sleep(0.1)

    def _drain(self) -> int:
        """How much is left when nothing has moved for a while."""
        seconds = SPARK_DRAIN_SECONDS if self.plan.spark else DRAIN_SECONDS
        least, until = None, time.monotonic() + seconds
        while (remaining := self._left()) and time.monotonic() < until:
            if remaining > 0 and (least is None or remaining < least):
                least, until = remaining, time.monotonic() + seconds
            time.sleep(0.02)
        if remaining:
            databases = [self.app, *self.stores.values()]
            self.in_the_way = stall.describe(databases, self._listening())
        return remaining

    def _listening(self) -> list[BaseProcess]:
        """The forwarders that say where they are; on Spark there are other processes in between."""
        return [] if self.plan.spark else [process for process, _ in self.forwarders]

    def _left(self) -> int:
        with contextlib.suppress(psycopg.OperationalError):
            untold = 0
            if self.plan.dialogs:
                untold = unheard(self.app.conninfo, self.stores["mom"].conninfo)
            return left(self.app.conninfo) + untold + self.site.left()
        return -1
