"""Receiving: messages a second by batch and receivers, and the time from end to end.

Each receiver is a process. "No-op" looks at each message of a deep backlog and does nothing, until
none is left. Otherwise a business row is inserted for each, by one statement a delivery, in a
closed loop for some seconds, after every shard has been looked through for where its batches may
end.

By hand is what one would write instead: a table of jobs, of which each consumer takes some by
SELECT … FOR UPDATE SKIP LOCKED, inserts the same business rows and deletes the jobs. It keeps no
order, and a job that fails is in everybody's way. It takes its turn beside saf in each round.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

import saf
from benchmarks.stage import Stage, execute, median, percentile
from saf.broker.services import create_service
from saf.database import Dsn
from saf.receiving import claim
from saf.receiving.link import connected
from saf.receiving.receive import Receiver

BACKLOG, CHUNK = 400_000, 50_000
SHARDS, BATCH = 64, 2048
SECONDS = 1.0
BATCHES = (1, 10, 100, 1000)
RECEIVERS = (1, 2, 4, 8)
BESIDE, ROUNDS = ((1, 1), (1, 2), (1, 8), (10, 2), (100, 2), (500, 2)), 3
BESIDE_SECONDS = 2.0
MUCH = 100

Consumer = Callable[[Dsn, int, bool, float], tuple[int, float, list[float]]]

FILL = """
INSERT INTO saf.inbox (to_service, key, message_type, headers, body)
SELECT 'billing', 'order ' || i %% 5000, 'OrderPlaced', '{"content-type": "application/json"}',
       convert_to(rpad('{"order": ' || i, 200, 'x'), 'UTF8')
FROM generate_series(1, %s) AS i
"""
BOOKED = """
CREATE TABLE booked (
    key text, body bytea, sent_at timestamptz, at timestamptz DEFAULT clock_timestamp())
"""
BOOK = """
INSERT INTO booked (key, body, sent_at)
SELECT * FROM unnest(%s::text[], %s::bytea[], %s::timestamptz[])
"""
READ_AGAIN = """
UPDATE saf.cursor SET done = '1:1:', open = NULL, position = 0, until = NULL, cuts = NULL,
       allowance = NULL
"""

JOBS = (
    "DROP TABLE IF EXISTS job",
    "CREATE TABLE job (id bigint PRIMARY KEY, key text, body bytea, created_at timestamptz)",
    "INSERT INTO job SELECT id, key, body, created_at FROM saf.inbox ORDER BY id LIMIT 250000",
    "VACUUM ANALYZE job",
)
TAKE_JOBS = """
SELECT id, key, body, created_at FROM job ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""
DELETE_JOBS = "DELETE FROM job WHERE id = ANY (%s)"


def book(messages: Sequence[saf.Received], connection: psycopg.Connection[Any]) -> None:
    """The business rows of a delivery."""
    rows = [(message.key, message.body, message.created_at) for message in messages]
    connection.execute(BOOK, [list(column) for column in zip(*rows, strict=True)])


def consume(dsn: Dsn, batch: int, business: bool, seconds: float) -> tuple[int, float, list[float]]:
    """Messages received, in how many seconds, and how long each delivery took."""
    received, took = 0, []
    with connected(dsn) as link:
        receiver = Receiver(link, "billing", saf.Policy(), batch)
        started = last = time.monotonic()
        while last - started < seconds:
            with receiver.delivery() as delivery:
                if not delivery:
                    break
                for message in delivery:
                    received += message.id > 0
                if business:
                    book(list(delivery), delivery.connection)
            now = time.monotonic()
            took.append(now - last)
            last = now
    return received, last - started, took


