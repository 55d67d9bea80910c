"""What sending adds to a business transaction: pgbench with the statement that each send issues."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.send import ACCOUNTS, BUSINESS, TABLES, Latency, pgbench, send_statement
from benchmarks.stage import Stage, execute

CLIENTS = (1, 8)
ROUNDS = 5
BARE, SAF = "bare", "saf"


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Rounds in which each gets its turn; the ratios are to the bare transaction of the round."""
    execute(stage.app, *TABLES)
    statements = {BARE: "", SAF: send_statement()}
    for peer in peers:
        peer.fill(1, 200)
        statements[peer.name] = f"{peer.module.SEND.strip()};\n"
    folder = stage.server.data_dir.parent
    scripts = {}
    for number, (name, statement) in enumerate(statements.items()):
        scripts[name] = folder / f"send_{number}.sql"
        one_line = " ".join(statement.split())
        scripts[name].write_text(BUSINESS.format(accounts=ACCOUNTS, send=f"{one_line}\n"))
    for clients in CLIENTS:
        measured: dict[str, list[Latency]] = defaultdict(list)
        for number in range(ROUNDS):
            for name, script in scripts.items():
                execute(stage.app, "CHECKPOINT")
                one = pgbench(stage, script, clients=clients, seconds=max(1, round(6 * scale)))
                measured[name].append(one)
                report.say(f"send, {clients} clients {number + 1}/{ROUNDS}", name, one.tps)
        bare = measured[BARE]
        for name, mine in measured.items():
            workload = f"send_{clients}_clients"
            kept = [one.tps / b.tps for one, b in zip(mine, bare, strict=True)]
            report.add(f"{workload}_tps", name, [one.tps for one in mine], "1/s", kept)
            for what in ("p50", "p99"):
                added = [
                    getattr(one, what) - getattr(b, what) for one, b in zip(mine, bare, strict=True)
                ]
                report.add(f"{workload}_added_{what}", name, added, "ms")
