"""Findings of the doctor's last examination, with their cures."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from starlette.responses import Response

from saf.errors import SafError, Unexpected
from saf.operating.doctor import Finding, examine
from saf.ui.site import Site, Visit

ORDER = ("error", "warning", "ok")


@dataclass(kw_only=True)
class Examination:
    """One run of the doctor; it takes as long as the slowest database."""

    began: float = field(default_factory=time.time)
    ended: float | None = None
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""


def findings(visit: Visit) -> Response:
    """Show the findings of the last examination; begin the first one if needed."""
    last: Examination | None = visit.site.examination
    if last is None:
        last = begin(visit.site)
    shown = sorted(last.findings, key=lambda row: (ORDER.index(row.severity), row.where))
    return visit.page(
        "doctor.html",
        title="Doctor",
        live="every 1s" if last.ended is None else "",
        last=last,
        findings=[row for row in shown if row.severity != "ok"],
        checks=len(shown),
        now=time.time(),
    )


def examine_(visit: Visit) -> Response:
    """Begin another examination, unless one is running."""
    last: Examination | None = visit.site.examination
    if last is None or last.ended is not None:
        begin(visit.site)
    return visit.to("/doctor")


def begin(site: Site) -> Examination:
    """Run all checks in a thread. Only reads."""
    examination = site.examination = Examination()

    def run() -> None:
        try:
            examination.findings = examine(site.settings)
        except Exception as error:
            known = error if isinstance(error, SafError) else Unexpected("the doctor", error)
            examination.problem = str(known)
        examination.ended = time.time()

    threading.Thread(target=run, name="saf-doctor", daemon=True).start()
    return examination
