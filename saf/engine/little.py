"""Little work: few messages, forwarded by three statements, and by two for each batch after it.

    read      at the source: the messages, each column as one array, and the marks that the source
              remembers
    store     at the destination: if its marks are the same, move them and insert the messages
    next      at the source: close the batch and remember the moved marks; and if there are more
              messages, open the next batch and read it

This is a short cut of `saf.engine.task` for batches about which nothing must be decided. All
messages go to one PostgreSQL destination, exactly once; none waits, has expired, is addressed to a
broker or was sent by a checked sender; both sides agree about each mark; and nothing is traced.
Arrays pass from one database to the other as they are, so no Python runs per message.

In all other cases, and after any failure, `forward` returns None, and the task forwards the batch.
It reads the same messages again, because a batch never changes, and decides what this module
leaves open. If the messages were stored here and the answer got lost, the destination drops them
then, as after a crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar

import psycopg
from psycopg.rows import dict_row

from saf.columns import COLUMNS
from saf.database import LOST, Dsn, array, connections
from saf.database.arrays import passing
from saf.destinations import FewMessages
from saf.destinations.marks import PLACES
from saf.engine.work import ForwardingRules, Receipt, Receipts, Work, add_services
from saf.errors import SafError
from saf.failpoints import fail_point
from saf.limits import READABLE
from saf.log.cursor import SAME
from saf.log.read import IN_BATCH, since_shown
from saf.log.shards import LAST
from saf.message import VERIFIED_FROM
from saf.routing.matching import EXACTLY_ONCE
from saf.routing.routes import FINGERPRINT
from saf.telemetry import tracing

MOST, MOST_BYTES = 2000, 4 << 20
"""Most messages of a batch, and the largest total size of their bodies and headers, in bytes."""

STAY_SECONDS = 0.25
"""Time after which no further batch is opened, so that the driver sees to everything else."""

FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.001, 0.016
"""Pauses between looks for messages that follow soon; each is twice as long as the one before."""

_ROWS = since_shown(
    "saf.outbox", shards="= ANY (%(shards)s::smallint[])", done="%(done)s::pg_snapshot"
)
_NEW_ROWS = since_shown(
    "saf.outbox", shards="= ANY (%(shards)s::smallint[])", done="%(open)s::pg_snapshot"
)
_ARRAYS = ", ".join(f"array_agg({column}) AS {column}" for column in COLUMNS)


def _suited(opened_at: str) -> str:
    """Return SQL for a row if nothing must be decided about the messages of ``rows``.

    Sizes are known without reading values.
    """
    return f"""
    SELECT FROM rows
    HAVING count(*) BETWEEN 1 AND %(most)s AND count(DISTINCT id) = count(*)
       AND sum(octet_length(body) + coalesce(pg_column_size(headers), 0)) <= %(most_bytes)s
       AND bool_and({READABLE} AND octet_length(body) <= %(max_bytes)s AND to_broker IS NULL
           AND (expires_at IS NULL OR expires_at > {opened_at})
           AND (headers IS NULL OR headers::text NOT LIKE '%%"{VERIFIED_FROM}":%%'))
    """


# The messages of ``rows``, of the shards ``h``, if they are ``suited``
_FOUND = f"""
places AS (
    SELECT array_agg(p.shard) AS place_shards, array_agg(h.epoch) AS place_epochs,
           array_agg(h.aside) AS place_asides, array_agg(p.last) AS place_last,
           array_agg(a.batch) AS known_batches, array_agg(a.position) AS known_positions,
           array_agg(a.opened_at) AS known_moments, bool_and(a.batch IS NOT NULL) AS known
    FROM (SELECT shard, max(id) AS last FROM rows GROUP BY shard ORDER BY shard) AS p
    JOIN h ON h.shard = p.shard
    LEFT JOIN LATERAL (
        SELECT * FROM ((SELECT batch, position, opened_at FROM saf.acknowledged
         WHERE (destination, lane, shard, batch) <= (%(destination)s, '', p.shard, {LAST})
           AND (destination, lane, shard) >= (%(destination)s, '', p.shard)
         ORDER BY destination DESC, lane DESC, shard DESC, batch DESC LIMIT 1)
        {{moved}}) AS marks ORDER BY batch DESC LIMIT 1
    ) AS a ON true
), services AS (
    SELECT jsonb_object_agg(to_service, messages) AS counts
    FROM (SELECT to_service, count(*) AS messages FROM rows GROUP BY to_service) AS counted
), messages AS (
    SELECT {_ARRAYS} FROM (SELECT * FROM rows ORDER BY id) AS ordered
)
"""

# No row if the task is needed
READ = f"""
WITH rows AS MATERIALIZED (
    SELECT * FROM ({_ROWS}) AS since WHERE {IN_BATCH.format(open="%(open)s")}
), suited AS MATERIALIZED ({_suited("%(opened_at)s")}), h AS (
    SELECT * FROM unnest(%(shards)s::smallint[], %(epochs)s::bigint[], %(asides)s::timestamptz[])
        AS h (shard, epoch, aside)
), {_FOUND.format(moved="")}
SELECT counts, places.*, messages.*
FROM suited, places, services, messages
"""

# Closes the batch (``closes``), and opens the next one if there are suited messages, as long as a
# driver would open it in the same way. A division by zero undoes the whole statement if a shard has
# another owner now.
NEXT = f"""
WITH few AS MATERIALIZED (
    SELECT FROM (SELECT FROM ({_NEW_ROWS}) AS since LIMIT %(most)s + 1) AS limited
    HAVING count(*) BETWEEN 1 AND %(most)s AND %(configured)s = {FINGERPRINT}
       AND NOT EXISTS (SELECT FROM saf.backoff WHERE subscription_id = %(subscription_id)s)
       AND EXISTS (SELECT FROM saf.member WHERE member_id = %(owner)s AND NOT stopping)
       AND (SELECT senders_since FROM saf.broker) IS NULL
), rows AS MATERIALIZED (
    SELECT since.* FROM ({_NEW_ROWS}) AS since WHERE EXISTS (SELECT FROM few)
), suited AS MATERIALIZED ({_suited("now()")}), opens AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM suited) AS yes,
           set_config('synchronous_commit',
                      CASE WHEN EXISTS (SELECT FROM suited) THEN 'on' ELSE 'off' END, true)
), h AS (
    UPDATE saf.cursor c
    SET done = coalesce(c.open, c.done), open = CASE WHEN yes THEN pg_current_snapshot() END,
        batch = c.batch + yes::int, opened_at = CASE WHEN yes THEN now() ELSE c.opened_at END,
        position = 0, attempted = 0
    FROM opens, {SAME}
    AND (%(closes)s OR yes) AND %(closes)s = (c.open IS NOT NULL)
    RETURNING c.shard, c.epoch, c.set_aside_at[cardinality(c.set_aside_at)] AS aside,
              c.open::text AS open
), moved AS (
    UPDATE saf.acknowledged a
    SET batch = %(batch)s, position = p.last, opened_at = %(opened_at)s
    FROM {PLACES}
    WHERE a.destination = %(destination)s AND a.lane = '' AND a.shard = p.shard
      AND a.batch = p.batch AND a.position = p.position AND %(closes)s
    RETURNING a.shard
), {
    _FOUND.format(
        moved=f'''
        UNION ALL
        SELECT %(batch)s::bigint, m.last, %(opened_at)s
        FROM {PLACES.replace("AS p (", "AS m (")} WHERE m.shard = p.shard AND %(closes)s'''
    )
}, checked AS MATERIALIZED (
    SELECT 1 / (((SELECT count(*) FROM h) = CASE WHEN %(closes)s OR yes
                 THEN cardinality(%(shards)s::smallint[]) ELSE 0 END)
                AND (NOT %(closes)s
                     OR (SELECT count(*) FROM moved) = cardinality(%(place_shards)s)))::int AS whole
    FROM opens
)
SELECT yes AND whole = 1 AS yes, (SELECT max(open) FROM h) AS open, now() AS opened_at, counts,
       places.*, messages.*
