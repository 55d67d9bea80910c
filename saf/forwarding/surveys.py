"""Planning and surveys: a cycle's work as tasks, and surveys of deep batches that tasks share.

*Planning* (`plan`) turns work into tasks, and orders them. Pure. Spark starts tasks in order, as
many at a time as it has slots. Little work goes first, because it ends soon; the rest may then take
its time. Deep backlogs share the slots equally among brokers, and each is split by shards.

A task has up to `PER_TASK` connections to its source (one that reads the batch, one that reads
parked messages, one that marks), besides the driver's own, and one to each destination that it
delivers to. So the number of tasks keeps within a broker's limit, and no more tasks are planned
than a destination's limit allows. Work beyond a cap stays open, and brokers that have waited
longest go first in the next cycle.

*Surveys* (`surveyed`). A deep batch that several tasks share is surveyed once, at the driver, for
all tasks. A survey reads each page of the batch. It is valid while the transaction that made it is
open (`saf.engine.survey`), so the driver has one more session at such a source while a job runs.

Surveys only save work. Without one, each task makes its own: if the source does not answer here, if
the survey takes longer than the others wait for it, if this process dies, or if the server ends the
session. So nothing is raised here. A batch that one task reads is left to that task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import psycopg

from saf.database import Dsn
from saf.engine.survey import ALONE, ONE_SNAPSHOT, NotSurveyed, Survey, export
from saf.engine.work import Work
from saf.errors import SafError
from saf.log.cursor import Batch, join_splits
from saf.telemetry.logger import Log

log = Log("saf.forward")

PER_TASK = 3
PER_DRIVER = 1

PATIENCE_SECONDS = 60.0
"""Seconds that a survey may take before the tasks begin without it."""
OTHERS_SECONDS = 5.0
"""Like `PATIENCE_SECONDS`, if tasks of other sources wait for the survey too."""
TICK_SECONDS = 1.0


def tasks_within(max_connections: int) -> int:
    """Return how many tasks a source's limit on connections allows; at least one.

    >>> tasks_within(4), tasks_within(6), tasks_within(10), tasks_within(31)
    (1, 1, 3, 10)
    """
    return max(1, (max_connections - PER_DRIVER) // PER_TASK)


def plan(
    work: Sequence[Work],
    slots: int,
    *,
    limits: Mapping[str, int],
    cap: int | None = None,
    last_turn: Mapping[str, int],
) -> list[Work]:
    """Return the tasks of a cycle, in the order in which they start.

    Args:
        work: the open work, each broker's oldest first.
        slots: tasks that run at a time.
        limits: for brokers that have a limit, the maximum number of tasks.
        cap: the maximum number of tasks.
        last_turn: for each broker, the cycle in which it last had a task.
    """
    by_broker: dict[str, list[Work]] = {}
    for item in work:
        by_broker.setdefault(item.broker, []).append(item)
    deep = {name for name, items in by_broker.items() if any(item.much for item in items)}
    share = max(1, slots // max(1, len(deep)))

    def turn(name: str) -> tuple[int, int]:
        since, size = last_turn.get(name, -1), int(name in deep)
        return (size, since) if cap is None else (since, size)

    tasks = [
        _split(by_broker[name], share if name in deep else 1, limits.get(name))
        for name in sorted(by_broker, key=turn)
    ]
    # each broker's first task before any broker's second
    in_turns = [task for task in chain.from_iterable(zip_longest(*tasks)) if task is not None]
    if cap is None:
        in_turns.sort(key=lambda task: task.much)
    return in_turns[:cap]


def _split(items: Sequence[Work], share: int, limit: int | None) -> list[Work]:
    """Split one broker's work into about ``share`` tasks, but no more than its limit."""
    share = share if limit is None else min(share, limit)
    parts = max(1, share // len(items))
    tasks = [part for item in items for part in (item.split(parts) if item.much else [item])]
    return tasks[:limit]


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """A source's surveys, and the session in which they are valid."""

    session: psycopg.Connection[Any]
    surveys: Mapping[Batch, Survey]
    """By batch, with all shards that tasks share."""


@contextmanager
def surveyed(
    work: Sequence[Work], but: Container[str] = (), meanwhile: Callable[[], None] = lambda: None
) -> Iterator[list[Work]]:
    """Yield the items, with surveys that are valid inside the block; ``but`` some brokers'.

    ``meanwhile`` is called periodically while waiting for the surveys.
    """
    shared = {name: batches for name, batches in _shared(work).items() if name not in but}
    if not shared:
        yield list(work)
        return
    pool = ThreadPoolExecutor(len(shared), thread_name_prefix="saf-survey")
    jobs = {pool.submit(_survey, name, *entry): name for name, entry in shared.items()}
    pool.shutdown(wait=False)
    try:
        found = {
            (jobs[job], replace(batch, epochs=())): survey
            for job in _answered(jobs, meanwhile)
            if (entry := job.result())
            for batch, survey in entry.surveys.items()
        }
        yield [
            replace(item, survey=found.get((item.broker, replace(item.batch, epochs=()))))
            for item in work
        ]
    finally:
        for job in jobs:
            job.add_done_callback(_end)


def _shared(work: Sequence[Work]) -> dict[str, tuple[Dsn, list[Batch]]]:
    """Return by broker the deep batches that are split among several items."""
    by_broker: dict[str, list[Work]] = {}
    for item in work:
        if item.deep:
            by_broker.setdefault(item.broker, []).append(item)
    shared = {}
    for name, items in by_broker.items():
        splits = [item.batch for item in items]
        several = [whole for whole in join_splits(splits) if whole not in splits]
        if several:
            shared[name] = items[0].dsn, several
    return shared


def _answered(
    jobs: Collection[Future[Surveyed | None]], tick: Callable[[], None]
) -> set[Future[Surveyed | None]]:
    """Wait for the surveys, unless one takes too long; return those that are done."""
    until = time.monotonic() + (PATIENCE_SECONDS if len(jobs) == 1 else OTHERS_SECONDS)
    done: set[Future[Surveyed | None]] = set()
    while len(done) < len(jobs) and (left := until - time.monotonic()) > 0:
        done, _ = wait(jobs, timeout=min(TICK_SECONDS, left))
        tick()
    return done


def _survey(name: str, dsn: Dsn, batches: Sequence[Batch]) -> Surveyed | None:
    try:
        session = dsn.connect(role="read")
        try:
            session.execute(ALONE)
            session.commit()
            session.execute(ONE_SNAPSHOT)
            surveys = dict(zip(batches, export(session.cursor(), batches), strict=True))
        except BaseException:
            session.close()
            raise
    except (SafError, NotSurveyed, psycopg.Error) as error:
        log.warning("not_surveyed", broker=name, error=dsn.reason(error))
        return None
    return Surveyed(session=session, surveys=surveys)


def _end(job: Future[Surveyed | None]) -> None:
    if job.exception() is None and (result := job.result()) is not None:
        result.session.close()
