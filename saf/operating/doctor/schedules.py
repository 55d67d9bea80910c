"""Checks of schedules: those that no forwarder runs, and those that are refused."""

from __future__ import annotations

from saf.operating.doctor.patient import Found, Patient
from saf.operating.wording import age, counted

OVERDUE = """
SELECT count(*), min(name), extract(epoch FROM clock_timestamp() - min(next_run))::float
FROM saf.schedule WHERE NOT paused AND refused IS NULL
  AND next_run < clock_timestamp() - make_interval(secs => %(seconds)s)
HAVING count(*) > 0
"""
REFUSED = "SELECT name, refused FROM saf.schedule WHERE refused IS NOT NULL ORDER BY name"


def schedules(patient: Patient) -> Found:
    """Report schedules that are overdue, because no forwarder runs them, or that are refused."""
    for count, name, seconds in patient.ask(OVERDUE, seconds=patient.limits.stuck_seconds):
        yield (
            "error",
            f"nobody runs schedules: {counted(count, 'schedule')}, such as {name!r}, overdue for "
            f"up to {age(seconds)}",
            "run `saf forward` for this broker: check its schedule, e.g. cron or the DAG",
        )
    for name, reason in patient.ask(REFUSED):
        yield (
            "error",
            f"schedule {name!r} sends nothing: {reason}",
            f"fix the cause, then {patient.command('schedule', 'resume', name)}",
        )
