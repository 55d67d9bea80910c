"""Jobs: operators' longer actions, with their progress and a way to stop them.

A job runs in a thread, in chunks (`saf.operating.decide`). Its effects are in the brokers and in
their audit; the list of jobs is only in memory. If a job or the process is stopped, the remaining
messages are unchanged. At the end of the process, chunks that have begun get `ENDING_SECONDS`. The
server rolls back a chunk that takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any, Literal
from uuid import UUID

from saf.config import Broker
from saf.database import check_schema, unavailable_if_lost
from saf.errors import SafError, Unexpected
from saf.operating.decide import Decision, in_chunks
from saf.setaside.selection import Selection
from saf.telemetry.logger import Log
from saf.ui import redaction

KEPT = 100
"""Number of jobs to remember."""
AT_ONCE = 4
"""Jobs that run at a time; others wait."""
NAMED = 10
"""Messages of a broker that a job names."""
ENDING_SECONDS = 3.0
"""Time for chunks that have begun, at the end of the process."""

log = Log("saf.ui")

State = Literal["waiting", "running", "done", "cancelled", "failed"]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A message of a decision, as it was before."""

    number: int
    key: str | None
    message_id: UUID
    created_at: datetime


@dataclass(kw_only=True)
class Job:
    """A decision about many dead letters or parked messages."""

    number: int
    what: str
    """Action of the job, e.g. "retry"."""
    action: str
    """The same without the destination."""
    person: str
    why: str
    about: Mapping[str, Selection[Any]]
    """Which messages, for each broker."""
    expected: int
    began: float = field(default_factory=time.time)
    ended: float | None = None
    done: dict[str, int] = field(default_factory=dict)
    """Number of processed messages, by broker."""
    first: dict[str, list[Named]] = field(default_factory=dict)
    """The first processed messages, by broker."""
    errors: dict[str, str] = field(default_factory=dict)
    state: State = "waiting"
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def messages(self) -> int:
        """Number of processed messages."""
        return sum(self.done.values())

    @property
    def over(self) -> bool:
        """True if the job has ended."""
        return self.state in ("done", "cancelled", "failed")


class Jobs:
    """The jobs of this process."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(AT_ONCE)

    def all(self) -> list[Job]:
        """Return all remembered jobs, the last first."""
        with self._lock:
            return [*reversed(self._jobs.values())]

    def get(self, number: int) -> Job | None:
        """Return a job by its number."""
        with self._lock:
            return self._jobs.get(number)

    def begin(
        self,
        decision: Decision,
        about: Mapping[str, tuple[Broker, Selection[Any]]],
        *,
        person: str,
        why: str,
        expected: int,
    ) -> Job:
        """Begin a job, and return it immediately."""
        job = Job(
            number=next(self._numbers),
            what=str(decision),
            action=decision.action,
            person=person,
            why=why,
            about={name: chosen for name, (_, chosen) in about.items()},
            expected=expected,
        )
        with self._lock:
            self._jobs[job.number] = job
            ended = [number for number, known in self._jobs.items() if known.over]
            for number in ended[: max(0, len(self._jobs) - KEPT)]:
                del self._jobs[number]
        places = {name: broker for name, (broker, _) in about.items()}
        job.thread = threading.Thread(
            target=self._work,
            args=(job, decision, places),
            name=f"saf-job-{job.number}",
            daemon=True,
        )
        job.thread.start()
        return job

    def stop(self) -> None:
        """Stop all jobs after their current chunks; wait for these chunks, but not for long."""
        deadline = time.monotonic() + ENDING_SECONDS
        jobs = self.all()
        for job in jobs:
            job.stopping.set()
        for job in jobs:
            if job.thread is not None:
                job.thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, job: Job, decision: Decision, places: Mapping[str, Broker]) -> None:
        with self._turns:
            job.state = "running"
            for name, broker in places.items():
                if job.stopping.is_set():
                    break
                try:
                    self._at(job, decision, name, broker)
                except Exception as error:
                    known = error if isinstance(error, SafError) else Unexpected(name, error)
                    job.errors[name] = text = redaction.error(known)
                    log.warning("job_failed", job=job.number, broker=name, error=text)
            stopped = job.stopping.is_set() and job.messages < job.expected
            job.state = "failed" if job.errors else "cancelled" if stopped else "done"
            job.ended = time.time()

    def _at(self, job: Job, decision: Decision, name: str, broker: Broker) -> None:
        with (
            unavailable_if_lost(f"broker {name!r}"),
            broker.dsn.connect(role="dead", autocommit=True) as connection,
        ):
            check_schema(connection)
            chosen = [
                Named(
                    number=getattr(row, job.about[name].NUMBER),
                    key=row.key,
                    message_id=row.message_id,
                    created_at=row.created_at,
                )
                for row in job.about[name].rows(connection, NAMED)
            ]
            for ids in in_chunks(
                connection,
                decision,
                job.about[name],
                job.why,
                person=job.person,
                stop=job.stopping.is_set,
            ):
                if name not in job.first:
                    decided = {*ids}
                    job.first[name] = [row for row in chosen if row.message_id in decided]
                job.done[name] = job.done.get(name, 0) + len(ids)
