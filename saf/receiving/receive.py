"""Receiving: messages in order, exactly once, in the consumer's own transaction.

    with saf.receive(engine, "billing", max_messages=100, wait_seconds=5) as delivery:
        for message in delivery:
            delivery.connection.execute(…)

``engine`` is one of the values that `saf.receiving.link` lists.

The position commits together with the block's writes on ``delivery.connection``: both or neither,
whatever fails. An exception in the block rolls everything back and is raised. The messages are then
delivered again, the first alone, until the message at fault is a dead letter (see
`saf.receiving.retries`).

Any number of receivers, in any number of processes, share the work: a key is in one hand at a time,
and in order. Work in the block runs in READ COMMITTED. Other databases, files and calls to other
systems are not part of the transaction, so such work happens at least once.

*Settings.* saf's statements run as saf's role, whatever a handler has set. A handler shares saf's
session and transaction. It may take a role (``SET LOCAL ROLE tenant``), or set search_path or a
timeout. The setting lasts until the transaction ends; without LOCAL, until the session ends. So a
receiver reads the settings at the beginning, and restores them after the handlers and before its
own statements, for the session as well (`restoring`). The restore shares a round trip with a
statement that is sent anyway.

Other settings, such as synchronous_commit, belong to the handlers. Handlers of one delivery share
its transaction: a setting made by one applies to the later ones too.

*Idle receivers.* A receiver that finds nothing polls less and less often, or listens. `Quiet` asks,
by one statement, whether anything has changed since it found nothing, and so avoids most searches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from threading import Event
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import psycopg
from psycopg import sql

from saf.broker import health, services
from saf.database import check_schema, fetch, of_broker, unavailable_if_lost
from saf.database.dsn import is_pooled
from saf.errors import UsageError
from saf.failpoints import fail_point
from saf.log import shards
from saf.log.pauses import Pauses
from saf.log.shards import ALL_SHARDS, LAST, failed
from saf.receiving import claim, reading, retries
from saf.receiving.claim import PLAN_ONCE
from saf.receiving.delivery import Delivery
from saf.receiving.hand import Hand, Reader
from saf.receiving.link import (
    UNLISTEN,
    Link,
    await_notification,
    connected,
    forget_notifications,
    start_listening,
)
from saf.receiving.prefetch import Prefetch
from saf.receiving.retries import HANDLED, Policy, params_of
from saf.receiving.summary import SetAside
from saf.receiving.trying import NotReceived, Trying, receiving
from saf.setaside.lane import Kind
from saf.setaside.parking import BLOCKED
from saf.signing.keys import Key
from saf.signing.signer import Signer
from saf.signing.verifier import Trust, Verifier
from saf.tracing import spans

if TYPE_CHECKING:
    from saf.receiving.link import Engine

LONGEST_PAUSE_SECONDS = 0.5
"""Longest pause between polls that find nothing, in seconds; see `saf.log.pauses`."""

LISTENING_PAUSE_SECONDS = 5.0
"""Longest pause of a listening receiver, which must still find messages that become due."""

LOOK_SECONDS = 0.25
"""Interval at which a busy receiver checks for messages to try alone, in seconds."""

SURE_SECONDS = 5.0
"""Time for which a receiver relies on an unchanged answer, in seconds."""

BROKER = "SELECT broker_id FROM saf.broker"

SETTINGS = ("role", "search_path", "row_security", "statement_timeout", "lock_timeout")
"""Settings that decide whether saf's statements find its tables and may use them."""

ASK_SETTINGS = "SELECT " + ", ".join(f"current_setting('{name}')" for name in SETTINGS)
ALWAYS = {"array_nulls": "on"}
"""Setting that saf's parameters depend on."""

SNAPSHOT = "SELECT pg_current_snapshot()::text"

