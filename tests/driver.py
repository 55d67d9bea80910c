"""A forwarder whose tasks run in this process, one by one.

For promises of the driver, which are the same wherever its tasks run; see `tests.spark` for those
that Spark itself has a part in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from saf.config import Settings
from saf.engine.work import ForwardingRules, Receipt, Work
from saf.forwarding import runner
from saf.forwarding.forwarder import Forwarder
from saf.forwarding.runner import run_item


@dataclass
class InProcess(runner.InProcess):
    """A runner that says what it runs, and lets a test step in between."""

    parallel: int = 1
    before_task: Callable[[int, int], object] | None = None
    """Called with the numbers of the job and of the task in it, both from 0."""
    jobs: list[int] = field(default_factory=list)
    """How many tasks each had."""

    def is_here(self, sources: int) -> bool:  # noqa: ARG002 - a runner's signature
        """Leave all work to `run`, which counts it."""
        return False

    def slots(self) -> int:
        """As many as a test says."""
        return self.parallel

    def run(self, work: Sequence[Work], rules: ForwardingRules, group: str) -> list[Receipt]:  # noqa: ARG002 - a runner's signature
        """One task after the other."""
        self.jobs.append(len(work))
        job, receipts = len(self.jobs) - 1, list[Receipt]()
        for number, item in enumerate(work):
            if self.before_task is not None:
                self.before_task(job, number)
            receipts += run_item(number, item, rules)
        return receipts


def forwarder(settings: Settings, tasks: InProcess) -> Forwarder:
    """One that forwards without Spark."""
    return Forwarder(settings, tasks)


@contextmanager
def looping(one: Forwarder) -> Iterator[threading.Thread]:
    """Let it loop in a thread while a block runs, and then stop it."""
    thread = threading.Thread(target=one.loop, args=[lambda _: None])
    thread.start()
    try:
        yield thread
    finally:
        one.stop()
        thread.join(60)
