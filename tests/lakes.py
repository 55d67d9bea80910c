"""What tests do with a table of a lakehouse, of whatever kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pyarrow as pa

from saf.database import Dsn
from saf.destinations import Chunk
from saf.destinations.lake import LakeSettings
from saf.failpoints import arm
from saf.operating.repair.reconcile import Outcome, reconcile
from saf.testing.forwarder import all_stored
from tests.pipeline import connect, forward, send

WEEK = 7 * 86400.0


def send_numbers(app: Dsn, *numbers: int) -> None:
    """Send messages of one key, with numbers as bodies."""
    with connect(app) as connection:
        for number in numbers:
            send(connection, str(number), key="k")


def compare(app: Dsn, lake: LakeSettings) -> Outcome:
    """What `saf reconcile` finds."""
    return reconcile("app", app, {"lake": lake}, retention_seconds=WEEK)


def problems(app: Dsn, lake: LakeSettings) -> list[str | None]:
    """What forwarding fails with."""
    return [one.error_kind for one in forward(app, chunk_rows=3, lake=lake) if one.error_kind]


def store(lake: LakeSettings, chunk: Chunk) -> tuple[int, int]:
    """How many messages were stored, and dropped."""
    with closing(lake.open("lake")) as one:
        done = all_stored(one.store(chunk, exactly_once=True))
    return done.messages, done.dropped


def of_shards(chunk: Chunk, *shards: int) -> Chunk:
    """What a task with some of the shards would store."""
    epochs = tuple(one for one in chunk.batch.epochs if one[0] in shards)
    mine = pa.compute.is_in(chunk.rows["shard"], pa.array(shards, pa.int16()))
    return replace(chunk, rows=chunk.rows.filter(mine), batch=replace(chunk.batch, epochs=epochs))


def ids(there: Sequence[Any]) -> list[UUID]:
    """The ids of messages."""
    return [one["message_id"] for one in there]


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Something happens when files are written, and the commit is not made yet."""
    happened: list[object] = []
    arm("mom_insert", lambda: happened.append(action()))
    try:
        yield
    finally:
        arm("")
    assert happened
