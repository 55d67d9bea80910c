"""Reporting: a forwarder's counts for the metrics of its process, from receipts of its tasks.

Tasks may run on other machines, and count nothing there: their receipts contain the counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from saf.engine.work import Receipt, Work
from saf.errors import Fenced
from saf.metrics import declared as m
from saf.metrics.process import count, counting, observe


def receipts(work: Sequence[Work], found: Sequence[Receipt]) -> None:
    """Count the results of a cycle's tasks."""
    if not counting():
        return
    for receipt in found:
        broker = work[receipt.work].broker
        if receipt.error_kind == Fenced.__name__:
            count(m.FENCED, broker=broker)
        for state, messages in (("parked", receipt.parked), ("dead", receipt.dead)):
            if messages:
                count(m.SET_ASIDE, messages, broker=broker, state=state)
        if receipt.destination is None:
            continue
        labels = {"broker": broker, "destination": receipt.destination}
        count(m.FORWARDED, receipt.messages, **labels)
        count(m.RETRIED, receipt.retried, **labels)
        count(m.REPEATED, receipt.dropped, **labels)
        for service, messages in receipt.services.items():
            count(m.DELIVERED, messages, **labels, service=service)
        observe(m.CHUNK_SECONDS, receipt.chunk_seconds, destination=receipt.destination)
        observe(m.CHUNK_MESSAGES, receipt.chunk_messages, destination=receipt.destination)


def cycle(seconds: float, messages: int) -> None:
    """Count a cycle that had something to do."""
    observe(m.CYCLES, seconds)
    observe(m.CYCLE_MESSAGES, messages)


def problem(broker: str, kind: str) -> None:
    """Count a problem."""
    count(m.PROBLEMS, broker=broker, kind=kind)
