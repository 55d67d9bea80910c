"""Schedules: messages that are sent again and again, at times that a row of the source says.

    saf.schedules.add(conn, "nightly", "reports", {"full": True}, cron="0 2 * * *",
                      zone="Europe/Berlin")

A schedule is data: the row has the message, and needs no code of the application. Any forwarder of
the source sends the message of each run, exactly one a run. `saf.schedules.times` decides when a
schedule runs, `stored` adds and changes schedules, `declared` lets an application declare its own,
and `running` is the forwarder's part.
"""

from saf.schedules.declared import Deployed, Schedules
from saf.schedules.stored import (
    Missed,
    Run,
    Schedule,
    add,
    history,
    listed,
    pause,
    remove,
    resume,
    run_now,
)

__all__ = [
    "Deployed",
    "Missed",
    "Run",
    "Schedule",
    "Schedules",
    "add",
    "history",
    "listed",
    "pause",
    "remove",
    "resume",
    "run_now",
]
