"""A cold one-shot run, as from cron: whole processes, from the start to the exit, 1,000 pending.

saf's is ``saf forward``, with the start of its JVM in it.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks import cold
from benchmarks.peers.relays import Failed
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.stage import Stage

ROUNDS = 5
SIZE = 200


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:  # noqa: ARG001
    """Seconds, in rounds in which each gets its turn; one before is not counted."""

    def once(peer: Peer) -> float:
        if peer.name.startswith("saf "):
            return cold.once(stage, "auto")
        peer.fill(cold.MESSAGES, SIZE)
        started = time.monotonic()
        peer.relays.once()
        seconds = time.monotonic() - started
        if (arrived := peer.arrived()) != cold.MESSAGES:
            raise Failed(f"{arrived} of {cold.MESSAGES} messages have arrived")
        return seconds

    able = report.able(peers)
    for peer in able:
        peer.relays.stop()
    turns = {peer.name: partial(once, peer) for peer in able}
    found = report.rounds("cold", turns, lambda seconds: f"{seconds:.2f} s", rounds=ROUNDS + 1)
    for name, mine in found.items():
        report.add("cold", name, mine[1:] or mine, "s", messages=cold.MESSAGES)