def rate(
    stage: Stage,
    batch: int,
    receivers: int,
    *,
    business: bool,
    seconds: float = math.inf,
    consumer: Consumer = consume,
) -> tuple[float, list[float]]:
    """Messages a second of so many receivers, and how long their deliveries took.

    They end after so many seconds, or when none is left.
    """
    execute(stage.mom, "TRUNCATE booked", "CHECKPOINT")
    work = [(stage.mom, batch, business, seconds)] * receivers
    with multiprocessing.get_context("spawn").Pool(receivers) as pool:
        measured = pool.starmap(consumer, work, chunksize=1)
    received = sum(count for count, *_ in measured)
    longest = max(taken for _, taken, _ in measured)
    return received / longest, [one for *_, took in measured for one in took]


def by_hand(dsn: Dsn, batch: int, business: bool, seconds: float) -> tuple[int, float, list[float]]:
    """As `consume`, of the table of jobs."""
    received, took = 0, []
    with psycopg.connect(dsn.conninfo, autocommit=True) as connection:
        started = last = time.monotonic()
        while last - started < seconds:
            with connection.transaction():
                jobs = connection.execute(TAKE_JOBS, [batch], binary=True).fetchall()
                if not jobs:
                    break
                if business:
                    columns = list(zip(*jobs, strict=True))[1:]
                    connection.execute(BOOK, [list(column) for column in columns])
                connection.execute(DELETE_JOBS, [[job[0] for job in jobs]])
            received += len(jobs)
            now = time.monotonic()
            took.append(now - last)
            last = now
    return received, last - started, took


def again(dsn: Dsn) -> None:
    """The whole backlog, as if nobody had received from it yet."""
    execute(dsn, READ_AGAIN, "VACUUM saf.cursor")


def begin(dsn: Dsn) -> None:
    """As `again`, with every shard looked through for where its batches may end."""
    again(dsn)
    with connected(dsn) as link:
        reader = Receiver(link, "billing", saf.Policy(), 1000).reader
        with link.transaction():
            hand = claim.claim_some(link.raw, reader, SHARDS, batch=BATCH)
            assert hand is not None
            claim.move(link.raw, hand)


def beside(stage: Stage) -> None:
    """Notes receive_one_ratio and so on: how many times as many messages as by hand."""
    for batch, receivers in BESIDE:
        ratios = []
        for turn in range(ROUNDS):
            if turn == 0 or batch >= MUCH:  # two such rounds would take almost the whole backlog
                begin(stage.mom)
                execute(stage.mom, *JOBS)
            mine, hand = (
                rate(stage, batch, receivers, business=True, seconds=BESIDE_SECONDS, consumer=one)[
                    0
                ]
                for one in (consume, by_hand)
            )
            ratios.append(mine / hand)
        size = {1: "one"}.get(batch, str(batch))
        where = "" if receivers == 2 else f"_{receivers}_receivers"
        stage.note(f"receive_{size}_ratio{where}", ratios, "to by hand", ">= 1")


def run(stage: Stage) -> None:
    """Notes receive_per_second_… and receive_p50_ms_…"""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        connection.execute("TRUNCATE saf.inbox")
        create_service(connection, "billing")
        connection.execute(BOOKED)
        for _ in range(BACKLOG // CHUNK):
            connection.execute(FILL, [CHUNK])
        connection.execute("VACUUM ANALYZE saf.inbox")
    for receivers in RECEIVERS:
        again(stage.mom)
        noop, _ = rate(stage, 1000, receivers, business=False)
        reach = ">= 150,000" if receivers == 2 else ""
        suffix = "" if receivers == 2 else f"_{receivers}_receivers"
        stage.note(f"receive_per_second_batch_1000{suffix}", noop, "1/s no-op", reach)
    for batch in BATCHES:
        begin(stage.mom)
        for receivers in RECEIVERS:  # what these take in all is a part of the backlog
            each, took = rate(stage, batch, receivers, business=True, seconds=SECONDS)
            where = f"batch_{batch}_{receivers}_receivers"
            stage.note(f"receive_insert_per_second_{where}", each, "1/s")
            stage.note(f"receive_insert_p50_ms_{where}", median(took) * 1000, "ms")
            stage.note(f"receive_insert_p99_ms_{where}", percentile(took, 0.99) * 1000, "ms")
    beside(stage)
