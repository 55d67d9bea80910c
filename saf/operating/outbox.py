"""The outbox for operators: messages by state, service, key and age, a page at a time.

A message is *pending* until the forwarder has completed it. Then it is *parked* or *dead* while it
is set aside, for any of its destinations, and otherwise *forwarded*. The view saf.outbox_status
shows the states of all messages together; `messages` reads no more than a page needs:

- The outbox is read shard by shard in the order of transactions, which is its index, and a page
  begins where the previous one ended. Nothing is counted. All rows that one transaction wrote to a
  shard are sorted together, however many they are.
- Parked messages and dead letters are read from their own tables, in the order in which they were
  set aside.

A filter that matches few messages may still read a whole log. So statements have a time limit, and
the error shows how to ask for less. To get a partial result early, limit the time to look: then the
outbox is searched in stretches (see `look`).

`details` and `body` return one message. `forwarded` checks that everything up to a moment has been
forwarded; schedules wait for this. Each message that was committed before the moment was created
before it. So if no message created before the moment is pending, parked or dead, all messages
committed before it have been forwarded. Messages committed later, by a transaction that began
before the moment, were not sent before it.

All functions only read. Except for `body`, they reject a broker whose cursors do not show its
progress because a backup was restored: messages would be shown in wrong states.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from saf.broker.health import refuse
from saf.database import fetch, of_broker
from saf.database.queries import Page, foreign
from saf.errors import TookTooLong, Unavailable
from saf.limits import HEADERS_READABLE
from saf.log.finding import Row
from saf.log.read import BY_INDEX
from saf.log.ring import SLOT_ROWS, SLOTS
from saf.log.shards import LAST, shard_of
from saf.setaside.dead import SHOWN
from saf.setaside.lane import SAME_LANE

Place = tuple[str, int]
"""A transaction and an id in the outbox; or "0" and the number of a message set aside."""
NUMBER = re.compile("[0-9]{1,18}")

State = Literal["pending", "forwarded", "parked", "dead"]
STATES: tuple[State, ...] = ("pending", "forwarded", "parked", "dead")

Left = Literal["pending", "parked", "dead"]
"""The states of messages that have not been forwarded."""

LEFT: tuple[Left, ...] = ("pending", "parked", "dead")

SECONDS = 10.0
"""Default time limit of a statement, in seconds."""

NO_LAST = str((1 << 64) - 1)
"""A transaction id above all others."""

GROWTH = 4
"""Maximum ratio of a stretch's width to that of the previous stretch."""
LEAST_SECONDS = 1e-4
"""Assumed minimum duration of a statement."""

SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"

TIMEOUT = "SELECT set_config('statement_timeout', %(milliseconds)s, true)"

FORWARDER = (
    "SELECT subscription_id FROM saf.subscription WHERE (log, name) = ('outbox', 'forwarder')"
)

# The forwarder's cursors, in their newest versions as in saf.log.shards
CURSORS = f"""
SELECT c.* FROM saf.broker b
CROSS JOIN LATERAL generate_series(0, b.shards - 1) AS n (shard)
CROSS JOIN LATERAL (
    SELECT * FROM saf.cursor
    WHERE (subscription_id, shard, batch) <= (({FORWARDER}), n.shard, {LAST})
    ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1) AS c
WHERE c.subscription_id = ({FORWARDER}) AND c.shard = n.shard
  AND (%(shard)s::smallint IS NULL OR n.shard = %(shard)s)
"""
COMPLETE = """
(pg_visible_in_snapshot(o.txid, c.done)
 OR c.open IS NOT NULL AND pg_visible_in_snapshot(o.txid, c.open) AND o.id <= c.position)
"""
FILTER = """
    (%(service)s::text IS NULL OR o.to_service = %(service)s)
AND (%(key)s::text IS NULL OR o.key = %(key)s)
AND (%(key_contains)s::text IS NULL OR strpos(lower(o.key), lower(%(key_contains)s)) > 0)
AND (%(since)s::timestamptz IS NULL OR o.created_at >= %(since)s)
AND (%(until)s::timestamptz IS NULL OR o.created_at < %(until)s)
"""
SHOWN_OF_MESSAGE = f"""
o.message_id, left(o.to_service, {SHOWN}) AS service, left(o.key, {SHOWN}) AS key,
left(o.message_type, {SHOWN}) AS message_type, octet_length(o.body) AS bytes, o.created_at
"""

