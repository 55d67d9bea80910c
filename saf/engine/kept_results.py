"""Kept results: what a transform has made of messages, where it would be something else next time.

A batch that is read again has to give what it gave before. Most transforms do, because they depend
on the message alone. What another one has made of a message is written at the source, durably,
before anything of it is sent, as resolutions are (`saf.routing.resolved`). From then on this counts
for the message: for a retried task, after a crash, for another member, for each destination of a
topic, and while the message is parked or a dead letter.

It is removed when its batch is closed (`remove`); where the message is set aside then, a purge
removes it after the message has gone (`collect`).

The functions take a psycopg connection. This imports no Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from saf.database import DURABLY, fetch
from saf.log.cursor import Batch

RESULT = ("part", "key", "message_type", "headers", "body")
"""The columns of a result, besides those that say what it was made of."""

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

# What is kept of a shard without an open batch is of a batch that was closed
COLLECT = f"""
DELETE FROM saf.kept_result k
WHERE NOT EXISTS (SELECT FROM saf.cursor c
                  WHERE c.subscription_id = k.subscription_id AND c.shard = k.shard
                    AND c.open IS NOT NULL)
  AND NOT ({SET_ASIDE})
"""

# To whom messages were sent that a router has led on, as long as the outbox has them
SENT_TO = f"""
SELECT o.id, o.to_service FROM {MESSAGES} JOIN saf.outbox o USING (shard, id)
WHERE o.to_service = ANY (%(services)s)
"""


def kept(
    connection: psycopg.Connection[Any], batch: Batch, messages: Mapping[str, Sequence[int]]
) -> list[tuple[Any, ...]]:
    """Return what is kept of messages, which are given by ``shards`` and ``ids``.

    Each row is the id of the message and the columns of `RESULT`, in the order of the ids and of
    what was made of each. A row without a body says that nothing was made of its message.
    """
    params = {**messages, "subscription_id": batch.subscription_id}
    return fetch(connection, KEPT, params)


def keep(
    connection: psycopg.Connection[Any], batch: Batch, results: Mapping[str, Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """Keep results; return those that count, which another task may have kept before.

    ``results`` are columns: shard, id, number and those of `RESULT`; each message has all of its
    results among them. Call it in a transaction that has locked the cursors of the batch. Send
    nothing of these messages before this has committed, and let that commit be durable.
    """
    messages = {"shards": results["shard"], "ids": results["id"]}
    once = dict.fromkeys(zip(*messages.values(), strict=True))
    messages = dict(zip(messages, map(list, zip(*once, strict=True)), strict=True))
    there = {row[0] for row in kept(connection, batch, messages)}
    new = [place for place, id_ in enumerate(results["id"]) if id_ not in there]
    if new:
        connection.execute(DURABLY)
        columns = {name: [column[place] for place in new] for name, column in results.items()}
        more = {"subscription_id": batch.subscription_id, "batch": batch.number}
        connection.execute(KEEP, columns | more)
    return kept(connection, batch, messages)


def remove(connection: psycopg.Connection[Any], batches: Iterable[Batch]) -> None:
    """Remove what was kept in batches, unless its message is set aside.

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
    """Remove what was kept of messages that need it no more; return how much."""
    return connection.execute(COLLECT).rowcount


def sent_to(
    connection: psycopg.Connection[Any],
    messages: Mapping[str, Sequence[int]],
    services: Iterable[str],
) -> dict[int, str]:
    """Return which messages, by id, were sent to which of some services, by what the outbox has."""
    return dict(fetch(connection, SENT_TO, {**messages, "services": [*services]}))
