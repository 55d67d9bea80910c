"""Moving what is pending from one PostgreSQL to another: messages a second, CPU and WAL.

saf's messages land in a real inbox with its index, in order, exactly once; the peers' in a narrow
table without one. The ceiling is two pipes of binary COPY between saf's tables.
"""

from __future__ import annotations

from functools import partial

from benchmarks import drain
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Cost, Peer, measured
from benchmarks.stage import Stage, execute

SIZES = {"drain_200B": (1_000_000, 200), "drain_2kB": (200_000, 2000)}
ROUNDS = 5
WARM_UP = 300_000
CEILING = "COPY, two pipes"


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Rounds in which each gets its turn."""

    def ceiling(messages: int, size: int) -> Cost:
        stage.fill(messages, size)
        execute(stage.app, "VACUUM saf.outbox")  # as before the others' turns
        stage.rewind()
        return measured(stage, messages, lambda: drain.ceiling(stage))

    def turn(peer: Peer, messages: int, size: int) -> Cost:
        some = peer.count(messages)
        peer.fill(some, size)
        return peer.drain(some)

    able = report.able(peers)
    for workload, (messages, size) in SIZES.items():
        whole = max(2, int(messages * scale))
        turns = {CEILING: partial(ceiling, whole, size)}
        turns |= {peer.name: partial(turn, peer, whole, size) for peer in able}
        for peer in able:
            peer.warm(min(whole, WARM_UP), size)
        costs = report.rounds(workload, turns, lambda cost: f"{cost.rate:,.0f}/s", rounds=ROUNDS)
        tops = costs[CEILING]
        for name, mine in costs.items():
            rates = [one.rate for one in mine]
            ratios = [one.rate / top.rate for one, top in zip(mine, tops, strict=True)]
            some = mine[0].messages
            report.add(workload, name, rates, "messages/s", ratios=ratios, messages=some)
            for what, unit, each in (
                ("cpu", "CPU s per million", [one.cpu_seconds for one in mine]),
                ("wal", "WAL MB per million", [one.wal_bytes / 1e6 for one in mine]),
            ):
                million = [value / some * 1e6 for value in each]
                report.add(f"{workload}_{what}", name, million, unit, messages=some)
