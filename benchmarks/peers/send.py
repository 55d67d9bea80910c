"""What sending adds to a business transaction: pgbench with the statement that each send issues."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.send import ACCOUNTS, BUSINESS, TABLES, Latency, pgbench
from benchmarks.stage import Stage, execute

CLIENTS = (1, 8)
ROUNDS, SECONDS = 5, 4
BARE = "bare"


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Rounds in which each gets its turn; the ratios are to the bare transaction of the round."""
    execute(stage.app, *TABLES)
    statements = {BARE: ""}
    for peer in report.able(peers):
        peer.fill(0, 200)
        statements[peer.name] = f"{peer.module.SEND.strip()};"
    folder = stage.server.data_dir.parent
    scripts = {}
    for number, (name, statement) in enumerate(statements.items()):
        scripts[name] = folder / f"send_{number}.sql"
        one_line = " ".join(statement.split())
        scripts[name].write_text(BUSINESS.format(accounts=ACCOUNTS, send=f"{one_line}\n"))

    def turn(script: Path, clients: int) -> Latency:
        execute(stage.app, "CHECKPOINT")
        seconds = max(1, round(SECONDS * scale))
        return pgbench(stage, script, clients=clients, seconds=seconds)

    for clients in CLIENTS:
        workload = f"send_{clients}_clients"
        turns = {name: partial(turn, script, clients) for name, script in scripts.items()}
        measured = report.rounds(workload, turns, lambda one: f"{one.tps:,.0f}/s", rounds=ROUNDS)
        bare = measured[BARE]
        for name, mine in measured.items():
            kept = [one.tps / b.tps for one, b in zip(mine, bare, strict=True)]
            report.add(f"{workload}_tps", name, [one.tps for one in mine], "1/s", ratios=kept)
            for what in ("p50", "p99"):
                added = [
                    getattr(one, what) - getattr(b, what) for one, b in zip(mine, bare, strict=True)
                ]
                report.add(f"{workload}_added_{what}", name, added, "ms")
