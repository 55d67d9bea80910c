"""Fair receiving: how soon a small tenant is served behind a large one, and what that costs.

A worker's handler inserts a row for each message. It drains a backlog in the messages' own order
and in a fair one, in turn: ten messages of a tenant behind ten thousand of another, and a backlog
that is deeper than a fair receiver sees.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

import saf
from benchmarks.receive import BOOKED, READ_AGAIN
from benchmarks.stage import Stage, execute
from saf.broker.services import create_service, set_fairness
from saf.database import Dsn, fetch

ROUNDS = 5
LARGE, SMALL, DEEP = 10_000, 10, 100_000

FILL = """
INSERT INTO saf.inbox (to_service, key, body)
SELECT 'billing', %(tenant)s::text || '/' || i %% 500, decode(repeat('78', 200), 'hex')
FROM generate_series(1, %(messages)s::int) AS i
"""
BOOK = "INSERT INTO booked (key, body, sent_at) VALUES (%s, %s, %s)"
LAST = """
SELECT max(number) FROM (
    SELECT key, row_number() OVER (ORDER BY at) AS number FROM booked) AS booked
WHERE starts_with(key, 'small/')
"""


def handle_all(dsn: Dsn, *, fair: bool) -> float:
    """Messages a second of one worker that drains the backlog."""
    with dsn.connect(role="bench", autocommit=True) as connection:
        set_fairness(connection, "billing", fair_by="key:/" if fair else None)
    execute(dsn, "TRUNCATE booked", READ_AGAIN, "VACUUM saf.cursor, saf.dispatched", "CHECKPOINT")
    worker = saf.Worker(dsn, "billing")

    @worker.handler()
    def book(message: saf.Received, connection: psycopg.Connection[Any]) -> None:
        connection.execute(BOOK, [message.key, message.body, message.created_at])

    began = time.monotonic()
    return worker.drain() / (time.monotonic() - began)


def compare(stage: Stage) -> tuple[list[float], int]:
    """Ratios of throughput, fair to unfair; and the place of the small tenant's last message."""
    ratios, last = [], 0
    for turn in range(ROUNDS):
        rates = {fair: handle_all(stage.mom, fair=fair) for fair in (turn % 2 == 0, turn % 2 == 1)}
        ratios.append(rates[True] / rates[False])
        handle_all(stage.mom, fair=True)
        with stage.mom.connect(role="bench") as connection:
            last = max(last, fetch(connection, LAST)[0][0])
    return ratios, last


def run(stage: Stage) -> None:
    """Notes fair_ratio, fair_last_of_ten and fair_deep_ratio."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        connection.execute("TRUNCATE saf.inbox")
        create_service(connection, "billing")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
        for tenant, messages in (("large", LARGE), ("small", SMALL)):
            connection.execute(FILL, {"tenant": tenant, "messages": messages})
        connection.execute("VACUUM ANALYZE saf.inbox")
    ratios, last = compare(stage)
    stage.note("fair_ratio", ratios, "to a subscription that is not fair", ">= 0.9")
    stage.note("fair_last_of_ten", float(last), "messages handled", "<= 200")
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        connection.execute(FILL, {"tenant": "large", "messages": DEEP})
        connection.execute("VACUUM ANALYZE saf.inbox")
    ratios, _ = compare(stage)
    stage.note("fair_deep_ratio", ratios, "to a subscription that is not fair", ">= 0.9")
