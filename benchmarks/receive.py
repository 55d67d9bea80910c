"""Receiving: messages a second by batch and receivers, and the time from end to end.

Each receiver is a process. "No-op" looks at each message of a deep backlog and does nothing, until
none is left. Otherwise a business row is inserted for each, by one statement a delivery, in a
closed loop for some seconds, after every shard has been looked through for where its batches may
end. From end to end, an application commits in an open loop (it does not wait for the consumer),
the forwarder runs in a loop, and a worker inserts a business row for each message.

By hand is what one would write instead: a table of jobs, of which each consumer takes some by
SELECT … FOR UPDATE SKIP LOCKED, inserts the same business rows and deletes the jobs. It keeps no
order, and a job that fails is in everybody's way. It takes its turn beside saf in each round.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from pyspark import SparkContext

import saf
from benchmarks.stage import Stage, execute, median, percentile
from saf.broker.services import create_service
from saf.config import load
from saf.database import Dsn
from saf.forwarding.forwarder import Forwarder
from saf.receiving.link import connected
from saf.receiving.receive import Receiver
from saf.spark.runner import SparkRunner

BACKLOG, CHUNK = 400_000, 50_000
SECONDS = 1.0
BATCHES = (1, 10, 100, 1000)
RECEIVERS = (1, 2, 4, 8)
BESIDE, ROUNDS = ((1, 1), (1, 2), (1, 8), (10, 2), (100, 2), (500, 2)), 3
BESIDE_SECONDS = 2.0

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

WAITS = "SELECT extract(epoch FROM at - sent_at)::float FROM booked ORDER BY sent_at"

UNTOUCHED = """
SELECT FROM saf.cursor JOIN saf.subscription USING (subscription_id)
WHERE log = 'inbox' AND open IS NULL AND done::text = '1:1:'
"""

RATE, SHARES = 1000, (0.1, 0.5, 0.8)
REACH = {"p50": "<= 0.4", "p99": "<= 1"}
BURST, AT_ONCE = 60_000, 1_000
WARM_UP_SECONDS, OPEN_LOOP_SECONDS = 3, 10
EVERY_SECONDS = 0.01


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


def beside(stage: Stage) -> None:
    """Notes receive_one_ratio and so on: how many times as many messages as by hand."""
    for batch, receivers in BESIDE:
        ratios = []
        for _ in range(ROUNDS):
            again(stage.mom)
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
        stage.note(f"receive_{size}_ratio{where}", median(ratios), "to by hand", ">= 1")
        spread = max(ratios) - min(ratios)
        stage.note(f"receive_{size}_ratio_spread{where}", spread, "to by hand")


def _all_begun(dsn: Dsn) -> bool:
    with dsn.connect(role="bench") as connection:
        untouched = connection.execute(UNTOUCHED).fetchall()
    return not untouched


def run(stage: Stage) -> None:
    """Notes receive_per_second_… and receive_p50_ms_…"""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute("TRUNCATE saf.inbox")
        connection.execute(BOOKED)
        for _ in range(BACKLOG // CHUNK):
            connection.execute(FILL, [CHUNK])
        connection.execute("VACUUM ANALYZE saf.inbox")
    for receivers in RECEIVERS:
        again(stage.mom)
        noop, _ = rate(stage, 1000, receivers, business=False)
        reach = ">= 60,000" if receivers == 2 else ""
        suffix = "" if receivers == 2 else f"_{receivers}_receivers"
        stage.note(f"receive_per_second_batch_1000{suffix}", noop, "1/s no-op", reach)
    for batch in BATCHES:
        again(stage.mom)
        while not _all_begun(stage.mom):
            consume(stage.mom, 1000, business=False, seconds=1)
        for receivers in RECEIVERS:  # what these take in all is a part of the backlog
            each, took = rate(stage, batch, receivers, business=True, seconds=SECONDS)
            where = f"batch_{batch}_{receivers}_receivers"
            stage.note(f"receive_insert_per_second_{where}", each, "1/s")
            stage.note(f"receive_insert_p50_ms_{where}", median(took) * 1000, "ms")
            stage.note(f"receive_insert_p99_ms_{where}", percentile(took, 0.99) * 1000, "ms")
    beside(stage)


def end_to_end(stage: Stage, spark: SparkContext) -> None:
    """Notes end_to_end_p50_seconds and so on: at a rate, and at shares of the capacity.

    The capacity is what sender, forwarder and worker do together when none waits for another.
    """
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        create_service(connection, "billing")
        connection.execute(BOOKED.replace("TABLE", "TABLE IF NOT EXISTS"))
    file = stage.settings_file(
        Path(stage.server.data_dir).parent / "loop.toml", interval_seconds=0.05
    )
    settings = load(file)
    with running(stage, Forwarder(settings, SparkRunner(lambda _: spark))):
        _handled(stage, _send(stage, BURST, None))  # Java compiles what is hot
    with running(stage, Forwarder(settings, SparkRunner(lambda _: spark))):
        started = time.monotonic()
        _handled(stage, _send(stage, BURST, None))
        capacity = BURST / (time.monotonic() - started)
    stage.note("end_to_end_capacity_per_second", capacity, "1/s")
    rates = {"": RATE} | {f"_at_{share:.0%}": capacity * share for share in SHARES}
    for where, rate in rates.items():
        with running(stage, Forwarder(settings, SparkRunner(lambda _: spark))):
            waits = _handled(stage, _send(stage, int(rate * OPEN_LOOP_SECONDS), rate))
        waits = waits[int(rate * WARM_UP_SECONDS) :]
        suffix = where.replace("%", "_percent")
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            reach = "" if where else REACH.get(name, "")
            stage.note(f"end_to_end_{name}_seconds{suffix}", percentile(waits, share), "s", reach)


@contextmanager
def running(stage: Stage, forwarder: Forwarder) -> Iterator[None]:
    """A forwarder in a loop, and a worker, from empty tables on."""
    execute(stage.app, "TRUNCATE saf.outbox")
    execute(stage.mom, "TRUNCATE saf.inbox, booked")
    worker = saf.Worker(stage.mom, "billing", max_messages=1000)
    worker.batch_handler()(book)
    threads = [
        threading.Thread(target=forwarder.loop, args=(lambda _: None,)),
        threading.Thread(target=worker.run),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        forwarder.stop()
        worker.stop()
        for thread in threads:
            thread.join()


def _send(stage: Stage, messages: int, rate: float | None) -> int:
    """Commit so many messages, at a rate in messages a second or without a pause."""
    outbox, sent = saf.Outbox(), 0
    with stage.app.connect(role="bench") as connection:
        started = time.monotonic()
        while sent < messages:
            due = AT_ONCE if rate is None else int((time.monotonic() - started) * rate) - sent
            rows = [
                saf.Message(service="billing", body=b"x" * 200, key=str(n))
                for n in range(min(due, messages - sent))
            ]
            if rows:
                outbox.send_many(connection, rows)
                connection.commit()
                sent += len(rows)
            if rate is not None:
                time.sleep(EVERY_SECONDS)
    return sent


def _handled(stage: Stage, sent: int) -> list[float]:
    """Once all are handled: how long each took, in the order in which they were sent."""
    with stage.mom.connect(role="bench", autocommit=True) as connection:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ((count,),) = connection.execute("SELECT count(*) FROM booked").fetchall()
            if count == sent:
                rows = connection.execute(WAITS).fetchall()
                return [float(wait) for (wait,) in rows]
            time.sleep(0.2)
    raise RuntimeError(f"sent {sent} messages, and {count} were handled")