SHARDS = f"ARRAY(SELECT s::smallint FROM {ALL_SHARDS} AS s)"
ASK_WAITING = f"""
SELECT pg_current_snapshot()::text, free.shards, free.epochs,
    EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard IS NOT NULL
              AND b.next_attempt_at < '{BLOCKED}')
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}'),
    free.left_behind
 OR EXISTS (SELECT FROM saf.inbox i
            WHERE i.shard = ANY ({SHARDS}) AND i.txid >= pg_snapshot_xmax(%(seen)s::pg_snapshot))
 OR EXISTS (SELECT FROM saf.inbox i
            WHERE i.shard = ANY ({SHARDS})
              AND i.txid = ANY (ARRAY(SELECT pg_snapshot_xip(%(seen)s::pg_snapshot))))
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.shard IS NOT NULL
              AND b.next_attempt_at <= now())
 OR EXISTS (SELECT FROM saf.backoff b
            WHERE b.subscription_id = %(subscription_id)s AND b.destination = ''
              AND b.kind = '{Kind.LATER}' AND b.next_attempt_at <= now())
 OR EXISTS ({HANDLED})
FROM (
    SELECT count(*) AS shards, coalesce(sum(epoch), 0) AS epochs,
           coalesce(bool_or(open IS NOT NULL OR allowance IS NOT NULL OR {failed("touched")}),
                    false) AS left_behind
    FROM {ALL_SHARDS} AS s (shard) CROSS JOIN LATERAL (
        SELECT *, xmax AS touched FROM saf.cursor
        WHERE (subscription_id, shard, batch) <= (%(subscription_id)s, s.shard, {LAST})
        ORDER BY subscription_id DESC, shard DESC, batch DESC LIMIT 1
    ) AS c
    WHERE c.subscription_id = %(subscription_id)s AND c.shard = s.shard
      AND owner IS NOT DISTINCT FROM %(owner)s
) AS free
"""

_met: WeakSet[psycopg.Connection[Any]] = WeakSet()
"""Connections whose inbox was found healthy at first contact."""


@contextmanager
def receive(
    engine: Engine,
    subscription: str,
    *,
    max_messages: int = 100,
    wait_seconds: float = 0.0,
    policy: Policy | None = None,
    require_signed: bool = False,
    keys: Mapping[str, Key] | None = None,
    signer: Signer | None = None,
) -> Iterator[Delivery[Any]]:
    """Receive the available messages of a subscription, up to ``max_messages``.

    Args:
        engine: where the inbox and the consumer's tables are; see `saf.receiving.link`.
        subscription: the subscription to receive from; each service has a subscription of its own
            name.
        max_messages: the most messages in one delivery, which is one transaction.
        wait_seconds: how long to wait for the first message; after that, the delivery is empty.
        policy: how to treat messages whose handling fails.
        require_signed: hand out only messages that are signed with one of the ``keys``.
        keys: the keys that senders sign with, by their names, or a `Keys`; see docs/security.md.
        signer: signs what the receiver sends on the messages' dialogs.

    Raises:
        ConfigurationError: the subscription does not exist.
        UsageError: processors read this subscription, or keys to verify with are missing.
        SchemaMissing, SchemaMismatch, Restored: the database cannot be read from.
        Unavailable: the database does not answer, or one of saf's tables stays locked for too long.
    """
    with (
        one_delivery(
            connected(engine),
            subscription,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            policy=policy,
            trust=Trust.of(keys, required=require_signed),
            signer=signer,
        ) as delivery,
        spans.receiving(subscription, delivery),
    ):
        yield delivery


@contextmanager
def one_delivery(
    connecting: AbstractContextManager[Link],
    subscription: str,
    *,
    max_messages: int,
    wait_seconds: float,
    policy: Policy | None,
    trust: Trust | None,
    signer: Signer | None,
    stopping: Event | None = None,
) -> Iterator[Delivery[Any]]:
    """Yield one delivery, on a link opened for it; an empty one on a stop. See `receive`."""
    if max_messages < 1:
        raise UsageError(f"max_messages: {max_messages} is less than 1")
    with connecting as link:
        receiver = Receiver(
            link,
            subscription,
            policy or Policy(),
            max_messages,
            stays=False,
            trust=trust,
            signer=signer,
        )
        with receiver.delivery(wait_seconds, stopping) as delivery:
            yield delivery
        fail_point("receive_committed")


class Step(Enum):
    """What a receiver does next."""

    TAKE = "take the next messages"
    TRY = "try a message alone that failed before"
    WAIT = "wait for messages"


