"""Marking alone: what it costs to note that messages have been delivered, one connection each.

What has to be known to do so, such as the ids, is found out before.
"""

from __future__ import annotations

from functools import partial

from benchmarks.peers.report import Report
from benchmarks.peers.stage import Cost, Peer, measured
from benchmarks.stage import Stage

MESSAGES, SIZE = 200_000, 200
ROUNDS = 5


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Microseconds and bytes of WAL a message, in rounds in which each gets its turn."""

    def marked(peer: Peer) -> Cost:
        some = peer.count(int(MESSAGES * scale))
        peer.fill(some, SIZE)
        with stage.app.connect(role="bench", autocommit=True) as connection:
            work = peer.module.mark(connection)
            return measured(stage, some, work)

    turns = {peer.name: partial(marked, peer) for peer in report.able(peers)}
    costs = report.rounds(
        "marking", turns, lambda cost: f"{1e6 / cost.rate:,.3f} µs", rounds=ROUNDS
    )
    for name, mine in costs.items():
        some = mine[0].messages
        each = [1e6 / one.rate for one in mine]
        report.add("marking", name, each, "µs per message", messages=some)
        wal = [one.wal_bytes / some for one in mine]
        report.add("marking_wal", name, wal, "WAL bytes per message", messages=some)
