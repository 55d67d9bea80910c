"""Receive: messages in order, exactly once, in the consumer's own transaction.

    with saf.receive(engine, "billing", max_messages=100, wait_seconds=5) as delivery:
        for message in delivery:
            delivery.connection.execute(…)

The position commits together with what the block writes on ``delivery.connection``: both or
neither, whatever fails. An exception in the block rolls everything back and is raised. The messages
then come again, the first of them alone, until the one that fails by itself is a dead letter (see
`saf.receiving.retries`).

Any number of receivers, in any number of processes, share the work: a key is in one hand at a
time, and in order. Work in the block runs in READ COMMITTED. Other databases, files and calls to
other systems are not part of the transaction, so what is done there is done at least once.

``engine`` is one of

    a SQLAlchemy Engine on psycopg     ``delivery.connection`` is a SQLAlchemy Connection
    a dsn                              a psycopg Connection, opened for this block
    a callable                         a psycopg Connection, from ``with engine() as connection``:
                                       ``pool.connection`` of psycopg_pool, a partial of connect
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus

from saf.broker import restored, services
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.database.bounds import Bounds
from saf.database.poolers import is_pooled
from saf.errors import Unavailable, UsageError
from saf.failpoints import fail_point
from saf.log import shards
from saf.logger import Log
from saf.received import READ, Received
from saf.receiving import claim, notify, retries
from saf.receiving.burying import bury_alone
from saf.receiving.claim import Hand, Reader
from saf.receiving.delivery import Delivery
from saf.receiving.failures import LAST, about
from saf.receiving.retries import Policy, Suspect
from saf.setaside.isolation import of_messages
from saf.signing.keys import Key
from saf.signing.signer import Signer
from saf.signing.verifier import Trust, Verifier

if TYPE_CHECKING:
    import sqlalchemy as sa

    Engine = sa.Engine | Dsn | str | Callable[[], AbstractContextManager[psycopg.Connection[Any]]]

log = Log("saf.receive")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.5
"""Pause between polls that find nothing; it doubles each time until a poll finds something."""

BROKER = "SELECT broker_id FROM saf.broker"

LISTENING_PAUSE_SECONDS = 5.0
"""Longest pause of a receiver that is notified: it must still find what has become due."""


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
    """Receive messages of a subscription, as many as there are up to ``max_messages``.

    Args:
        engine: where the inbox and the consumer's tables are; see the top of this module.
        subscription: whose messages to receive; each service has a subscription of its own name.
        max_messages: the most messages in one delivery, which is one transaction.
        wait_seconds: how long to wait for the first message; after that, the delivery is empty.
        policy: what happens to messages whose handling fails.
        require_signed: hand out no message that is not signed by one of the ``keys``.
        keys: the keys that senders sign with, by their names, or a `Keys`; see docs/security.md.
        signer: signs what is said on the dialogs of the messages.

    Raises:
        ConfigurationError: there is no such subscription.
        UsageError: processors read this subscription, or there are no keys to verify with.
        SchemaMissing, SchemaMismatch, Restored: the database cannot be read from.
        Unavailable: the database does not answer, or a table of saf stays locked for too long.
    """
    if max_messages < 1:
        raise UsageError(f"max_messages: {max_messages} is less than 1")
    trust = Trust.of(keys, required=require_signed)
    with connected(engine) as link:
        receiver = Receiver(
            link, subscription, policy or Policy(), max_messages, trust=trust, signer=signer
        )
        with receiver.delivery(wait_seconds) as delivery:
            yield delivery
        fail_point("receive_committed")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection as the application's library has it, and the psycopg connection below it."""

    connection: Any
    raw: psycopg.Connection[Any]
    begin: Callable[[], AbstractContextManager[Any]]
    first: str = claim.begin(Bounds().lock_seconds)
    """The statements with which each transaction begins."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block in a transaction, which commits at its end or is rolled back.

        Raises:
            UsageError: it would not be a transaction of its own.
            Unavailable: something that it needs was locked for too long.
        """
        if self._status() != TransactionStatus.IDLE:
            raise UsageError("a transaction is open on this connection: receive begins its own")
        with self.begin():
            try:
                self.raw.execute(self.first)
            except psycopg.errors.LockNotAvailable as error:
                what, reason = f"database {self.raw.info.dbname!r}", str(error).splitlines()[0]
                raise Unavailable(what, reason, hangs=True) from error
            if self._status() != TransactionStatus.INTRANS:
                raise UsageError(
                    "this engine is in AUTOCOMMIT: each statement would be committed by itself, "
                    "and nothing rolled back. Receive with another isolation level"
                )
            yield

    def _status(self) -> TransactionStatus:
        return TransactionStatus(self.raw.info.transaction_status)


