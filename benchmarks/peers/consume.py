"""Receiving and acknowledging: two consumers store a business row for each message of a backlog.

Where a consumer can, the row and the acknowledgement are one transaction: saf's, SKIP LOCKED's and
pgmq's. saf is also made to take the messages one by one, as the job queues do.
"""

from __future__ import annotations

from functools import partial

from benchmarks import receive
from benchmarks.peers.relays import Failed
from benchmarks.peers.report import Report
from benchmarks.peers.stage import Peer
from benchmarks.stage import Stage, execute
from saf.broker.services import create_service

MESSAGES, SIZE = 100_000, 200
ONE_BY_ONE = 0.02
CONSUMERS, BATCH = 2, 500
ROUNDS = 5


def run(stage: Stage, peers: list[Peer], report: Report, scale: float) -> None:
    """Messages a second, in rounds in which each gets its turn."""
    messages = max(100, int(MESSAGES * scale))

    def moved(peer: Peer) -> tuple[int, float]:
        with peer.consuming():
            some = peer.count(messages)
            peer.fill(some, SIZE)
            return some, peer.drain(some).rate

    def received(some: int, batch: int) -> tuple[int, float]:
        execute(stage.mom, "TRUNCATE saf.inbox")
        receive.again(stage.mom)
        with stage.mom.connect(role="bench") as connection:
            connection.execute(receive.FILL, [some])
        execute(stage.mom, "VACUUM ANALYZE saf.inbox")
        rate, _ = receive.rate(stage, batch, CONSUMERS, business=True)
        with stage.mom.connect(role="bench") as connection:
            booked = connection.execute("SELECT count(*) FROM booked").fetchone()
        if booked != (some,):
            raise Failed(f"{booked} of {some} messages were received")
        return some, rate

    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute("DROP TABLE IF EXISTS booked")
        connection.execute(receive.BOOKED)
    few = max(50, int(messages * ONE_BY_ONE))
    turns = {}
    for peer in report.able(peers):
        if peer.name.startswith("saf "):
            turns[peer.name] = partial(received, messages, BATCH)
            turns["saf, one by one"] = partial(received, few, 1)
        else:
            turns[peer.name] = partial(moved, peer)
    found = report.rounds("consume", turns, lambda one: f"{one[1]:,.0f}/s", rounds=ROUNDS)
    for name, mine in found.items():
        rates = [rate for _, rate in mine]
        report.add("consume", name, rates, "messages/s", messages=mine[0][0])