FROM checked, opens, places, services, messages
"""


class Source:
    """A session at a source, which passes arrays on as they are."""

    def __init__(self, dsn: Dsn) -> None:
        self._connection = passing(dsn.connect(role="mark", autocommit=True))

    def ask(self, statement: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row of a statement, by column."""
        with psycopg.Cursor[Any](self._connection, row_factory=dict_row) as cursor:
            return cursor.execute(statement, params, binary=True).fetchone()

    def close(self) -> None:
        """End the session."""
        self._connection.close()


def forward(number: int, work: Work, rules: ForwardingRules) -> list[Receipt] | None:
    """Forward the batch of an item of work and close it; return None if the task is needed.

    Batches that follow soon are forwarded too, for up to `STAY_SECONDS`. ``number`` is the item's
    place in its job.
    """
    destination = rules.destinations.get(work.alone or "")
    if destination is None or not _suits(work, rules):
        return None
    address, connect = destination.broker(), destination.few_messages()
    if address is None or connect is None:
        return None
    receipts = Receipts(number)
    try:
        with (
            _session("little source", work.dsn, lambda: Source(work.dsn)) as source,
            _session("little store", address, connect) as store,
        ):
            _forward(work, rules, source, store, receipts)
    except psycopg.Error as error:
        if error.sqlstate is None and not isinstance(error, LOST):
            raise  # not from the server: a defect of this module
    except SafError:
        pass  # a task meets the same problem, and reports it
    return list(receipts) if receipts.of(None).complete else None