# From each shard a page by its index; of these, the first page. For pending messages, skip those
# older than the oldest transaction that was in progress at ``done``. An `Order` completes it.
PAGE = f"""
SELECT o.id, o.txid::text || '.' || o.id AS page_end, o.complete, {SHOWN_OF_MESSAGE}
FROM ({CURSORS}) AS c CROSS JOIN LATERAL (
    SELECT o.*, {COMPLETE} AS complete FROM saf.outbox o
    WHERE o.shard = c.shard AND o.txid >= %(first)s::xid8 AND o.txid < %(before)s::xid8
      AND (o.txid, o.id) $beyond (%(txid)s::xid8, %(id)s)
      AND (%(complete)s::boolean IS NOT FALSE OR o.txid >= pg_snapshot_xmin(c.done))
      AND (%(complete)s::boolean IS NULL OR %(complete)s::boolean = {COMPLETE})
      AND {FILTER}
    ORDER BY o.txid $order, o.id $order LIMIT %(limit)s) AS o
ORDER BY o.txid $order, o.id $order LIMIT %(limit)s
"""

FOLLOWING = f"""
SELECT o.txid::text, o.created_at
FROM ({CURSORS}) AS c CROSS JOIN LATERAL (
    SELECT o.txid, o.created_at FROM saf.outbox o
    WHERE o.shard = c.shard AND o.txid $beyond= %(txid)s::xid8
      AND (%(complete)s::boolean IS NOT FALSE OR o.txid >= pg_snapshot_xmin(c.done))
    ORDER BY o.txid $order LIMIT 1) AS o
ORDER BY o.txid $order LIMIT 1
"""

# The set-aside messages among those that the cursors are past, with their destinations
SET_ASIDE = f"""
SELECT p.id, 'parked' AS state, p.destination, b.error
FROM saf.parked p LEFT JOIN saf.backoff b ON {SAME_LANE}
WHERE p.subscription_id = ({FORWARDER}) AND p.id = ANY (%(ids)s)
UNION ALL
SELECT d.id, 'dead', d.destination, d.reason || ': ' || d.error
FROM saf.dead_letter d
WHERE d.subscription_id = ({FORWARDER}) AND d.id = ANY (%(ids)s)
ORDER BY 1, 2
"""
OF_STATE = {
    "parked": f"""
SELECT o.id, o.parked_id::text AS page_end, 'parked' AS state, o.destination, b.error,
       {SHOWN_OF_MESSAGE}
FROM saf.parked o LEFT JOIN saf.backoff b ON {SAME_LANE.replace("p.", "o.")}
WHERE o.subscription_id = ({FORWARDER}) AND o.parked_id $beyond %(id)s AND {FILTER}
ORDER BY o.parked_id $order LIMIT %(limit)s
""",
    "dead": f"""
SELECT o.id, o.dead_letter_id::text AS page_end, 'dead' AS state, o.destination,
       o.reason || ': ' || o.error AS error, {SHOWN_OF_MESSAGE}
FROM saf.dead_letter o
WHERE o.subscription_id = ({FORWARDER}) AND o.dead_letter_id $beyond %(id)s AND {FILTER}
ORDER BY o.dead_letter_id $order LIMIT %(limit)s
""",
}

