"""Jobs: show their progress, and stop one."""

from __future__ import annotations

from starlette.responses import Response

from saf.errors import UsageError
from saf.ui.fields import number_of
from saf.ui.jobs import Job
from saf.ui.site import Visit


def jobs(visit: Visit) -> Response:
    """Show the jobs of this process."""
    return visit.page("jobs.html", title="Jobs", jobs=visit.site.jobs.all())


def job(visit: Visit) -> Response:
    """Show the progress of one job."""
    found = _job(visit)
    live = "" if found.over else "every 1s"
    return visit.page("job.html", title="Job", live=live, job=found)


def cancel(visit: Visit) -> Response:
    """Stop a job after its current chunk."""
    found = _job(visit)
    found.stopping.set()
    return visit.to(f"/jobs/{found.number}")


def _job(visit: Visit) -> Job:
    number = number_of(visit.request.path_params["number"])
    if number is None or (found := visit.site.jobs.get(number)) is None:
        raise UsageError(f"no job {number} in this process; its changes are in the audit")
    return found