@contextmanager
def connected(engine: Engine) -> Iterator[Link]:
    """Open a connection to receive on.

    Raises:
        UsageError: ``engine`` is none of the things that give a connection.
        Unavailable: the database does not answer.
    """
    if isinstance(engine, (str, Dsn)):
        dsn = Dsn(engine) if isinstance(engine, str) else engine
        first = claim.begin(dsn.bounds.lock_seconds)
        with dsn.connect(role="receive", autocommit=True) as raw:
            yield Link(connection=raw, raw=raw, begin=raw.transaction, first=first)
        return
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa

        if isinstance(engine, sa.Engine):
            with engine.connect() as connection:
                below = _psycopg(connection.connection.driver_connection)
                with _as_it_was(below):
                    yield Link(connection=connection, raw=below, begin=connection.begin)
                return
    if not callable(engine):
        raise UsageError(
            f"cannot receive from a {type(engine).__module__}.{type(engine).__qualname__}: "
            "expected a SQLAlchemy Engine, a dsn, or a callable that gives psycopg connections"
        )
    with engine() as raw, _as_it_was(_psycopg(raw)):
        yield Link(connection=raw, raw=raw, begin=raw.transaction)


@contextmanager
def _as_it_was(raw: psycopg.Connection[Any]) -> Iterator[None]:
    """Restore at the end how the connection prepares statements, because it is given back."""
    before = raw.prepare_threshold
    try:
        yield
    finally:
        raw.prepare_threshold = before


def _psycopg(connection: object) -> psycopg.Connection[Any]:
    if not isinstance(connection, psycopg.Connection):
        raise UsageError(
            f"receiving needs psycopg 3, and this connection is a "
            f"{type(connection).__module__}.{type(connection).__qualname__}: "
            "create the engine with postgresql+psycopg://"
        )
    return connection