# An id determines its slot. A message without a key is in the shard of its message_id.
ONE = f"""
SELECT o.id, o.shard, {COMPLETE} AS complete, o.from_service, o.to_broker::text AS to_broker,
       o.conversation_id::text AS conversation_id, o.sequence,
       CASE WHEN {HEADERS_READABLE} THEN o.headers::text END AS headers,
       o.deliver_at, o.expires_at, o.txid::text AS txid, c.batch, {SHOWN_OF_MESSAGE}
FROM saf.outbox o JOIN ({CURSORS}) AS c ON c.shard = o.shard
WHERE $which ORDER BY o.id LIMIT 1
"""
BY_ID = f"o.id / {SLOT_ROWS} %% {SLOTS} = %(slot)s AND o.id = %(id)s"
BY_MESSAGE_ID = "o.message_id = %(message_id)s"
BY_ROW = "o.shard = %(shard)s::smallint AND o.txid = %(txid)s::xid8 AND o.id = %(id)s"
IN_SHARD = " AND o.shard = %(shard)s::smallint"
BODY = f"SELECT body FROM saf.outbox o WHERE {BY_ID}"

SHARDS = "SELECT shards FROM saf.broker"
ANY_MESSAGE = "SELECT EXISTS (SELECT FROM saf.outbox)"

GREATEST_ID = 10**18 - 1
"""An id above all others that a place can name."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of a list: by transaction and id, or by the number of a message set aside."""

    beyond: str
    order: str
    step: int
    """1 if transaction ids rise from row to row, else -1."""
    begin: Place
    """The place that all rows are beyond."""

    def sql(self, statement: str) -> str:
        """Return a statement that reads in this order."""
        return statement.replace("$beyond", self.beyond).replace("$order", self.order)

    def stretch(self, txid: str, end: str) -> dict[str, str]:
        """Return the bounds of the transactions from ``txid`` to before ``end``, in this order.

        >>> OLDEST_FIRST.stretch("7", "9"), NEWEST_FIRST.stretch("7", "5")
        ({'first': '7', 'before': '9'}, {'first': '6', 'before': '8'})
        """
        if self.step > 0:
            return {"first": txid, "before": end}
        return {"first": str(max(0, int(end) + 1)), "before": str(min(int(NO_LAST), int(txid) + 1))}


OLDEST_FIRST = Order(beyond=">", order="ASC", step=1, begin=("0", 0))
NEWEST_FIRST = Order(beyond="<", order="DESC", step=-1, begin=(NO_LAST, GREATEST_ID))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which messages of an outbox to list; None means any."""

    state: State | None = None
    service: str | None = None
    key: str | None = None
    key_contains: str | None = None
    """A part of the key, case-insensitive; unlike ``key``, it does not give the shard."""
    since: datetime | None = None
    """Created at this time or later."""
    until: datetime | None = None
    """Created before this time."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message of an outbox, without its body."""

    id: int
    message_id: UUID
    state: State
    service: str
    key: str | None
    message_type: str | None
    bytes: int
    created_at: datetime
    destination: str | None = None
    """The destination that a set-aside message waits for, if any."""
    error: str | None = None
    """The reason why a message is set aside."""

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        ids = {"message_id": str(self.message_id), "created_at": self.created_at.isoformat()}
        return asdict(self) | ids


