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
from contextlib import AbstractContextManager, contextmanager, suppress
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
from saf.log.cursor import RELAXED
from saf.log.read import IN_BATCH, since_shown
from saf.log.shards import LAST
from saf.message import VERIFIED_FROM
from saf.routing.matching import EXACTLY_ONCE
from saf.routing.routes import FINGERPRINT
from saf.telemetry import tracing

MOST, MOST_BYTES = 2000, 4 << 20
"""Most messages of a batch, and the largest total size of their bodies and headers, in bytes."""

SURE_SECONDS = 5.0
"""Time for which batches follow each other without a search, in seconds."""

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
    SELECT jsonb_agg(p.shard) AS busy,
           array_agg(p.shard) AS place_shards, array_agg(h.epoch) AS place_epochs,
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

# The shards as the last batch left them
_KNOWN = """
unnest(%(shards)s::smallint[], %(epochs)s::bigint[], %(batches)s::bigint[], %(dones)s::text[])
    AS k (shard, epoch, batch, done)
"""
_AS_KNOWN = """
c.subscription_id = %(subscription_id)s AND c.shard = k.shard
AND c.owner = %(owner)s AND c.epoch = k.epoch AND c.batch = k.batch
"""

# No row if the task is needed
READ = f"""
WITH rows AS MATERIALIZED (
    SELECT * FROM ({_ROWS}) AS since WHERE {IN_BATCH.format(open="%(open)s")}
), suited AS MATERIALIZED ({_suited("%(opened_at)s")}), h AS (
    SELECT * FROM unnest(%(shards)s::smallint[], %(epochs)s::bigint[], %(asides)s::timestamptz[])
        AS h (shard, epoch, aside)
), {_FOUND.format(moved="")}
SELECT true AS yes, %(batch)s::bigint AS batch, %(open)s::text AS open,
       %(opened_at)s::timestamptz AS opened_at, counts, places.*, messages.*
FROM suited, places, services, messages
"""

# Closes the batch, unless it is closed already (``closes``), and opens the next one (``opens``) if
# there are suited messages and a search would open it in the same way. Only cursors of shards with
# messages are written: another shard's `done` may stay behind, since the batches after it had no
# rows of the shard. A division by zero undoes it all if a shard has another owner now, or its
# cursor was moved.
NEXT = f"""
WITH ruled AS MATERIALIZED (
    SELECT WHERE %(opens)s AND %(configured)s = {FINGERPRINT}
       AND NOT EXISTS (SELECT FROM saf.backoff WHERE subscription_id = %(subscription_id)s)
       AND EXISTS (SELECT FROM saf.member WHERE member_id = %(owner)s AND NOT stopping)
       AND (SELECT senders_since FROM saf.broker) IS NULL
), rows AS MATERIALIZED (
    SELECT since.* FROM ({_NEW_ROWS}) AS since WHERE EXISTS (SELECT FROM ruled)
    LIMIT %(most)s + 1
), suited AS MATERIALIZED ({_suited("now()")}), opens AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM suited) AS yes,
           set_config('synchronous_commit',
                      CASE WHEN EXISTS (SELECT FROM suited) THEN 'on' ELSE 'off' END, true)
), changes AS MATERIALIZED (
    SELECT * FROM (
        SELECT k.*, %(closes)s AND k.shard = ANY (%(in_hand)s::smallint[]) AS closes,
               yes AND k.shard = ANY (ARRAY(SELECT DISTINCT shard FROM rows)) AS opens
        FROM opens, {_KNOWN}
    ) AS known WHERE closes OR opens
), h AS (
    UPDATE saf.cursor c
    SET done = coalesce(c.open, %(open)s::pg_snapshot),
        open = CASE WHEN k.opens THEN pg_current_snapshot() END,
        batch = CASE WHEN k.opens THEN %(batch)s + 1 ELSE c.batch END,
        opened_at = CASE WHEN k.opens THEN now() ELSE c.opened_at END,
        position = 0, attempted = 0
    FROM changes AS k
    WHERE {_AS_KNOWN} AND k.closes = (c.open IS NOT NULL) AND (k.closes OR c.done::text = k.done)
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
    SELECT 1 / ((SELECT count(*) FROM h) = (SELECT count(*) FROM changes)
                AND (NOT %(closes)s
                     OR (SELECT count(*) FROM moved) = cardinality(%(place_shards)s)))::int AS whole
)
SELECT yes AND whole = 1 AS yes,
       EXISTS (SELECT FROM ruled) AND NOT EXISTS (SELECT FROM rows) AS nothing,
       %(batch)s::bigint + yes::int AS batch,
       (SELECT max(open) FROM h) AS open, now() AS opened_at, counts, places.*, messages.*
FROM checked, opens, places, services, messages
"""

# Brings the cursors that stayed behind to the last batch's end, so that a search finds one batch
LEVEL = f"""
UPDATE saf.cursor c SET done = CAST(%(open)s::text AS pg_snapshot)
FROM {RELAXED}, {_KNOWN}
WHERE {_AS_KNOWN} AND c.open IS NULL AND c.done::text = k.done AND k.done <> %(open)s::text
"""


