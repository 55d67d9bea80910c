"""Steady load while a transaction is held open all the time: what is kept of the throughput.

The systems get their turns for some minutes, in each of which a few seconds' messages are sent and
then relayed; first a quarter of the time without, then all of it with a transaction in each
database that lets vacuum remove nothing. Autovacuum is on. The last half of the turns counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from statistics import median

import psycopg

from benchmarks.faults import horizon
from benchmarks.peers.relays import Failed
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.stage import Stage, execute

MESSAGES, SIZE = 50_000, 200
FREE_SHARE = 0.25

KEPT = """
SELECT coalesce(sum(n_dead_tup), 0)::bigint,
       coalesce(sum(pg_total_relation_size(relid)), 0)::bigint
FROM pg_stat_user_tables WHERE schemaname || '.' || relname LIKE ANY (%s)
"""


def run(stage: Stage, peers: list[Peer], report: Report, scale: float, minutes: float = 10) -> None:
    """Notes the rates, what is kept of them, and dead rows and bytes for a million messages."""
    some = max(100, int(MESSAGES * scale))
    able = report.able(peers)
    for peer in able:
        peer.warm(some, SIZE)
    execute(stage.app, "ALTER SYSTEM SET autovacuum = on", "SELECT pg_reload_conf()")
    free = _phase(stage, able, report, some, 60 * minutes * FREE_SHARE)
    with ExitStack() as stack:
        for database in (stage.app, stage.mom):
            stack.enter_context(horizon(database))
        held = _phase(stage, able, report, some, 60 * minutes)
        after = {peer.name: _kept(stage, peer) for peer in able}
    execute(stage.app, "ALTER SYSTEM RESET autovacuum", "SELECT pg_reload_conf()")
    for peer in able:
        name = peer.name
        if not held[name] or not free[name]:
            continue
        late = held[name][len(held[name]) // 2 :]
        moved = len(held[name]) * peer.count(some)
        dead, size = after[name]
        usual = median(free[name])
        kept = [rate / usual for rate in late]
        report.add("steady_held", name, late, "messages/s", messages=moved)
        report.add("steady_kept", name, kept, "of the unheld throughput", messages=moved)
        report.add("steady_dead", name, [dead / moved], "dead rows per message", messages=moved)
        report.add("steady_size", name, [size / moved], "bytes per message", messages=moved)


def _phase(
    stage: Stage, peers: list[Peer], report: Report, messages: int, seconds: float
) -> dict[str, list[float]]:
    """The rates of each one's turns, of which everyone gets as many."""
    rates: dict[str, list[float]] = defaultdict(list)
    able = list(peers)
    for peer in able:
        peer.fill(0, SIZE)
    began = time.monotonic()
    while not rates or time.monotonic() - began < seconds:
        for peer in list(able):
            try:
                rates[peer.name].append(_turn(stage, peer, peer.count(messages)))
            except (Failed, psycopg.Error) as error:
                report.cannot(report.workload, peer.name, str(error))
                able.remove(peer)
    for name, mine in rates.items():
        report.say(f"steady: {name} {len(mine)} turns, the last at {mine[-1]:,.0f}/s")
    return rates


def _turn(stage: Stage, peer: Peer, messages: int) -> float:
    with stage.app.connect(role="bench", autocommit=True) as connection:
        peer.module.add(connection, messages, SIZE)
    before = peer.arrived()
    peer.relays.start()
    started = time.monotonic()
    peer.relays.drain()
    seconds = time.monotonic() - started
    if (moved := peer.arrived() - before) != messages:
        raise Failed(f"{moved} of {messages} messages have arrived")
    return messages / seconds


def _kept(stage: Stage, peer: Peer) -> tuple[int, int]:
    """Dead rows of a system's tables in both databases, and their bytes at the application."""
    found = []
    for database in (stage.app, stage.mom):
        with database.connect(role="bench") as connection:
            found += connection.execute(KEPT, [list(peer.module.TABLES)]).fetchall()
    (dead, size), (dead_there, _) = found
    return int(dead) + int(dead_there), int(size)