def _suits(work: Work, rules: ForwardingRules) -> bool:
    """Return whether the work is little and new, and no rule but a route applies."""
    return (
        work.keep
        and work.new
        and not (work.much or work.waiting or work.of_services or work.rejecting)
        and not (work.routes.routers or rules.transforms or tracing.records())
        and work.vouched_since is None
    )


def _forward(
    work: Work, rules: ForwardingRules, source: Source, store: FewMessages, receipts: Receipts
) -> None:
    batch, whole = work.batch, receipts.of(None)
    params: dict[str, Any] = {
        "source": work.source,
        "destination": store.identity,
        "configured": work.configured,
        "most": min(rules.chunk_rows, MOST),
        "most_bytes": min(rules.chunk_bytes, MOST_BYTES),
        "max_bytes": rules.max_bytes,
        "done": batch.done,
        "open": batch.open,
        "opened_at": batch.opened_at,
        "subscription_id": batch.subscription_id,
        "owner": batch.owner,
        "batch": batch.number,
        "shards": array(batch.shards),
        "epochs": array(epoch for _, epoch in batch.epochs),
        "asides": array(
            max(batch.set_aside_at.get(shard, ()), default=None) for shard in batch.shards
        ),
    }
    ends = time.monotonic() + (0 if work.among_others else STAY_SECONDS)
    found = source.ask(READ, params)
    # a batch that is left open here is a task's
    while found is not None and found["known"] and _leads(work, rules, found["counts"]):
        params |= found
        if not _stored(store, params, receipts, str(work.alone)):
            return
        found = _next(source, params, ends)
        whole.complete = whole.closed = True


def _stored(store: FewMessages, params: dict[str, Any], receipts: Receipts, name: str) -> bool:
    """Store messages, unless the destination's marks differ; return whether they are stored."""
    began, counts = perf_counter(), params["counts"]
    fail_point("mom_insert")
    if not store.store({**params, "services": list(counts)}):
        return False
    fail_point("mom_commit")
    receipt, messages = receipts.of(name), sum(counts.values())
    receipt.messages += messages
    receipt.rejecting = 0
    add_services(receipt.services, counts)
    receipts.stored(name, messages, perf_counter() - began)
    return True


def _next(source: Source, params: dict[str, Any], ends: float) -> dict[str, Any] | None:
    """Close the batch; return the next one if messages come in time, with ``params`` for it."""
    pause, given = FIRST_PAUSE_SECONDS, {**params, "closes": True}
    fail_point("mark_forwarded")
    while True:
        found = source.ask(NEXT, given)
        fail_point("mark_commit")
        if found is None or found["yes"]:
            break
        if pause > LAST_PAUSE_SECONDS or time.monotonic() + pause > ends:
            return None
        time.sleep(pause)
        pause, given["closes"] = 2 * pause, False
    params |= {"done": params["open"], "batch": params["batch"] + 1}
    return found


def _leads(work: Work, rules: ForwardingRules, services: Iterable[str]) -> bool:
    """Return whether each service's messages take one route, exactly once."""
    for service in services:
        match = work.routes.match(service, None)
        if match is None or len(match.routes) > 1:
            return False
        route = match.routes[0]
        if (route.quality or rules.qualities[route.destination]) != EXACTLY_ONCE:
            return False
    return True


S = TypeVar("S", Source, FewMessages)


@contextmanager
def _session(role: str, dsn: Dsn, connect: Callable[[], S]) -> Iterator[S]:
    """Yield a session that is kept from one batch to the next, unless the block raises."""
    session = connections.take(role, dsn, connect, lambda _: None)
    try:
        yield session
    except BaseException:
        session.close()
        raise
    connections.put(True, role, dsn, session)
