"""A meter: the progress of the running tasks, for people who watch.

It asks in a separate thread with its own connections. So when it counts a deep backlog, which reads
all of it, it delays neither leases nor tasks. If it fails, the forwarder continues and nothing is
shown. Sources with limited connections are left out, because they have none to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import psycopg

from saf.database import Dsn, fetch
from saf.engine.work import Work
from saf.log.cursor import Batch, join_splits
from saf.log.shards import NEWEST
from saf.logger import Log

log = Log("saf.forward")

LOOK_SECONDS = 0.5
LEAVE_SECONDS = 1.0
"""Seconds to wait for a meter at its end, if a source does not answer."""

# A shard that has another batch, or none open, has completed this one
POSITIONS = f"""
SELECT avg(CASE WHEN open IS NOT NULL AND batch = %(batch)s THEN least(position, %(highest)s)
           ELSE %(highest)s END)::float8
FROM {NEWEST} AS c WHERE shard = ANY (%(shards)s)
"""


@dataclass(frozen=True)
class Progress:
    """Progress of the current cycle, in messages; shown to people."""

    done: int
    total: int


@dataclass
class Span:
    """A batch in progress: the number of its remaining messages, and their lowest and highest
    id."""

    batch: Batch
    connection: psycopg.Connection[Any]
    count: int = field(init=False)
    lowest: int = field(init=False)
    highest: int = field(init=False)

    def __post_init__(self) -> None:
        query = f"SELECT count(*), min(id), max(id) FROM ({self.batch.rows(['id'])}) AS batch"
        ((self.count, lowest, highest),) = fetch(self.connection, query)
        self.lowest, self.highest = lowest or 0, highest or 0

    def done(self) -> float:
        """Estimate how many of the messages are forwarded, by the positions reached."""
        params = {
            "subscription_id": self.batch.subscription_id,
            "batch": self.batch.number,
            "shards": self.batch.shards,
            "highest": self.highest,
        }
        ((position,),) = fetch(self.connection, POSITIONS, params)
        share = ((position or 0) - self.lowest) / max(self.highest - self.lowest, 1)
        return self.count * min(max(share, 0.0), 1.0)


class Meter:
    """Reports the progress of some work while its block runs."""

    def __init__(self, report: Callable[[Progress], None], work: Iterable[Work]) -> None:
        self._report = report
        self._batches: dict[Dsn, list[Work]] = {}
        for item in work:
            self._batches.setdefault(item.dsn, []).append(item)
        self._complete = False
        self._over = Event()
        self._thread = Thread(target=self._watch, name="saf-meter", daemon=True)

    def complete(self) -> None:
        """Note that all of the work is done; its positions show this only roughly."""
        self._complete = True

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LEAVE_SECONDS)

    def _watch(self) -> None:
        try:
            with ExitStack() as stack:
                spans = []
                for dsn, items in self._batches.items():
                    connection = stack.enter_context(dsn.connect(role="watch", autocommit=True))
                    batches = join_splits(item.batch for item in items)
                    spans += [Span(batch, connection) for batch in batches]
                total = sum(span.count for span in spans)
                while not self._over.wait(LOOK_SECONDS):
                    self._report(Progress(int(sum(span.done() for span in spans)), total))
                if self._complete:
                    self._report(Progress(total, total))
        except Exception as error:  # only the display fails: one line is enough
            log.info("progress_not_shown", error=f"{type(error).__name__}: {error}")
