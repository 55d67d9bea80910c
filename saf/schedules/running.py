"""Running schedules: what a forwarder does about those that are due.

One call of saf.run_schedule is one transaction: it sends the message of a run, and sets the time of
the next run. It does so only if the schedule is as it was read here. So of several forwarders one
sends the message; if the answer of a commit gets lost, the next visit finds the next run.

Runs are due by the database's clock. If that clock is set back, the next run stays when it was, so
that no run is sent twice; if it is set ahead, runs are sent early, and the times after it stay.

A run that no rule of `saf sender` allows, or that the outbox rejects, is not sent: the schedule
stops, with the reason in the column ``refused``, until it is changed or resumed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import psycopg

from saf.database import fetch
from saf.database.queries import records
from saf.errors import UsageError
from saf.failpoints import fail_point
from saf.schedules.times import Step, Times, step

MOST = 100
"""Schedules that are read at a time."""
RUNNING_SECONDS = 2.0
"""Time for which a visit runs schedules before it forwards their messages, in seconds."""

DUE_IN = """
(SELECT extract(epoch FROM min(next_run) - clock_timestamp())::float FROM saf.schedule
 WHERE NOT paused AND refused IS NULL)
"""
"""SQL: seconds until the next run is due; NULL without schedules."""

DUE = """
SELECT name, version, cron, every, anchor, zone, missed, next_run, clock_timestamp() AS moment
FROM saf.schedule WHERE next_run <= clock_timestamp() AND NOT paused AND refused IS NULL
ORDER BY next_run, name LIMIT %(most)s
"""
RUN = """
SELECT saf.run_schedule(%(name)s, %(version)s, %(expected)s, %(due)s, %(skipped)s, %(next_run)s,
                        %(problem)s)
"""


@dataclass(frozen=True, kw_only=True)
class Due:
    """A schedule that is due."""

    name: str
    version: int
    cron: str | None
    every: timedelta | None
    anchor: datetime
    zone: str
    missed: str
    next_run: datetime
    moment: datetime
    """Time of the database."""

    def step(self) -> Step:
        """Return what to do about it.

        Raises:
            UsageError: its times cannot be computed here.
        """
        times = Times(cron=self.cron, every=self.every, anchor=self.anchor, zone=self.zone)
        return step(times, self.missed, self.next_run, self.moment)


def run(connection: psycopg.Connection[Any], seconds: float = RUNNING_SECONDS) -> tuple[int, bool]:
    """Run due schedules, for up to ``seconds``.

    The connection is in autocommit.

    Returns:
        How many steps were made, and whether more may be due.
    """
    made, until = 0, time.monotonic() + seconds
    while True:
        steps = sum(_run(connection, due) for due in records(connection, Due, DUE, {"most": MOST}))
        made += steps
        if not steps:
            return made, False
        if time.monotonic() > until:
            return made, True


def _run(connection: psycopg.Connection[Any], due: Due) -> bool:
    fail_point("schedule_read")
    params: dict[str, Any] = {"name": due.name, "version": due.version, "expected": due.next_run}
    try:
        what = due.step()
    except UsageError as error:
        params |= {"due": None, "skipped": 0, "next_run": None, "problem": str(error)}
    else:
        params |= {"due": what.due, "skipped": what.skipped, "next_run": what.next_run}
        params["problem"] = None
    ((done,),) = fetch(connection, RUN, params)
    fail_point("schedule_run")
    return bool(done)
