"""From end to end: how long a message takes until its arrival is committed, at a rate.

Open loop: the sender does not wait for the relay, and commits every 10 ms what is due. Relays stay
and look every 50 ms, or are notified, as they have it. One that falls behind is said to.
"""

from __future__ import annotations

import time
from functools import partial

from benchmarks.peers.relays import Failed
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.stage import Stage, percentile

RATES = (100, 1_000, 10_000)
ROUNDS = 5
SECONDS, WARM_UP_SECONDS = 3, 1
WARM_UP, SIZE = 50_000, 200
EVERY_SECONDS = 0.01
GRACE_SECONDS = 5
"""How long after the last message all must have arrived."""


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Notes p50 and p99, in rounds in which each gets its turn."""
    able = report.able(peers)
    for peer in able:
        peer.warm(max(100, int(WARM_UP * scale)), SIZE)
    seconds = max(1.0, SECONDS * scale)
    for rate in RATES:
        turns = {peer.name: partial(_waits, stage, peer, rate, seconds) for peer in able}
        what = f"latency_{rate}_p50"
        found = report.rounds(
            what, turns, lambda waits: f"{percentile(waits, 0.5) * 1000:,.0f} ms", rounds=ROUNDS
        )
        for name, mine in found.items():
            for share, suffix in ((0.5, "p50"), (0.99, "p99")):
                values = [percentile(waits, share) * 1000 for waits in mine]
                report.add(f"latency_{rate}_{suffix}", name, values, "ms", messages=len(mine[0]))


def _waits(stage: Stage, peer: Peer, rate: int, seconds: float) -> list[float]:
    """How long each message took, but for those of the first second.

    Raises:
        Failed: the relays do not keep up.
    """
    peer.fill(0, SIZE)
    peer.relays.start()
    peer.relays.stay()
    sent = _send(stage, peer, rate, seconds + WARM_UP_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while (arrived := peer.arrived()) < sent and time.monotonic() < deadline:
        time.sleep(0.1)
    peer.relays.leave()
    if arrived < sent:
        achieved = arrived / (seconds + WARM_UP_SECONDS + GRACE_SECONDS)
        raise Failed(f"falls behind at {rate:,}/s: it moves {achieved:,.0f}/s")
    return peer.waits()[int(rate * WARM_UP_SECONDS) :]


def _send(stage: Stage, peer: Peer, rate: int, seconds: float) -> int:
    """Send at a rate; return how many it was."""
    sent, total = 0, int(rate * seconds)
    with stage.app.connect(role="bench", autocommit=True) as connection:
        started = time.monotonic()
        while sent < total:
            due = min(int((time.monotonic() - started) * rate), total) - sent
            if due:
                peer.module.add(connection, due, SIZE)
                sent += due
            time.sleep(EVERY_SECONDS)
    return sent
