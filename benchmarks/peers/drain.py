"""Moving what is pending from one PostgreSQL to another: messages a second, CPU and WAL.

saf's messages land in a real inbox with its index, in order, exactly once; the peers' in a narrow
table without one. The ceiling is two pipes of binary COPY between saf's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from benchmarks import drain
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Cost, Peer, measured
from benchmarks.stage import Stage
from saf.config import load
from saf.spark import session

SIZES = {"drain_200B": (1_000_000, 200), "drain_2kB": (200_000, 2000)}
ROUNDS = 5
WARM_UP = 2
CEILING, SAF = "COPY, two pipes", "saf"


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Rounds in which each gets its turn."""
    spark = session.start("local[2]", app_name="saf peers")
    settings = load(stage.settings_file(stage.server.data_dir.parent / "peers.toml"))

    def saf(messages: int) -> Cost:
        stage.rewind()
        return measured(stage, messages, lambda: drain.forward(spark, settings, messages))

    def ceiling(messages: int) -> Cost:
        stage.rewind()
        return measured(stage, messages, lambda: drain.ceiling(stage))

    def each(messages: int, size: int) -> Iterator[tuple[str, Cost]]:
        stage.fill(messages, size)
        yield CEILING, ceiling(messages)
        yield SAF, saf(messages)
        for peer in peers:
            some = peer.count(messages)
            peer.fill(some, size)
            yield peer.name, peer.drain(some)

    for workload, (messages, size) in SIZES.items():
        some = int(messages * scale)
        stage.fill(some, size)
        for _ in range(WARM_UP):
            saf(some)
        costs: dict[str, list[Cost]] = defaultdict(list)
        for number in range(ROUNDS):
            for name, cost in each(some, size):
                costs[name].append(cost)
                report.say(f"{workload} {number + 1}/{ROUNDS}", name, cost.messages / cost.seconds)
        for name, mine in costs.items():
            rates = [one.messages / one.seconds for one in mine]
            ceilings = [one.messages / one.seconds for one in costs[CEILING]]
            ratios = [rate / top for rate, top in zip(rates, ceilings, strict=True)]
            report.add(workload, name, rates, "messages/s", ratios)
            million = [1e6 / one.messages for one in mine]
            cpu = [one.cpu_seconds * m for one, m in zip(mine, million, strict=True)]
            wal = [one.wal_bytes * m for one, m in zip(mine, million, strict=True)]
            report.add(f"{workload}_cpu", name, cpu, "CPU s per million")
            report.add(f"{workload}_wal", name, wal, "WAL bytes per million")
    session.stop(spark)
