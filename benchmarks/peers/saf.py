"""saf itself: its outbox, forwarded exactly once by one session on two cores, to an inbox.

Messages arrive in a real inbox with its index, in order. As with ``saf forward``, Spark forwards
deep backlogs, and the process itself few messages. The session stays between the rounds, as in a
loop; a cold run is measured apart.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

import psycopg

from benchmarks.peers import BODY
from benchmarks.scale import settings
from benchmarks.send import send_statement
from benchmarks.stage import FORGET, READ_AGAIN
from saf.database import Dsn
from saf.log import cursor
from saf.log.shards import Member

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, VERSION = "saf", version("saf-outbox")
REQUIRES = ()
LACKS = ""
CANNOT: dict[str, str] = {}
SHARE, RELAYS, WARM_UP = 1.0, 1, 2
TABLES, ARRIVED = ("saf.outbox_%", "saf.inbox_%", "saf.cursor", "saf.watermark"), "saf.inbox"
CHUNK, TASKS = 50_000, 2

SEND = send_statement().removesuffix(";\n")
FILL = f"""
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
SELECT 'billing', 'order ' || i %% 5000, 'OrderPlaced', '{{"content-type": "application/json"}}',
       convert_to({BODY}, 'UTF8')
FROM generate_series(1, %s) AS i
"""
FORWARDER = "SELECT subscription_id FROM saf.subscription WHERE log = 'outbox'"
POSITIONS = f"""
SELECT max(id) FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM saf.outbox) AS o
GROUP BY (n - 1) / {CHUNK * TASKS} ORDER BY 1
"""


def prepare(app: str) -> None:
    """Its tables are the stage's."""


def empty(connection: psycopg.Connection) -> None:
    connection.execute("TRUNCATE saf.outbox")
    connection.execute(READ_AGAIN)
    connection.execute(FORGET)


def add(connection: psycopg.Connection, count: int, size: int) -> None:
    connection.execute(FILL.encode(), [size, count])


def mark(connection: psycopg.Connection) -> Callable[[], None]:
    """Open a batch, two tasks' positions after each of their chunks, close it."""
    ((subscription,),) = connection.execute(FORWARDER).fetchall()
    positions = [row[0] for row in connection.execute(POSITIONS).fetchall()]
    member = Member(subscription_id=subscription, lease_seconds=60)
    member.join(connection)
    member.balance(connection)

    def work() -> None:
        opened = cursor.open_batch(connection, "outbox", member)
        parts = [part for batch in opened for part in batch.split(TASKS)]
        for position in positions:
            for part in parts:
                with connection.transaction():
                    cursor.advance(connection, part, position)
        cursor.close(connection, cursor.join_splits(parts))

    return work


def relay(app: str, mom: str, number: int, go_on: Callable[[], bool]) -> None:  # noqa: ARG001 - one
    from saf.forwarding.forwarder import Forwarder
    from saf.forwarding.runner import LittleHere
    from saf.spark.runner import SparkRunner

    chosen = settings({"app": Dsn(app)}, Dsn(mom), interval_seconds=0.05)
    forwarder = Forwarder(chosen, LittleHere(SparkRunner(_session)))
    if not go_on():
        if problems := forwarder.drain().problems:
            raise RuntimeError(str(problems))
        return
    loop = threading.Thread(target=forwarder.loop, args=(lambda _: None,))
    loop.start()
    while go_on():
        pass
    forwarder.stop()
    loop.join()


@cache
def _session() -> SparkSession:
    from saf.spark import session

    spark = session.start("local[2]", app_name="saf peers")
    atexit.register(spark.stop)
    return spark
