"""What reading takes with several readers: members that share the shards, and tasks of one member.

Each member opens its own batch, as forwarders do. Tasks share a batch, and one survey of it, which
reads each page once more and is not counted; one task alone makes its own, which is. The readers
take turns in this process. Pages are hits and reads of the log's tables and indexes. The old
snapshot is that of a transaction which has begun before the messages were sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple
from uuid import uuid4

from benchmarks.faults import horizon
from benchmarks.stage import Stage
from saf.engine.source import messages
from saf.engine.work import Work
from saf.forwarding.broker import DEEP, LOG, SUBSCRIPTION
from saf.forwarding.surveys import surveyed
from saf.log import cursor
from saf.log.shards import Member
from saf.message import DEFAULT_MAX_BYTES
from saf.routing.matching import Routes

FEW, MANY = 5_000, DEEP
READERS = (1, 4, 16)
ROUNDS = 3
FLUSH_SECONDS = 0.3  # until sessions that have ended have said what they read
LEASE_SECONDS = 600.0

PAGES = """
SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::bigint,
       sum(pg_relation_size(relid) / 8192)::bigint
FROM pg_statio_user_tables WHERE relid IN (
    SELECT inhrelid FROM pg_inherits WHERE inhparent = 'saf.outbox'::regclass)
"""
SUBSCRIPTION_ID = "SELECT subscription_id FROM saf.subscription WHERE name = %s AND log = %s"


class Took(NamedTuple):
    """What reading all messages took."""

    milliseconds: float
    log_pages: float
    """Pages, as a multiple of the log's."""


@contextmanager
def opened(stage: Stage, members: int) -> Iterator[list[Work]]:
    """Open what is pending, as batches of so many members, which end with the block."""
    with ExitStack() as stack:
        joined = []
        for _ in range(members):
            connection = stack.enter_context(stage.app.connect(role="bench", autocommit=True))
            ((subscription,),) = connection.execute(SUBSCRIPTION_ID, [SUBSCRIPTION, LOG]).fetchall()
            member = Member(subscription_id=subscription, lease_seconds=LEASE_SECONDS)
            member.join(connection)
            stack.callback(member.leave, connection)
            joined.append((connection, member))
        for connection, member in [*joined, *joined]:  # until each has its share
            member.balance(connection)
        batches = [
            batch
            for connection, member in joined
            for batch in cursor.open_batch(connection, LOG, member)
        ]
        yield [
            Work(broker="app", source=uuid4(), dsn=stage.app, batch=batch, routes=Routes())
            for batch in batches
        ]


def read(stage: Stage, work: list[Work], expected: int) -> Took:
    """Read all of the items."""
    before, began = _pages(stage)[0], time.monotonic()
    rows = 0
    for item in work:
        with closing(messages(item, DEFAULT_MAX_BYTES)) as some:
            rows += sum(one.num_rows for one in some)
    seconds = time.monotonic() - began
    if rows != expected:
        raise RuntimeError(f"read {rows} of {expected} messages")
    time.sleep(FLUSH_SECONDS)
    pages, log = _pages(stage)
    return Took(seconds * 1000, (pages - before) / log)


def _pages(stage: Stage) -> tuple[int, int]:
    with stage.app.connect(role="bench", autocommit=True) as connection:
        ((pages, log),) = connection.execute(PAGES).fetchall()
    return int(pages), int(log)


def _little(stage: Stage, members: int) -> Took:
    stage.rewind()
    with opened(stage, members) as work:
        return read(stage, work, FEW)


def _deep(stage: Stage, tasks: int) -> Took:
    stage.rewind()
    with opened(stage, 1) as work:
        (whole,) = (replace(one, much=True, deep=True) for one in work)
        with surveyed(whole.split(tasks)) as items:
            return read(stage, items, MANY)


def run(stage: Stage) -> None:
    """Notes reading_pages_4_tasks, reading_ms_16_members and so on."""
    for where in ("", "_old_snapshot"):
        with horizon(stage.app) if where else nullcontext():
            stage.fill(FEW)
            _little(stage, 1)
            for members in READERS:
                took = [_little(stage, members) for _ in range(ROUNDS)]
                name = f"{members}_members{where}"
                stage.note(f"reading_ms_{name}", [one.milliseconds for one in took], "ms")
                stage.note(
                    f"reading_pages_{name}", [one.log_pages for one in took], "times the log"
                )
    stage.fill(MANY)
    for tasks in READERS:
        deep = _deep(stage, tasks)
        reach = "" if tasks == 1 else "<= 1.1 times those of 1"
        stage.note(f"reading_pages_{tasks}_tasks", deep.log_pages, "times the log", reach)
        stage.note(f"reading_ms_{tasks}_tasks", deep.milliseconds, "ms")