class Receiver:
    """Gives deliveries on one connection, one after the other.

    Raises what `receive` raises.
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
        trust: Trust | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.link = link
        self.listens = listen
        self.policy = policy
        self.max_messages = max_messages
        self._pause = FIRST_PAUSE_SECONDS
        self._buried = 0
        with unavailable_if_lost(f"database {link.raw.info.dbname!r}"), link.transaction():
            if is_pooled(link.raw):
                link.raw.prepare_threshold = None
            check_schema(link.raw)
            restored.refuse(link.raw)
            found = services.subscription(link.raw, subscription)
            members = [] if beside_members else shards.living(link.raw, found.subscription_id)
            if listen:
                notify.listen(link.raw)
            self._verifier = None
            if trust is not None:
                ((broker,),) = fetch(link.raw, BROKER)
                self._verifier = Verifier(trust=trust, broker=broker)
        if members:
            raise UsageError(
                f"processors own the shards of subscription {subscription!r}: "
                f"{', '.join(members)}. Stop them, or receive from a subscription of your own"
            )
        self.reader = Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            signer=signer,
        )

    @contextmanager
    def delivery(  # noqa: PLR0912 - a context manager yields in one place or the other, not in two
        self, wait_seconds: float = 0.0, stopping: Event | None = None
    ) -> Iterator[Delivery[Any]]:
        """Give the next messages, or an empty delivery after ``wait_seconds`` or on a stop."""
        stopping = stopping or Event()
        until = time.monotonic() + wait_seconds
        # half of the time, first what has failed before: so neither kind holds the other up
        careful_first, vain = _toss(), False
        while True:
            found = None
            try:
                with self.link.transaction():
                    troubled = retries.troubled(self.link.raw, self.reader)
                    careful = troubled and careful_first and not vain
                    if not careful:
                        found = self._claim()
                    if found is not None:
                        if found:
                            fail_point("receive_read")
                            yield found
                            fail_point("receive_handled")
                        found.settle()
                        if not found:
                            self._buried += found.buried
                        fail_point("receive_settled")
                if found:
                    self._pause = FIRST_PAUSE_SECONDS
                    return
                if careful:
                    suspect = self._count()
                    if suspect is not None:
                        fail_point("attempt_counted")
                        with self._tried(suspect) as delivery:
                            if delivery:
                                fail_point("receive_read")
                                yield delivery
                                fail_point("receive_handled")
                            delivery.settle()
                            if not delivery:
                                self._buried += delivery.buried
                            fail_point("receive_settled")
                        if delivery:
                            self._pause = FIRST_PAUSE_SECONDS
                            return
                    vain = suspect is None
                elif found is None and troubled and not vain:
                    careful_first = True
                elif found is None:
                    if not self._wait(until, stopping):
                        with self.link.transaction():
                            yield self._delivery(None)
                        return
                    vain = False
            except _NotReceived:
                # rolled back: what was in hand comes again, more carefully
                careful_first = True

    def _wait(self, until: float, stopping: Event) -> bool:
        """Pause before the next poll, and make the next pause longer; False if the time is over."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        if self.listens:
            notify.wait(self.link.raw, min(self._pause, left), stopping)
        else:
            stopping.wait(min(self._pause, left))
        longest = LISTENING_PAUSE_SECONDS if self.listens else LONGEST_PAUSE_SECONDS
        self._pause = min(self._pause * 2, longest)
        return not stopping.is_set()

    def buried(self) -> int:
        """How many messages that it did not hand out it has buried since it was asked last."""
        buried, self._buried = self._buried, 0
        return buried

    def forget(self) -> None:
        """Stop listening, because the connection may go back to a pool."""
        if self.listens and not self.link.raw.closed:
            with self.link.transaction():
                self.link.raw.execute(notify.UNLISTEN)

    def _claim(self) -> Delivery[Any] | None:
        """Take the next messages of shards that nobody has in hand."""
        raw = self.link.raw
        hand = claim.claim(raw, self.reader, self.max_messages)
        if hand is None:
            return None
        for shard in hand.failed:
            hand.shards[shard].allowance = 1
        claim.read(raw, hand, set(hand.shards) - hand.failed, self.max_messages)
        with _receiving():
            return self._delivery(hand)

    def _count(self) -> Suspect | None:
        """Choose what to try alone, and count the attempt, in a transaction of its own.

        None if there is nothing to try, or somebody else has it in hand.
        """
        raw, reader = self.link.raw, self.reader
        with self.link.transaction():
            suspect = retries.choose(raw, reader)
            if suspect is None:
                return None
            hand = claim.claim_shard(raw, reader, suspect.shard, 1)
            if hand is None:
                return None
            if suspect.lane is None:
                return self._count_shard(hand, suspect)
            known = retries.attempts(raw, reader, suspect.lane)
            if known is None:
                claim.move(raw, hand)
                return suspect
            number, error = known
            suspect = Suspect(shard=suspect.shard, lane=suspect.lane, attempts=number + 1)
            if number >= self.policy.max_attempts:
                # the last attempt ended its process
                with self._alone(hand):
                    last = self._read_lane(hand, suspect, number, limit=1)
                    for message in last:
                        last.reject(message, error)
                        log.error(
                            "dead_letter",
                            subscription=self.reader.name,
                            **about(message),
                            attempt=f"{number} of {self.policy.max_attempts}",
                            next_attempt=LAST,
                            error=error,
                        )
                    last.settle()
                    self._buried += last.buried
                return suspect
            retries.count(raw, reader, suspect.lane or "", suspect.attempts, self.policy)
            claim.move(raw, hand)
        return suspect

    def _count_shard(self, hand: Hand, suspect: Suspect) -> Suspect:
        shard = hand.shards[suspect.shard]
        failed = suspect.shard in hand.failed
        allowance = shard.allowance or 1
        if allowance > 1 and not failed:
            claim.move(self.link.raw, hand)
            return suspect
        shard.allowance = 1
        claim.read(self.link.raw, hand, [suspect.shard], 1)
        with self._alone(hand):
            first = self._delivery(hand)
            if not first:
                if not hand.all:
                    shard.allowance = None
                first.settle()
                self._buried += first.buried
                return suspect
            # if its attempt failed, this message was in it; otherwise another receiver's attempt
            # failed
            number = 1 if failed and allowance == 1 else 2
            (message,) = first
            message.attempt = number
            first.presume(message, "the last delivery with this message did not come to its end")
            first.settle()
            return Suspect(shard=suspect.shard, lane=message.lane, attempts=number)
        return suspect

    @contextmanager
    def _alone(self, hand: Hand) -> Iterator[None]:
        """Run a block that is about one message, and blame that message for what the block raises.

        The message becomes a dead letter, and its neighbours go on; see `saf.setaside.isolation`.
        """
        try:
            with self.link.raw.transaction():
                yield
        except Exception as error:
            if self.link.raw.broken or not of_messages(error) or not hand.all:
                raise
            bury_alone(self.link.raw, hand, error)
            self._buried += len(hand.all)

    @contextmanager
    def _tried(self, suspect: Suspect) -> Iterator[Delivery[Any]]:
        """Give a delivery of a suspect alone. If its block fails, note the error afterwards."""
        raw = self.link.raw
        try:
            with self.link.transaction():
                hand = claim.claim_shard(raw, self.reader, suspect.shard, self.max_messages)
                if hand is None:
                    yield self._delivery(None)
                    return
                shard = hand.shards[suspect.shard]
                if suspect.lane is None:
                    allowance = min(shard.allowance or self.max_messages, self.max_messages)
                    claim.read(raw, hand, [suspect.shard], allowance)
                    with _receiving():
                        delivery = self._delivery(hand, suspect)
                else:
                    with _receiving():
                        delivery = self._read_lane(hand, suspect, suspect.attempts)
                if shard.allowance is not None:
                    doubled = shard.allowance * 2
                    shard.allowance = doubled if doubled < claim.ALL_CLEAR else None
                yield delivery
        except Exception as error:
            if suspect.lane is not None and not raw.closed:
                self._note(suspect, error)
            raise

    def _note(self, suspect: Suspect, error: Exception) -> None:
        """Store the error of a failed attempt; after the last one, make a dead letter at once."""
        with self.link.transaction():
            hand = claim.claim_shard(self.link.raw, self.reader, suspect.shard, 1)
            if hand is None:
                return
            hand.shards[suspect.shard].allowance = (
                2 if hand.shards[suspect.shard].allowance is not None else None
            )
            cause = (
                error.__cause__ if isinstance(error, _NotReceived) and error.__cause__ else error
            )
            with self._alone(hand):
                delivery = self._read_lane(hand, suspect, suspect.attempts, limit=1)
                for message in delivery:
                    delivery.park(message, cause)
                delivery.settle()

    def _read_lane(
        self, hand: Hand, suspect: Suspect, number: int, limit: int | None = None
    ) -> Delivery[Any]:
        """Read what waits in a lane tried ``number`` times; if that failed, its first only."""
        raw, lane = self.link.raw, suspect.lane or ""
        known = retries.attempts(raw, self.reader, lane)
        if known is None or known[0] != number:
            return self._delivery(hand, Suspect(shard=suspect.shard, lane=None))
        limit = limit or (self.max_messages if number == 1 else 1)
        for row in retries.read_lane(raw, self.reader, lane, limit):
            message = Received(row, row[-1], number if not hand.messages else 1)
            hand.take(message, row[len(READ)])
        return self._delivery(hand, suspect)

    def _delivery(self, hand: Hand | None, tried: Suspect | None = None) -> Delivery[Any]:
        link = self.link
        return Delivery(
            link.connection, link.raw, hand, self.policy, tried, verifier=self._verifier
        )


class _NotReceived(Exception):
    """Messages could not be handed to the application: the failure is not the application's."""


@contextmanager
def _receiving() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not of_messages(error):
            raise
        raise _NotReceived from error


def _toss() -> bool:
    return random.choice((True, False))  # noqa: S311 - nobody gains by guessing it