@dataclass(frozen=True, kw_only=True)
class SentPage(Page[Sent]):
    """A page of an outbox. It may be shorter than its limit, and the last page may be empty."""

    before: datetime | None = None
    """About when the first unsearched messages were created, if the time to look ended first.

    The messages on the other side of that time were searched: the older ones, or the newer ones
    if those come first."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """All of one message except its body."""

    message: Sent
    shard: int
    from_service: str | None
    to_broker: str | None
    conversation_id: str | None
    sequence: int | None
    headers: str | None
    """As JSON text; None also if they are too large to be read."""
    deliver_at: datetime | None
    expires_at: datetime | None
    batch: int
    """The forwarder's open or last batch of this shard."""
    row: Row
    set_aside: tuple[dict[str, Any], ...]
    """Where the message is set aside, and why: a topic's message may be at several places."""

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict for JSON."""
        plain = {n: value for n, value in asdict(self).items() if n not in ("message", "row")}
        for name in ("deliver_at", "expires_at"):
            plain[name] = plain[name] and plain[name].isoformat()
        if self.headers is not None:
            with suppress(ValueError, RecursionError):  # as text if Python cannot decode them
                plain["headers"] = json.loads(self.headers)
        return self.message.as_dict() | plain | {"set_aside": list(self.set_aside)}


@dataclass(frozen=True, kw_only=True)
class Forwarded:
    """The rest of an outbox, as one message of each state."""

    left: dict[Left, Sent]

    @property
    def everything(self) -> bool:
        """True if nothing is left."""
        return not self.left

    @property
    def waits(self) -> bool:
        """True if the forwarder will still handle a message, with or without an operator's help.

        Only operators decide about dead letters.
        """
        return any(state != "dead" for state in self.left)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "forwarded": self.everything,
            "waits": self.waits,
            "left": {state: left.as_dict() for state, left in self.left.items()},
        }


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The result of a search, and where it stopped."""

    rows: list[dict[str, Any]]
    place: str | None = None
    """The transaction to continue with; None after the last one, or if the page is full."""
    before: datetime | None = None
    """About when that transaction's messages were sent."""


def place_at(place: str | None, state: State | None) -> Place | None:
    """Parse the end of the previous page into the start of the next, for `messages`.

    >>> place_at("812.40", "pending"), place_at("7", "dead")
    (('812', 40), ('0', 7))

    Raises:
        UsageError: no page of messages in this state ends there.
    """
    if place is None:
        return None
    txid, dot, number = ("0", ".", place) if state in OF_STATE else place.partition(".")
    if not (dot and NUMBER.fullmatch(txid) and NUMBER.fullmatch(number)):
        hint = "the place at the end of the page before, with the same --state"
        raise foreign(place, "these messages", said=hint)
    return txid, int(number)


def messages(
    connection: psycopg.Connection[Any],
    wanted: Wanted,
    *,
    after: Place | None = None,
    limit: int = 100,
    seconds: float = SECONDS,
    look_seconds: float | None = None,
    newest_first: bool = False,
) -> SentPage:
    """Return a page of an outbox, the oldest transactions first. Reads only.

    Args:
        connection: In autocommit.
        wanted: Filter.
        after: Start of the page, see `place_at`; None for the first page.
        limit: Maximum number of messages.
        seconds: Time limit of a statement.
        look_seconds: Time after which the page ends with the messages found so far; None: fill the
            page, unless it is the last one.
        newest_first: List the newest transactions first. A place is valid for one order only.

    Raises:
        TookTooLong: a statement takes longer.
        Restored: the cursors do not show which messages are pending.
    """
    refuse(connection)
    order = NEWEST_FIRST if newest_first else OLDEST_FIRST
    txid, number = order.begin if after is None else after
    params: dict[str, Any] = {
        **asdict(wanted),
        "txid": txid,
        "id": number,
        "limit": limit,
        "shard": None,
        "complete": {"pending": False, "forwarded": True}.get(wanted.state or ""),
    }
    with _bounded(connection, seconds):
        if wanted.key is not None:
            (shards,) = of_broker(connection, SHARDS)
            params["shard"] = shard_of(wanted.key, shards)
        if wanted.state in OF_STATE:
            statement = order.sql(OF_STATE[wanted.state])
            reading = Looked(rows=_rows(connection, statement, params))
            found = tuple(
                Sent(**{k: v for k, v in row.items() if k != "page_end"}) for row in reading.rows
            )
        else:
            reading = _looked(connection, params, look_seconds, order)
            found = tuple(
                sent
                for sent in _with_state(connection, reading.rows)
                if wanted.state is None or sent.state == wanted.state
            )
    end = reading.rows[-1]["page_end"] if len(reading.rows) == limit else None
    if reading.place is not None:
        end = f"{reading.place}.{order.begin[1]}"  # before all ids of the transaction
    return SentPage(shown=found, next=end, before=reading.before)


