"""Backlogs from small to huge: microseconds a message, and the peak of the relays' memory.

Only who would be done the same day: saf and the relays by hand. The two largest are relayed once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.memory import SAMPLE_SECONDS, resident_mib
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.stage import Stage

BACKLOGS = {"10k": 10_000, "100k": 100_000, "1M": 1_000_000, "10M": 10_000_000}
ROUNDS = {"10k": 5, "100k": 5, "1M": 1, "10M": 1}
FAST = ("saf", "SKIP LOCKED", "PgQ + COPY")
WARM_UP, SIZE = 300_000, 200


def run(_: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Notes backlog_… and backlog_memory_…"""
    able = [peer for peer in peers if peer.module.NAME in FAST]
    for peer in peers:
        if peer not in able:
            report.cannot(report.workload, peer.name, "too slow for ten million")
    for peer in able:
        peer.warm(max(100, int(WARM_UP * scale)), SIZE)

    def turn(peer: Peer, messages: int) -> tuple[float, float]:
        peer.fill(messages, SIZE)
        peer.relays.start()
        with _watched(peer.relays.processes) as peaks:
            cost = peer.drain(messages)
        return 1e6 / cost.rate, max(peaks)

    for name, messages in BACKLOGS.items():
        some = max(100, int(messages * scale))
        turns = {peer.name: partial(turn, peer, some) for peer in able}
        found = report.rounds(
            f"backlog_{name}", turns, lambda one: f"{one[0]:.2f} µs, {one[1]:.0f} MiB",
            rounds=ROUNDS[name],
        )  # fmt: skip
        for system, mine in found.items():
            each, memory = zip(*mine, strict=True)
            report.add(f"backlog_{name}", system, each, "µs per message", messages=some)
            report.add(f"backlog_memory_{name}", system, memory, "MiB", messages=some)


@contextmanager
def _watched(processes: list[int]) -> Iterator[list[float]]:
    """Samples of the resident memory of processes and all below them."""
    peaks, over = [resident_mib(processes)], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peaks.append(resident_mib(processes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()