class Source:
    """A session at a source, which passes arrays on as they are."""

    def __init__(self, dsn: Dsn) -> None:
        self._connection = passing(dsn.connect(role="mark", autocommit=True))

    def ask(self, statement: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row of a statement, by column."""
        with psycopg.Cursor[Any](self._connection, row_factory=dict_row) as cursor:
            return cursor.execute(statement, params, binary=True).fetchone()

    def write(self, statement: str, params: Mapping[str, Any]) -> None:
        """Execute a statement without a result."""
        self._connection.execute(statement, params)

    def close(self) -> None:
        """End the session."""
        self._connection.close()


S = TypeVar("S", Source, FewMessages)


class Chain:
    """Batches of the same shards that follow each other, without a search in between."""

    def __init__(self, work: Work, rules: ForwardingRules) -> None:
        self.work = work
        self.params = _params(work, rules)
        self._batches = dict.fromkeys(work.batch.shards, work.batch.number)
        self._dones = dict.fromkeys(work.batch.shards, work.batch.done)
        self._in_hand = [*work.batch.shards]

    def opened(self, found: Mapping[str, Any]) -> None:
        """Note the next batch, which has only the shards with messages."""
        self._dones |= dict.fromkeys(found["busy"], self.params["open"])
        self._batches |= dict.fromkeys(found["busy"], found["batch"])
        self._in_hand = found["busy"]
        self.params |= found

    def closed(self) -> None:
        """Note that the batch is closed."""
        self._dones |= dict.fromkeys(self._in_hand, self.params["open"])
        self._in_hand = []

    @property
    def known(self) -> dict[str, Any]:
        """The parameters of a statement that compares the cursors with what is known of them."""
        return {
            **self.params,
            "in_hand": array(self._in_hand),
            "batches": array(self._batches.values()),
            "dones": array(self._dones.values()),
        }


class Little:
    """Forwards the little work of one source, in the thread that finds it.

    ``keep``: connections are kept for the next batch, in a loop.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._chain: Chain | None = None
        """The last batches; a search ends it."""
        self._until = 0.0

    def end(self) -> None:
        """End the chain of batches before a search; the search finds its shards at one place.

        A chain that ends otherwise costs the next search some time.
        """
        chain, self._chain = self._chain, None
        if chain is not None:
            with (
                suppress(psycopg.Error, SafError),
                self._at_source(chain.work.dsn) as source,
            ):
                source.write(LEVEL, chain.known)

    def forward(self, work: Work, rules: ForwardingRules, seconds: float) -> list[Receipt] | None:
        """Forward the batch of an item of work and close it; return None if the task is needed.

        Batches that follow at once are forwarded too, for up to ``seconds``.
        """
        if not _suits(work, rules):
            return None
        self._until = time.monotonic() + SURE_SECONDS
        return self._forwarded(Chain(work, rules), rules, READ, seconds)

    def follow(self, rules: ForwardingRules, seconds: float) -> tuple[Work, list[Receipt]] | None:
        """Open the batch after the last one, and forward it as `forward` does.

        Return no receipts if there are no messages, and None if a search must find out what to do;
        there is one every `SURE_SECONDS`.
        """
        if self._chain is None:
            return None
        chain, receipts = self._chain, None
        if time.monotonic() < self._until and not tracing.records():
            receipts = self._forwarded(chain, rules, NEXT, seconds)
        if receipts is None:
            self.end()
            return None
        return chain.work, receipts

    def _forwarded(
        self, chain: Chain, rules: ForwardingRules, first: str, seconds: float
    ) -> list[Receipt] | None:
        work = chain.work
        destination = rules.destinations.get(work.alone or "")
        if destination is None or destination.is_limited:
            return None
        address, connect = destination.broker(), destination.few_messages()
        if address is None or connect is None:
            return None
        receipts, ends = Receipts(0), time.monotonic() + seconds
        whole, follows, nothing = receipts.of(None), False, False
        try:
            with (
                self._at_source(work.dsn) as source,
                self._session("little store", address, connect) as store,
            ):
                chain.params["destination"] = store.identity
                found = source.ask(first, {**chain.known, "closes": False, "opens": True})
                # a batch that is left open here is a task's
                while found is not None and found["yes"]:
                    if first is READ:
                        chain.params |= found
                    else:
                        chain.opened(found)
                    if not (found["known"] and _leads(work, rules, found["counts"])):
                        break
                    if not _stored(store, chain.params, receipts, str(work.alone)):
                        break
                    opens = time.monotonic() < ends
                    fail_point("mark_forwarded")
                    first = NEXT
                    found = source.ask(first, {**chain.known, "closes": True, "opens": opens})
                    fail_point("mark_commit")
                    chain.closed()
                    self._chain, whole.complete, whole.closed = chain, True, True
                else:
                    follows, nothing = True, found is not None and found["nothing"]
        except psycopg.Error as error:
            if error.sqlstate is None and not isinstance(error, LOST):
                raise  # not from the server: a defect of this module
        except SafError:
            pass  # a task meets the same problem, and reports it
        if not follows:
            self._until = 0.0
        return list(receipts) if whole.complete else [] if nothing else None

    def _at_source(self, dsn: Dsn) -> AbstractContextManager[Source]:
        return self._session("little source", dsn, lambda: Source(dsn))

    @contextmanager
    def _session(self, role: str, dsn: Dsn, connect: Callable[[], S]) -> Iterator[S]:
        """Yield a session; close it if the block raises."""
        session = connections.take(role, dsn, connect, lambda _: None)
        try:
            yield session
        except BaseException:
            session.close()
            raise
        connections.put(self._keep, role, dsn, session)


def _suits(work: Work, rules: ForwardingRules) -> bool:
    """Return whether the work is little and new, and no rule but a route applies."""
    return (
        0 < work.new <= min(rules.chunk_rows, MOST)
        and not (work.much or work.waiting or work.of_services or work.rejecting)
        and not (work.routes.routers or rules.transforms or tracing.records())
        and work.vouched_since is None
    )


def _params(work: Work, rules: ForwardingRules) -> dict[str, Any]:
    batch = work.batch
    return {
        "source": work.source,
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
