"""The checker finds what is wrong with streams whose driver dies: planted bugs, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pyarrow as pa
import pytest

from saf.database import fetch
from saf.spark.table.sink import Copy, Outgoing, Written
from tests.crash import bugs
from tests.crash.checker import Verdict
from tests.crash.streams import compare
from tests.crash.world import World
from tests.pipeline import connect
from tests.streams import Crash, Query

DSN_FROM = "CRASH_STREAM"
SENT = "SELECT convert_from(body, 'UTF8') FROM saf.outbox ORDER BY id"


@pytest.fixture
def streamed(world: Callable[[], World], monkeypatch: pytest.MonkeyPatch) -> World:
    made = world()
    monkeypatch.setenv(DSN_FROM, made.app.conninfo)
    return made


def findings(world: World) -> set[str]:
    """Of a stream and of a sink, whose driver dies wherever it can."""
    query = Query(
        options={
            **{"dsn_from": DSN_FROM, "log": "outbox", "subscription": "lake"},
            **{"partitions": "2", "maxRowsPerTrigger": "4"},
        }
    )
    for crash in ("asked", "written", "committed", "read", ""):
        _some(world, query, crash)
        _copy(world, query)
    query.drain()
    _copy(world, query)
    verdict = Verdict()
    compare("in the lake", world.app, query.bodies, verdict)
    with connect(world.other) as connection:
        copied = [body for (body,) in fetch(connection, SENT)]
    compare("copied", world.app, copied, verdict)
    return set(verdict.findings)


def _some(world: World, query: Query, crash: str) -> None:
    """Some messages, of which one is committed late, and two micro-batches."""
    with world.late("orders-0"):
        world.send("orders-1", 9)
        world.send("audit-0", 2)
        with suppress(Crash):
            query.step()
            query.step(crash=crash)


def _copy(world: World, query: Query) -> None:
    """All micro-batches are sent once more, as by a driver that does not know that they were."""
    to = Outgoing(what="the copies", dsn=world.other)
    for number, rows in sorted(query.sink.items()):
        with Copy(to.what, to.dsn) as copy:
            for some in _as_messages(rows):
                copy.add(some)
        written = Written(partition=0, attempt=copy.attempt, messages=copy.messages, query=None)
        to.send("crash", number, [written], stream=False)


def _as_messages(rows: list[tuple[object, ...]]) -> Iterator[pa.RecordBatch]:
    for _, _, key, body in rows:
        yield pa.RecordBatch.from_pydict({"service": ["copies"], "key": [key], "body": [body]})


def test_a_stream_whose_driver_dies_has_no_findings(streamed: World) -> None:
    assert findings(streamed) == set()


@pytest.mark.full
@pytest.mark.parametrize(
    ("bug", "finding"),
    [
        (bugs.a_stream_forgets_where_in_a_batch_it_was, "duplicated"),
        (bugs.transactions_in_progress_forgotten, "lost"),
        (bugs.epochs_are_sent_again, "duplicated"),
    ],
)
def test_a_planted_bug_of_streams_is_found(
    streamed: World,
    bug: Callable[[pytest.MonkeyPatch], None],
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    assert finding in findings(streamed)