class Search:
    """Which step comes next in the search for the messages of one delivery.

    Half of the searches begin with messages that failed before, so neither kind delays the other. A
    search that has found nothing to try does not try again before it has waited.

    >>> search = Search(tries_first=False)
    >>> search.tries(troubled=True), search.step.name
    (False, 'TAKE')
    >>> search.took(None, more=False, troubled=True); search.step.name
    'TRY'
    >>> search.tried(found=False); search.step.name, search.tries(troubled=True)
    ('TAKE', False)
    >>> search.took(None, more=False, troubled=True); search.step.name
    'WAIT'
    >>> search.waited(); search.tries(troubled=True), search.step.name
    (True, 'TRY')
    """

    def __init__(self, *, tries_first: bool) -> None:
        self.step = Step.TAKE
        self._tries_first = tries_first
        self._fruitless = False

    def tries(self, *, troubled: bool) -> bool:
        """Return whether to try a message instead of taking any. ``troubled``: some have failed."""
        tries = troubled and self._tries_first and not self._fruitless
        self.step = Step.TRY if tries else Step.TAKE
        return tries

    def took(self, delivery: Delivery[Any] | None, *, more: bool, troubled: bool) -> None:
        """Note what was taken. ``more``: the same shards may have more messages."""
        if delivery is not None or more:  # an empty delivery: all of its messages were set aside
            self.step = Step.TAKE
        elif troubled and not self._fruitless:
            self._tries_first, self.step = True, Step.TRY
        else:
            self.step = Step.WAIT

    def tried(self, *, found: bool) -> None:
        """Note whether there was a message to try."""
        self._fruitless, self.step = not found, Step.TAKE

    def waited(self) -> None:
        """Note that messages may have arrived."""
        self._fruitless, self.step = False, Step.TAKE

    def failed(self) -> None:
        """Note that a step was rolled back: the next one looks for messages to try."""
        self._tries_first, self.step = True, Step.TAKE


