"""The forwarder to each queue, beside the queue's usual client in a bare loop, in one run.

The bare loop does no reading, no order, no marks: it has the same messages in memory already, as
the client wants them, and gives them in pipelines of a thousand. The server acknowledges durably
to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import SparkContext

from benchmarks.drain import forward
from benchmarks.stage import READ_AGAIN, Stage, execute, median
from saf.config import Settings, load
from saf.database import fetch

MESSAGES = 200_000
ROUNDS = 5
WARM_UP = 2
AT_ONCE = 1_000

FORGET = "TRUNCATE saf.acknowledged, saf.backoff, saf.parked"


def run(stage: Stage, spark: SparkContext) -> None:
    """Notes, for each queue, both rates and their ratio."""
    stage.fill(MESSAGES)
    redis_streams(stage, spark)


def redis_streams(stage: Stage, spark: SparkContext) -> None:
    """Notes redis_… ."""
    from saf.demo import redis as server

    folder = Path(stage.server.data_dir).parent
    with server.serve(folder / "redis") as there:
        import redis

        ((host, port),) = there.address.hosts
        client = redis.Redis(host=host, port=port, socket_timeout=300)
        file = stage.settings_file(folder / "redis.toml")
        text = file.read_text()
        first, last = text.index("[destinations.mom]"), text.index("[forwarder]")
        file.write_text(
            f'{text[:first]}[destinations.mom]\nkind = "redis"\nserver = "{there.server}"\n'
            f"{text[last:]}"
        )
        messages = _fields(stage)

        def bare() -> float:
            started = time.monotonic()
            for at in range(0, MESSAGES, AT_ONCE):
                with client.pipeline(transaction=False) as pipeline:
                    for fields in messages[at : at + AT_ONCE]:
                        pipeline.xadd("bare", fields)
                    pipeline.execute()
            return time.monotonic() - started

        _compare(stage, spark, load(file), name="redis", bare=bare, forget=client.flushall)


def _fields(stage: Stage) -> list[dict[Any, Any]]:
    """The same messages as entries of a stream."""
    query = """
    SELECT message_id::text, shard, to_service, key, message_type, created_at::text,
           headers ->> 'content-type', body, (SELECT broker_id::text FROM saf.broker)
    FROM saf.outbox ORDER BY id
    """
    with stage.app.connect(role="bench") as connection:
        rows = fetch(connection, query)
    names = (
        "id",
        "shard",
        "service",
        "key",
        "type",
        "created-at",
        "content-type",
        "body",
        "source",
    )
    return [dict(zip((f"saf-{name}" for name in names), row, strict=True)) for row in rows]


def _compare(
    stage: Stage,
    spark: SparkContext,
    settings: Settings,
    *,
    name: str,
    bare: Callable[[], float],
    forget: Callable[[], object],
) -> None:
    seconds: dict[str, list[float]] = {"forwarder": [], "bare": []}
    for number in range(WARM_UP + ROUNDS):
        # in turns: what goes first finds a quieter server
        for which in sorted(seconds, reverse=number % 2 == 1):
            forget()
            execute(stage.app, READ_AGAIN, FORGET, "VACUUM saf.cursor", "CHECKPOINT")
            took = bare() if which == "bare" else forward(spark, settings, MESSAGES)
            if number >= WARM_UP:
                seconds[which].append(took)
    for which, values in seconds.items():
        stage.note(f"{name}_{which}_messages_per_second", MESSAGES / median(values), "1/s")
    ratios = [b / f for b, f in zip(seconds["bare"], seconds["forwarder"], strict=True)]
    stage.note(f"{name}_ratio", median(ratios), "of the bare client", ">= 0.7")