def _looked(
    connection: psycopg.Connection[Any],
    params: dict[str, Any],
    seconds: float | None,
    order: Order,
) -> Looked:
    page, next_one = order.sql(PAGE), order.sql(FOLLOWING)
    if seconds is None:
        end = NO_LAST if order.step > 0 else "-1"
        return Looked(rows=_rows(connection, page, params | order.stretch(params["txid"], end)))

    def following(txid: str) -> tuple[str, datetime] | None:
        if int(txid) < 0:
            return None
        return next(iter(fetch(connection, next_one, params | {"txid": txid})), None)

    def within(first: str, after: str, limit: int) -> list[dict[str, Any]]:
        more = {"txid": first, "limit": limit, **order.stretch(first, after)}
        if first != params["txid"]:
            more["id"] = order.begin[1]  # the previous page ended in another transaction
        return _rows(connection, page, params | more)

    return look(
        following,
        within,
        txid=params["txid"],
        limit=params["limit"],
        seconds=seconds,
        step=order.step,
    )


def look(
    following: Callable[[str], tuple[str, datetime] | None],
    within: Callable[[str, str, int], list[dict[str, Any]]],
    *,
    txid: str,
    limit: int,
    seconds: float,
    step: int = 1,
) -> Looked:
    """Search for a page of messages that few rows match, within a time limit.

    The outbox is read in the order of transactions. Each statement reads a stretch of transactions:
    the first stretch is one transaction, and each later one is up to `GROWTH` times as wide, as
    long as time is left. At least one stretch is read. So a page of messages that lie close
    together costs little, a page of rare messages reports how far the search came, and neither
    depends on the length of the log. All rows of a transaction are in one stretch.

    Args:
        following: Returns the first transaction, at or after the given one, that has messages, and
            when the first of these was created.
        within: Returns the messages of the transactions from the first one up to, but not
            including, the second one; at most the given number.
        txid: The transaction to begin with.
        limit: Maximum number of messages.
        seconds: Time after which no new stretch begins.
        step: 1 to read in the order of transactions, -1 to read in the opposite order.
    """
    until = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    width = 0
    while (found := following(txid)) is not None:
        txid, sent_at = found
        now = time.monotonic()
        if width and now >= until:
            return Looked(rows=rows, place=txid, before=sent_at)
        width = width or 1
        after = str(int(txid) + step * width)
        rows += within(txid, after, limit - len(rows))
        if len(rows) == limit:
            break
        done = time.monotonic()
        txid, width = after, wider(width, done - now, until - done)
    return Looked(rows=rows)


def wider(width: int, took: float, left: float) -> int:
    """Return the size of the next stretch, in transactions, from the duration of the last one.

    >>> wider(16, took=0.001, left=0.08), wider(1000, took=0.02, left=0.03), wider(8, 0.5, -0.1)
    (64, 1500, 1)
    """
    in_time = int(width * left / max(took, LEAST_SECONDS))
    return max(1, min(GROWTH * width, in_time))


