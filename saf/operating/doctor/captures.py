"""Checks of captures: those that differ from what was written, and backfills that nobody runs."""

from __future__ import annotations

from saf.capture import adoption, stored
from saf.capture.adoption import Adoption
from saf.capture.drift import drift
from saf.operating.doctor.patient import Found, Patient, Severity
from saf.operating.wording import age

LEFT = """
SELECT format('%%s.%%s', c.schema_name, c.table_name),
       extract(epoch FROM clock_timestamp() - coalesce(b.chunk_at, b.begun_at))::float
FROM saf.backfill b JOIN saf.capture c USING (capture_id)
WHERE b.ended_at IS NULL AND b.paused_at IS NULL
  AND coalesce(b.chunk_at, b.begun_at)
      < clock_timestamp() - make_interval(secs => %(seconds)s)
ORDER BY 1
"""


def captures(patient: Patient) -> Found:
    """Report captures that differ: changes are missed, or statements of the application fail."""
    for capture in adoption.every(patient.connection):
        for found in drift(patient.connection, capture):
            end = patient.command("capture", "remove", capture.quoted)
            if isinstance(capture, Adoption):
                name, again = "adoption", patient.command(*adoption.command(capture))
                missed = (
                    "rows that were written meanwhile stay as they are"
                    if capture.rows == "keep"
                    else "it also sends what was missed"
                )
            else:
                name, again = "capture", patient.command(*stored.command(capture))
                missed = "then `saf backfill` sends what was missed"
            if found.fails:
                cure = f"write the {name} again, with columns that exist: {again}; or {end}"
            elif found.misses:
                cure = f"{again}; {missed}; or {end}"
            else:
                verb = "adopt" if name == "adoption" else name
                cure = f"{verb} the table where its rows are written; or {end}"
            severity: Severity = "error" if found.misses else "warning"
            yield severity, f"{name} of {capture.called!r}: {found.what}", cure


def backfills(patient: Patient) -> Found:
    """Report backfills that are open, and that no run continues."""
    for called, seconds in patient.ask(LEFT, seconds=patient.limits.stuck_seconds):
        yield (
            "warning",
            f"the backfill of {called!r} has sent nothing for {age(seconds)}",
            f"continue it: {patient.command('backfill', called)}; or end it: "
            f"{patient.command('backfill', 'cancel', called)}",
        )