class Receiver(Trying):
    """Yields deliveries on one connection, one after the other.

    Raises the errors of `receive`.
    """

    def __init__(
        self,
        link: Link,
        subscription: str,
        policy: Policy,
        max_messages: int,
        *,
        beside_members: bool = False,
        listen: bool = False,
        stays: bool = True,
        trust: Trust | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.link = link
        self.listens = listen
        self.policy = policy
        self.max_messages = max_messages
        self._pauses = Pauses()
        self._unseen = SetAside()
        self._prefetch = Prefetch(max_messages)
        if not stays:
            self._prefetch.stop()
        self._quiet = Quiet()
        self._look_at = 0.0
        """Time of the next check for messages to try alone."""
        with unavailable_if_lost(f"database {link.raw.info.dbname!r}"), link.transaction():
            pooled = is_pooled(link.raw)
            if pooled:
                link.raw.prepare_threshold = None
                self._prefetch.stop()
            check_schema(link.raw)
            first = link.raw not in _met  # a pooled connection may have received before
            health.refuse(link.raw, "inbox" if first else None, reader=f"inbox/{subscription}")
            _met.add(link.raw)
            found = services.subscription(link.raw, subscription)
            members = [] if beside_members else shards.living(link.raw, found.subscription_id)
            if members:
                raise UsageError(
                    f"processors own the shards of subscription {subscription!r}: "
                    f"{', '.join(members)}. Stop them, or receive from a subscription of your own"
                )
            if listen:
                start_listening(link.raw)
            self.link = replace(link, own=restoring(link.raw, pooled=pooled))
            self._verifier = None
            if trust is not None:
                (broker,) = of_broker(link.raw, BROKER)
                self._verifier = Verifier(trust=trust, broker=broker)
        self.reader = Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            signer=signer,
        )

    @contextmanager
    def delivery(
        self, wait_seconds: float = 0.0, stopping: Event | None = None
    ) -> Iterator[Delivery[Any]]:
        """Yield the next messages, or an empty delivery after ``wait_seconds`` or on a stop."""
        stopping = stopping or Event()
        deadline = time.monotonic() + wait_seconds
        if self.listens:
            forget_notifications(self.link.raw)
        search = Search(tries_first=_toss())
        while True:
            try:
                with self._step(search) as delivery:
                    if delivery:
                        yield delivery
                if delivery:
                    self._pauses.end()
                    return
                waits = search.step is Step.WAIT
                if stopping.is_set() or (waits and not self._wait(deadline, stopping)):
                    with self.link.transaction():
                        yield self._delivery(None)
                    return
                if waits:
                    search.waited()
            except BaseException as error:
                # rolled back: the messages in hand are delivered again, more carefully
                search.failed()
                self._look_at = 0.0
                self._prefetch.rolled_back()
                if not isinstance(error, NotReceived):
                    raise

    def _step(self, search: Search) -> AbstractContextManager[Delivery[Any] | None]:
        return self._tried_alone(search) if search.step is Step.TRY else self._taken(search)

    @contextmanager
    def _taken(self, search: Search) -> Iterator[Delivery[Any] | None]:
        """Yield the next messages, in one transaction; None if none, or if one is to be tried."""
        self._prefetch.age()
        looks = not self._prefetch.goes_on or time.monotonic() >= self._look_at
        claims = looks or not self._prefetch.is_ready
        with self._transaction(claims=claims, plans_once=claims):
            with self.link.planned_once() if claims else nullcontext():
                troubled = looks and self._look()
                tries = search.tries(troubled=troubled)
                more = self._prefetch.goes_on
                hand = None if tries else self._next()
            delivery = self._handed(hand)
            with nullcontext() if delivery is None else self._settled(delivery):
                yield delivery
        if tries:
            return
        self._prefetch.committed(len(delivery or ()))
        search.took(delivery, more=more, troubled=troubled)
        if search.step is Step.WAIT and not troubled:
            self._quiet.nothing()

    @contextmanager
    def _tried_alone(self, search: Search) -> Iterator[Delivery[Any] | None]:
        """Yield a message to try alone, after its attempt was counted; None if there is none."""
        suspect = self._count()
        search.tried(found=suspect is not None)
        if suspect is None:
            yield None
            return
        fail_point("attempt_counted")
        with self._tried(suspect) as delivery, self._settled(delivery):
            yield delivery

    def _handed(self, hand: Hand | None) -> Delivery[Any] | None:
        """Make a delivery of the messages in hand, if any."""
        if hand is None:
            return None
        with receiving():
            return self._delivery(hand)

    @contextmanager
    def _settled(self, delivery: Delivery[Any]) -> Iterator[None]:
        """Run the block that handles a delivery, unless the delivery is empty; then settle it."""
        if delivery:
            fail_point("receive_read")
        yield
        if delivery:
            fail_point("receive_handled")
        aside = delivery.settle()
        if not delivery:
            self._unseen += aside
        fail_point("receive_settled")

    def _look(self) -> bool:
        """Return whether anything is to be tried alone; if not, do not check again for a while."""
        troubled = retries.troubled(self.link.raw, self.reader)
        self._look_at = 0.0 if troubled else time.monotonic() + LOOK_SECONDS
        return troubled

    def _wait(self, deadline: float, stopping: Event) -> bool:
        """Pause until messages may have arrived, each time longer; False if the time is over."""
        longest = LISTENING_PAUSE_SECONDS if self.listens else LONGEST_PAUSE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            pause = min(self._pauses.next(longest), left)
            if self.listens:
                await_notification(self.link.raw, pause, stopping)
            else:
                stopping.wait(pause)
            if stopping.is_set():
                return False
            if not self._still_quiet():
                return True
        return False

    def _still_quiet(self) -> bool:
        link = self.link
        if link.raw.autocommit:  # a statement is a transaction
            with link.locking(link.lock_seconds):
                if self._quiet.is_certain(link.raw):
                    return True
        with link.transaction(claims=False), link.locking(link.lock_seconds):
            if not link.raw.autocommit and self._quiet.is_certain(link.raw):
                return True
            return self._quiet.lasts(link.raw, self.reader)

    def unseen(self) -> SetAside:
        """Return the counts of messages set aside without being handed out, since the last call."""
        unseen, self._unseen = self._unseen, SetAside()
        return unseen

    def forget(self) -> None:
        """Stop listening, because the connection may go back to a pool; close it if that fails."""
        if not self.listens or self.link.raw.closed:
            return
        try:
            with self.link.transaction():
                self.link.raw.execute(UNLISTEN)
        except Exception:
            # for any reason; earlier errors are raised to the caller
            self.link.raw.close()

    def _read_ahead(self) -> None:
        """Prefetch messages; if a message makes this fail, `_claim` isolates the message."""
        if not self.link.reads_committed():
            self._prefetch.stop()
            return
        with receiving():
            self._prefetch.read(self.link.raw, self.reader)

    def _next(self) -> Hand | None:
        """Take the next messages in hand, from the prefetched ones or from the inbox."""
        if self._prefetch.is_used_up:
            self._read_ahead()
            return None
        if not self._prefetch.is_ready:
            return self._claim()
        with self.link.locking(self.link.lock_seconds):
            return self._prefetch.take(self.link.raw, self.reader)

    def _claim(self) -> Hand | None:
        """Take the next messages of shards that no receiver has in hand."""
        raw = self.link.raw
        only, batch = self._prefetch.turn(), self._prefetch.batch
        hand = claim.claim(raw, self.reader, self.max_messages, only, batch)
        if hand is None:
            return None
        for shard in hand.failed:
            hand.shards[shard].allowance = 1
        reading.read(raw, hand, set(hand.shards) - hand.failed, self.max_messages)
        self._prefetch.stay_with(hand)
        return hand