def has_messages(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the outbox has any message."""
    return bool(fetch(connection, ANY_MESSAGE)[0][0])


def details(
    connection: psycopg.Connection[Any],
    which: int | UUID | Row,
    *,
    key: str | None = None,
    seconds: float = SECONDS,
) -> Details | None:
    """Return one message of an outbox by its id, message_id or row; None if it does not exist.

    An id is found in its slot; a message_id in its shard if the message has no key, or if ``key``
    is given. Otherwise the whole log is read.

    Raises:
        TookTooLong: a statement takes longer.
        Restored: the cursors do not show whether the message is pending.
    """
    refuse(connection)
    params: dict[str, Any] = {"shard": None}
    with _bounded(connection, seconds):
        if isinstance(which, Row):
            rows = _rows(connection, ONE.replace("$which", BY_ROW), asdict(which))
        elif isinstance(which, int):
            params |= {"slot": which // SLOT_ROWS % SLOTS, "id": which}
            rows = _rows(connection, ONE.replace("$which", BY_ID), params)
        else:
            (shards,) = of_broker(connection, SHARDS)
            params |= {"message_id": which, "shard": shard_of(key or str(which), shards)}
            rows = _rows(connection, ONE.replace("$which", BY_MESSAGE_ID + IN_SHARD), params)
            if not rows and key is None:
                params["shard"] = None
                rows = _rows(connection, ONE.replace("$which", BY_MESSAGE_ID), params)
        if not rows:
            return None
        (row,) = rows
        (message,) = _with_state(connection, rows)
        aside = _rows(connection, SET_ASIDE, {"ids": [row["id"]]}) if row["complete"] else []
    names = (
        *("shard", "from_service", "to_broker", "conversation_id", "sequence", "headers"),
        *("deliver_at", "expires_at", "batch"),
    )
    return Details(
        message=message,
        row=Row(id=row["id"], shard=row["shard"], txid=row["txid"]),
        set_aside=tuple({k: v for k, v in state.items() if k != "id"} for state in aside),
        **{name: row[name] for name in names},
    )


def body(connection: psycopg.Connection[Any], id_: int) -> bytes | None:
    """Return the body of a message by its id; None if the message does not exist."""
    found = fetch(connection, BODY, {"slot": id_ // SLOT_ROWS % SLOTS, "id": id_})
    return bytes(found[0][0]) if found else None


def forwarded(
    connection: psycopg.Connection[Any], wanted: Wanted, *, seconds: float = SECONDS
) -> Forwarded:
    """Return which messages an outbox has not forwarded, by state. Reads one snapshot.

    The search stops at the first message of each state, so it reads little while messages are
    left. It reads pending messages that are younger than wanted, even if they are many.

    Raises:
        Unavailable: a statement takes longer than ``seconds``. Try again later.
        Restored: the cursors do not show which messages are pending.
    """
    left: dict[Left, Sent] = {}
    with connection.transaction():
        # in one snapshot, a message that changes its state is in one of the states
        connection.execute(SNAPSHOT)
        for state in LEFT:
            try:
                page = messages(connection, replace(wanted, state=state), limit=1, seconds=seconds)
            except TookTooLong:
                raise Unavailable(
                    "the answer",
                    f"it took longer than {seconds:g} s to look for {state} messages, perhaps "
                    "because many younger ones are pending: ask again later, or add --timeout "
                    "with more seconds",
                ) from None
            for lane in page.shown:
                left[state] = lane
    return Forwarded(left=left)


def _with_state(
    connection: psycopg.Connection[Any], rows: Sequence[dict[str, Any]]
) -> Iterator[Sent]:
    """Yield messages of the outbox with their states; cursors only show which are complete."""
    ids = [row["id"] for row in rows if row["complete"]]
    aside: dict[int, dict[str, Any]] = {}
    for state in _rows(connection, SET_ASIDE, {"ids": ids}) if ids else []:
        aside.setdefault(state["id"], state)
    for row in rows:
        names = ("id", "message_id", "service", "key", "message_type", "bytes", "created_at")
        known = {name: row[name] for name in names}
        if row["id"] in aside:
            yield Sent(**known | aside[row["id"]])
        else:
            yield Sent(**known, state="forwarded" if row["complete"] else "pending")


@contextmanager
def _bounded(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Run a block in a transaction with a time limit, in seconds, for each statement."""
    try:
        with connection.transaction():
            connection.execute("SET TRANSACTION READ ONLY")
            connection.execute(BY_INDEX)
            connection.execute(TIMEOUT, {"milliseconds": str(max(1, round(seconds * 1000)))})
            yield
    except psycopg.errors.QueryCanceled:
        raise TookTooLong(
            f"it took longer than {seconds:g} s, because few messages of this outbox match: "
            "add the key (--key), which gives the shard; or a state, or the id; or add "
            "--timeout with more seconds"
        ) from None


def _rows(
    connection: psycopg.Connection[Any], query: str, params: dict[str, Any]
) -> list[dict[str, Any]]:
    with psycopg.Cursor[Any](connection, row_factory=dict_row) as cursor:
        return cursor.execute(query, params).fetchall()
