"""Kept results: output of transforms that would differ the next time, stored at the source.

A batch that is read again must give the same messages. Most transforms ensure this, because they
depend on the message alone. The results of other transforms are written at the source, durably,
before any of them is sent, like resolutions (`saf.routing.resolved`). From then on the stored
result is used for the message: by a retried task, after a crash, by another member, for each
destination of a topic, and while the message is parked or a dead letter.

Results are removed when their batch is closed (`remove`). If the message is set aside at that time,
a purge removes them after the message is gone (`collect`).

The functions take a psycopg connection. This module imports no Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from saf.database import DURABLY, fetch
from saf.log.cursor import Batch

RESULT = ("part", "key", "message_type", "headers", "body")
"""Columns of a result, besides those that identify its message."""

MESSAGES = "unnest(%(shards)s::smallint[], %(ids)s::bigint[]) AS m (shard, id)"

# By the primary key, one message after the other
KEPT = f"""
SELECT k.id, {", ".join(RESULT)} FROM {MESSAGES}
JOIN saf.kept_result k ON k.subscription_id = %(subscription_id)s
                      AND k.shard = m.shard AND k.id = m.id
ORDER BY k.id, number
"""
KEEP = f"""
INSERT INTO saf.kept_result (subscription_id, batch, shard, id, number, {", ".join(RESULT)})
SELECT %(subscription_id)s, %(batch)s, r.* FROM unnest(
    %(shard)s::smallint[], %(id)s::bigint[], %(number)s::integer[], %(part)s::integer[],
    %(key)s::text[], %(message_type)s::text[], %(headers)s::text[], %(body)s::bytea[]) AS r
"""

SET_ASIDE = """
EXISTS (SELECT FROM saf.parked p WHERE p.subscription_id = k.subscription_id AND p.id = k.id)
OR EXISTS (SELECT FROM saf.dead_letter d
           WHERE d.subscription_id = k.subscription_id AND d.id = k.id)
"""
REMOVE = f"""
DELETE FROM saf.kept_result k
WHERE subscription_id = %(subscription_id)s AND batch = %(batch)s AND shard = ANY (%(shards)s)
  AND NOT ({SET_ASIDE})
"""

# What is kept of a shard without an open batch belongs to a batch that was closed
COLLECT = f"""
DELETE FROM saf.kept_result k
WHERE NOT EXISTS (SELECT FROM saf.cursor c
                  WHERE c.subscription_id = k.subscription_id AND c.shard = k.shard
                    AND c.open IS NOT NULL)
  AND NOT ({SET_ASIDE})
"""

# To whom redirected messages were sent, as long as the outbox has them
SENT_TO = f"""
SELECT o.id, o.to_service FROM {MESSAGES} JOIN saf.outbox o USING (shard, id)
WHERE o.to_service = ANY (%(services)s)
"""


def kept(
    connection: psycopg.Connection[Any], batch: Batch, messages: Mapping[str, Sequence[int]]
) -> list[tuple[Any, ...]]:
    """Return the kept results of messages, which are given by ``shards`` and ``ids``.

    Each row is the id of the message and the columns of `RESULT`, ordered by id and by the results'
    numbers. A row without a body means that the message was left out.
    """
    params = {**messages, "subscription_id": batch.subscription_id}
    return fetch(connection, KEPT, params)


def keep(
    connection: psycopg.Connection[Any], batch: Batch, results: Mapping[str, Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """Keep results; return the results to use, which another task may have kept before.

    ``results`` are columns: shard, id, number and those of `RESULT`; they contain all results of
    each message. Call it in a transaction that has locked the cursors of the batch. Send none of
    these messages before this transaction has committed durably.
    """
    messages = {"shards": results["shard"], "ids": results["id"]}
    distinct = dict.fromkeys(zip(*messages.values(), strict=True))
    messages = dict(zip(messages, map(list, zip(*distinct, strict=True)), strict=True))
    known = {row[0] for row in kept(connection, batch, messages)}
    new = [place for place, id_ in enumerate(results["id"]) if id_ not in known]
    if new:
        connection.execute(DURABLY)
        columns = {name: [column[place] for place in new] for name, column in results.items()}
        more = {"subscription_id": batch.subscription_id, "batch": batch.number}
        connection.execute(KEEP, columns | more)
    return kept(connection, batch, messages)


def remove(connection: psycopg.Connection[Any], batches: Iterable[Batch]) -> None:
    """Remove the results that were kept in batches, unless their message is set aside.

    Call it in the transaction that closes them.
    """
    for batch in batches:
        params = {
            "subscription_id": batch.subscription_id,
            "batch": batch.number,
            "shards": batch.shards,
        }
        connection.execute(REMOVE, params)


def collect(connection: psycopg.Connection[Any]) -> int:
    """Remove results whose messages are gone; return how many."""
    return connection.execute(COLLECT).rowcount


def sent_to(
    connection: psycopg.Connection[Any],
    messages: Mapping[str, Sequence[int]],
    services: Iterable[str],
) -> dict[int, str]:
    """Map ids of messages to those of ``services`` that they were sent to, as the outbox has it."""
    return dict(fetch(connection, SENT_TO, {**messages, "services": [*services]}))