def _toss() -> bool:
    return random.choice((True, False))  # noqa: S311 - nobody gains by guessing it


def restoring(connection: psycopg.Connection[Any], *, pooled: bool) -> str:
    """Return the statement that restores the current settings; it has no parameters.

    Behind a pooler, the session is not the receiver's, so only the transaction's settings are
    restored.
    """
    (found,) = fetch(connection, ASK_SETTINGS)
    values = {**dict(zip(SETTINGS, found, strict=True)), **ALWAYS}
    restored = (
        sql.SQL("set_config({}, {}, {})").format(name, value, pooled)
        for name, value in values.items()
    )
    return "SELECT " + sql.SQL(", ").join(restored).as_string(connection)


class Quiet:
    """A receiver's knowledge since it last found nothing.

    A search for messages to claim asks many questions: for each shard, whether it has rows unknown
    to its own cursor, in each slot of the inbox. But a receiver that found nothing a moment ago
    needs only the changes since an earlier snapshot. `ASK_WAITING` returns them for all shards
    together:

    - whether rows exist that are not visible in that snapshot;
    - whether a lane of the subscription has become due, or waits for a handler that this receiver
      has;
    - whether a receiver has left a batch open, or has died with a shard in hand;
    - how many shards this receiver may claim, and the sum of their epochs, which shows that owners
      have changed.

    If nothing has changed, there is still nothing to claim. From time to time the receiver searches
    all the same (`SURE_SECONDS`), because an operator may have set a cursor back.

    On a server without writes, even `ASK_WAITING` is skipped. While no transaction that has written
    ends, the server's snapshot stays the same, and only the passage of time can bring work: a lane
    that becomes due.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        """Snapshot, shard count and epochs when nothing was found."""
        self._until = 0.0
        self._asked: tuple[Any, ...] | None = None
        self._untouched = ""
        """Snapshot before a search that found nothing, if time alone makes nothing due. A snapshot
        followed by `ASK_WAITING` only does not count: a cursor may have been set back before it."""
        self._becomes_due = False

    def is_certain(self, raw: psycopg.Connection[Any]) -> bool:
        """Return whether nothing at all was written since nothing was found; one statement."""
        return self._untouched != "" and fetch(raw, SNAPSHOT) == [(self._untouched,)]

    def lasts(self, raw: psycopg.Connection[Any], reader: Reader) -> bool:
        """Return whether there is still nothing. Call it in a transaction of its own.

        If not, search, and call `nothing` if the search finds nothing.
        """
        raw.execute(PLAN_ONCE)
        seen, *free = self._known or (None, None, None)
        rows = fetch(raw, ASK_WAITING, {**params_of(reader), "seen": seen})
        ((snapshot, *now, self._becomes_due, changed),) = rows
        self._asked = (snapshot, *now)
        return not changed and now == free and time.monotonic() < self._until

    def nothing(self) -> None:
        """Note that a search found nothing, neither to claim nor to try alone."""
        # the answer before that search; none before the first
        self._known, self._asked = self._asked, None
        self._untouched = self._known[0] if self._known and not self._becomes_due else ""
        self._until = time.monotonic() + SURE_SECONDS
