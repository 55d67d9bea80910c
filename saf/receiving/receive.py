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

*Messages that failed.* A receiver chooses a lane or a shard that is due, counts the attempt in a
transaction of its own, and only then hands the messages out: so an attempt that kills its process
has been counted. An error that keeps a message from being handed out is blamed on that message
only. `saf.receiving.retries` describes the attempts.

*Pauses.* An operator may pause a subscription. A receiver notices this when it checks for messages
to try alone, which it does at least every `LOOK_SECONDS` while it is busy. It then takes nothing,
and asks every `PAUSED_SECONDS` whether the pause is over. Limits slow receivers down:
`saf.receiving.allotment`.

*Fair subscriptions.* Their messages are handed out in another order; see `saf.receiving.fair`.

*Idle receivers.* A receiver that finds nothing polls less and less often (`saf.receiving.polling`),
or listens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import psycopg

from saf.broker import health, services
from saf.broker.services import Subscription
from saf.database import check_schema, of_broker, unavailable_if_lost
from saf.database.dsn import is_pooled
from saf.errors import UsageError
from saf.failpoints import fail_point
from saf.log import shards
from saf.log.pauses import Turn
from saf.receiving import claim, fair, reading, retries, settlement
from saf.receiving.allotment import SEAT_SECONDS, Allotment
from saf.receiving.arrival import Arrival
from saf.receiving.chosen import Conversations, Which, take
from saf.receiving.delivery import Delivery
from saf.receiving.failures import LAST, about, failure
from saf.receiving.fair import Fair
from saf.receiving.hand import Hand, Reader
from saf.receiving.link import (
    UNLISTEN,
    Link,
    await_notification,
    connected,
    forget_notifications,
    listen_if_it_notifies,
    restoring,
    start_listening,
)
from saf.receiving.outcome import Dead
from saf.receiving.polling import Quiet, Search, Step
from saf.receiving.prefetch import Prefetch
from saf.receiving.retries import Policy, Suspect
from saf.receiving.summary import SetAside
from saf.setaside.isolation import of_messages, said
from saf.signing.signer import Key, RequireSigned, Signer
from saf.signing.verifier import Trust, Verifier
from saf.telemetry import tracing
from saf.telemetry.logger import Log

if TYPE_CHECKING:
    from uuid import UUID

    from saf.dialogs.dialog import Dialog
    from saf.receiving.link import Engine

log = Log("saf.receive")

LONGEST_PAUSE_SECONDS = 0.5
"""Longest pause between polls that find nothing, in seconds; see `saf.log.pauses`."""

LISTENING_PAUSE_SECONDS = 5.0
"""Longest pause of a listening receiver, which must still find messages that become due."""

LOOK_SECONDS = 0.25
"""Interval at which a busy receiver checks for messages to try alone, in seconds."""

PAUSED_SECONDS = 0.5
"""Interval at which the receivers of a paused subscription ask whether it is resumed."""

BROKER = "SELECT broker_id FROM saf.broker"

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
    require_signed: RequireSigned = False,
    keys: Mapping[str, Key] | None = None,
    signer: Signer | None = None,
    conversation: Dialog | UUID | None = None,
    group: Dialog | UUID | None = None,
) -> Iterator[Delivery[Any]]:
    """Receive the available messages of a subscription, up to ``max_messages``.

    Args:
        engine: where the inbox and the consumer's tables are; see `saf.receiving.link`.
        subscription: the subscription to receive from; each service has a subscription of its own
            name.
        max_messages: the most messages in one delivery, which is one transaction.
        wait_seconds: how long to wait for the first message; after that, the delivery is empty.
        policy: how to treat messages whose handling fails.
        require_signed: hand out only messages that are signed with one of the ``keys``. "origin":
            their first senders have signed them, even if routing services have passed them on.
        keys: the keys that senders sign with, by their names, or a `Keys`; see docs/security.md.
        signer: signs what the receiver sends on the messages' dialogs.
        conversation: receive only the messages of this dialog's end, or of the end with this
            handle, whatever waits before them; see `saf.receiving.chosen`.
        group: receive only the messages of the dialogs in this dialog's group.

    Raises:
        ConfigurationError: the subscription does not exist.
        UsageError: processors read this subscription, or keys to verify with are missing; or the
            dialog is not an end of this service.
        DialogNotFound: no end in this database has this handle.
        SchemaMissing, SchemaMismatch, Restored: the database cannot be read from.
        Unavailable: the database does not answer, or one of saf's tables stays locked for too long.
    """
    with (
        one_delivery(
            connected(engine, subscription),
            subscription,
            max_messages=max_messages,
            wait_seconds=wait_seconds,
            policy=policy,
            trust=Trust.of(keys, required=require_signed),
            signer=signer,
            which=Which.of(conversation, group),
        ) as delivery,
        tracing.receiving(subscription, delivery),
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
    which: Which | None = None,
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
            which=which,
        )
        if which is not None and wait_seconds > 0:
            receiver.listen_if_possible()
        try:
            with receiver.delivery(wait_seconds, stopping) as delivery:
                yield delivery
            receiver.lend()
        finally:
            receiver.forget()
        fail_point("receive_committed")


class NotReceived(Exception):
    """Messages could not be handed to the application: the failure is not the application's."""


@contextmanager
def receiving() -> Iterator[None]:
    """Run a block before messages are handed out; raise `NotReceived` if one is at fault."""
    try:
        yield
    except Exception as error:
        if not of_messages(error):
            raise
        raise NotReceived from error


@contextmanager
def _schema_missed_by_name(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run a block that begins a transaction; if a table is missing, check the whole schema first.

    A claiming transaction locks a table of saf in its first statement, before the schema can be
    checked.

    Raises:
        SchemaMissing, SchemaMismatch, RowsGone: as `check_schema`.
    """
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        with connection.transaction():
            check_schema(connection)
        raise


def _subscription(
    connection: psycopg.Connection[Any], name: str, *, beside_members: bool
) -> Subscription:
    """Return the subscription of a healthy inbox, if a receiver may read it.

    Raises:
        ConfigurationError, UsageError, Restored: as `receive`.
    """
    first = connection not in _met  # a pooled connection may have received before
    health.refuse(connection, "inbox" if first else None, reader=f"inbox/{name}")
    _met.add(connection)
    found = services.subscription(connection, name)
    if beside_members:
        services.refuse_fair(found, "processors")
    elif members := shards.living(connection, found.subscription_id):
        raise UsageError(
            f"processors own the shards of subscription {name!r}: {', '.join(members)}. Stop "
            "them, or receive from a subscription of your own"
        )
    return found


class Receiver:
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
        turn: Turn | None = None,
        which: Which | None = None,
    ) -> None:
        self.link = link
        self.listens = listen
        self.policy = policy
        self.max_messages = max_messages
        self._turn = turn or Turn()
        self._unseen = SetAside()
        self._prefetch = Prefetch(max_messages)
        self._fair: Fair | None = None
        if not stays:
            self._prefetch.stop()
        self._quiet = Quiet()
        self._look_at = 0.0
        """Time of the next check for messages to try alone."""
        self.paused = False
        """True if the subscription was paused at the last check."""
        self.idle: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered while the receiver finds nothing to take, or may not take anything."""
        self.held_up = False
        """True if the last delivery is empty because of a pause or a limit."""
        with (
            unavailable_if_lost(f"database {link.raw.info.dbname!r}"),
            _schema_missed_by_name(link.raw),
            link.transaction(),
        ):
            pooled = is_pooled(link.raw)
            if pooled:
                link.raw.prepare_threshold = None
                self._prefetch.stop()
            check_schema(link.raw)
            found = _subscription(link.raw, subscription, beside_members=beside_members)
            if found.fairness:
                self._fair = fair.borrow(link.raw, found, max_messages)
                self._prefetch.stop()
            if listen:
                start_listening(link.raw)
            self.link = replace(link, own=restoring(link.raw, pooled=pooled))
            self._verifier = None
            if trust is not None:
                (broker,) = of_broker(link.raw, BROKER)
                self._verifier = Verifier(trust=trust, broker=broker)
        self._allotment = Allotment(found.subscription_id, found.rate, found.concurrency)
        self._subscription = found
        self.reader = Reader(
            subscription_id=found.subscription_id,
            name=found.name,
            service=found.service,
            signer=signer,
        )
        self._chosen: Conversations | None = None
        if which is not None:
            with link.transaction(claims=False):
                self._chosen = Conversations(link.raw, self.reader, which)

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
                may_take = not self._allotment.lacks_permits
                if not may_take:
                    with self.idle():
                        may_take = self._allotment.get_permits(
                            self.link, self.max_messages, deadline, stopping
                        )
                if may_take:
                    self._source.limit = self._most
                    with self._step(search) as delivery:
                        if delivery:
                            yield delivery
                    if delivery:
                        self._turn.end()
                        return
                    waits = search.step is Step.WAIT
                    if waits:
                        self._allotment.give_back(self.link)
                    may_take = not waits or self._wait(deadline, stopping)
                if stopping.is_set() or not may_take:
                    self.held_up = self.paused or self._allotment.holds_up
                    with self.link.transaction():
                        yield self._delivery(None)
                    return
                if waits:
                    search.waited()
            except BaseException as error:
                # rolled back: the messages in hand are delivered again, more carefully
                search.failed()
                self._look_at = 0.0
                self._source.rolled_back()
                if not isinstance(error, NotReceived):
                    raise

    def _step(self, search: Search) -> AbstractContextManager[Delivery[Any] | None]:
        return self._tried_alone(search) if search.step is Step.TRY else self._taken(search)

    @contextmanager
    def _taken(self, search: Search) -> Iterator[Delivery[Any] | None]:
        """Yield the next messages, in one transaction; None if none, or if one is to be tried."""
        self._prefetch.age()
        looks = not self._source.goes_on or time.monotonic() >= self._look_at
        claims = looks or not self._prefetch.is_ready
        with self._transaction(claims=claims, plans_once=claims):
            with self.link.planned_once() if claims else nullcontext():
                troubled = looks and self._look()
                tries = search.tries(troubled=troubled)
                more = self._source.goes_on
                hand = None
                if not tries:
                    is_free = self._is_free()
                    hand = self._next() if is_free else None
                    more = more or self._source.goes_on
                    more = (more and is_free) or self._allotment.lacks_permits
            delivery = self._handed(hand)
            self._allotment.used(len(delivery or ()))
            with nullcontext() if delivery is None else self._settled(delivery):
                yield delivery
        if tries:
            return
        self._prefetch.committed(len(delivery or ()))
        search.took(delivery, more=more, troubled=troubled)
        if search.step is Step.WAIT and not troubled:
            self._quiet.nothing()

    def _is_free(self) -> bool:
        """Return whether neither a pause nor limits keep this receiver from taking messages."""
        may_take = not self.paused and not self._allotment.lacks_permits
        return may_take and self._allotment.has_seat(self.link.raw)

    @property
    def _most(self) -> int:
        """Most messages that the next delivery may have."""
        return self._allotment.most(self.max_messages)

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

    @contextmanager
    def _transaction(self, *, claims: bool = True, plans_once: bool = False) -> Iterator[None]:
        """Run a block in a transaction; messages it sets aside are counted only if it commits."""
        before = self._unseen
        try:
            with self.link.transaction(claims=claims, plans_once=plans_once):
                yield
        except BaseException:
            self._unseen = before
            raise

    def _count(self) -> Suspect | None:
        """Choose a suspect to try alone, and count the attempt, in a transaction of its own.

        None if nothing is suspect, or another receiver has it in hand.
        """
        raw, reader = self.link.raw, self.reader
        if self._chosen is not None:
            return self._count_chosen(self._chosen)
        with self._transaction():
            suspect = retries.choose(raw, reader)
            if suspect is None:
                return None
            hand = claim.claim_shard(raw, reader, suspect.shard, 1)
            if hand is None:
                return None
            if suspect.lane is None or suspect.shard in hand.failed:
                # this transaction's writes replace the trace of the failed delivery
                return self._count_shard(hand, Suspect(shard=suspect.shard, lane=None))
            return self._count_lane(hand, suspect, suspect.lane)

    def _count_chosen(self, chosen: Conversations) -> Suspect | None:
        """Count the attempt at a conversation's next message, as `_count` does."""
        raw, reader = self.link.raw, self.reader
        with self._transaction():
            for suspect in chosen.suspects(raw, reader):
                hand = claim.claim_shard(raw, reader, suspect.shard, 1)
                lane = suspect.lane or ""
                if hand is None:
                    continue
                shard, failed = hand.shards[suspect.shard], suspect.shard in hand.failed
                # the first message after a failed delivery was probably in it
                number = 2 if shard.allowance == (None if failed else 1) else 1
                shard.allowance = 1 if failed else shard.allowance
                if lane in hand.waiting:
                    return self._count_lane(hand, suspect, lane)
                take(raw, hand, shard, lane, 1)
                with self._alone(hand):
                    first = self._delivery(hand)
                    for message in first:
                        message.attempt = number
                        first.presume(
                            message, "the last delivery of its shard did not come to its end"
                        )
                    self._unseen += first.settle()
                return Suspect(shard=suspect.shard, lane=lane, attempts=number)
        return None

    def _count_lane(self, hand: Hand, suspect: Suspect, lane: str) -> Suspect:
        raw, reader = self.link.raw, self.reader
        known = retries.attempts(raw, reader, lane)
        if known is None:
            claim.move(raw, hand)
            return suspect
        number, error = known
        suspect = Suspect(shard=suspect.shard, lane=lane, attempts=number + 1)
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
                self._unseen += last.settle()
            return suspect
        retries.count(raw, reader, lane, suspect.attempts, self.policy)
        claim.move(raw, hand)
        return suspect

    def _count_shard(self, hand: Hand, suspect: Suspect) -> Suspect:
        shard = hand.shards[suspect.shard]
        failed = suspect.shard in hand.failed
        is_one = shard.allowance == 1
        if (shard.allowance or 1) > 1 and not failed:
            claim.move(self.link.raw, hand)
            return suspect
        shard.allowance = 1
        reading.read(self.link.raw, hand, [suspect.shard], 1)
        with self._alone(hand):
            first = self._delivery(hand)
            if not first:
                if not hand.all:
                    shard.allowance = None
                self._unseen += first.settle()
                return suspect
            # if its attempt failed, this message was in it; otherwise another receiver's attempt
            # failed
            number = 1 if failed and is_one else 2
            (message,) = first
            message.attempt = number
            first.presume(message, "the last delivery with this message did not come to its end")
            first.settle()
            return Suspect(shard=suspect.shard, lane=message.lane, attempts=number)
        return suspect

    @contextmanager
    def _alone(self, hand: Hand) -> Iterator[None]:
        """Run a block about one message, and blame that message for any error.

        The message becomes a dead letter, and its neighbours continue; see
        `saf.setaside.isolation`.
        """
        try:
            with self.link.raw.transaction():
                yield
        except Exception as error:
            if self.link.raw.broken or not of_messages(error) or not hand.all:
                raise
            self._bury(hand, error)

    def _bury(self, hand: Hand, error: Exception) -> None:
        """Make a dead letter of the only message in hand, because every way to handle it raises.

        Its conversation ends with an error, and its shard moves past it.
        """
        raw = self.link.raw
        letter = Dead(reason="rejected", error=said(error), as_stored=True, fails=True)
        outcomes = dict.fromkeys(hand.all, letter)
        settlement.write(raw, hand, outcomes, arrival=Arrival(raw=raw))
        claim.move(raw, hand)
        self._unseen += SetAside(buried=len(outcomes))

    @contextmanager
    def _tried(self, suspect: Suspect) -> Iterator[Delivery[Any]]:
        """Yield a delivery of a suspect alone. If its block fails, note the error afterwards."""
        raw = self.link.raw
        try:
            with self._transaction():
                hand = None
                if self._allotment.has_seat(raw):
                    hand = claim.claim_shard(raw, self.reader, suspect.shard, self._most)
                if hand is None:
                    if suspect.lane is not None:
                        retries.uncount(raw, self.reader, suspect.lane, suspect.attempts)
                    yield self._delivery(None)
                    return
                shard = hand.shards[suspect.shard]
                if suspect.lane is None:
                    allowance = min(shard.allowance or self._most, self._most)
                    reading.read(raw, hand, [suspect.shard], allowance)
                    with receiving():
                        delivery = self._delivery(hand, suspect)
                else:
                    with receiving():
                        delivery = self._read_lane(hand, suspect, suspect.attempts)
                if suspect.shard in hand.failed:  # another receiver's, since this was counted
                    shard.allowance = 1
                elif shard.allowance is not None:
                    doubled = shard.allowance * 2
                    shard.allowance = doubled if doubled < claim.ALL_CLEAR else None
                self._allotment.used(len(delivery))
                yield delivery
        except Exception as error:
            if suspect.lane is not None and not raw.closed:
                self._note(suspect, error)
            raise

    def _note(self, suspect: Suspect, error: Exception) -> None:
        """Store the error of a failed attempt; after the last one, make a dead letter."""
        raw = self.link.raw
        with self._transaction():
            hand = claim.claim_shard(raw, self.reader, suspect.shard, 1)
            if hand is None:
                return
            hand.shards[suspect.shard].allowance = (
                2 if hand.shards[suspect.shard].allowance is not None else None
            )
            cause = error.__cause__ if isinstance(error, NotReceived) and error.__cause__ else error
            with self._alone(hand):
                delivery = self._read_lane(hand, suspect, suspect.attempts, limit=1)
                for message in delivery:
                    if self.policy.gives_up(message.attempt, cause):
                        log.error(
                            "dead_letter",
                            subscription=self.reader.name,
                            **failure(cause, message, self.policy, raw),
                        )
                    delivery.park(message, cause)
                self._unseen += delivery.settle()

    def _read_lane(
        self, hand: Hand, suspect: Suspect, number: int, limit: int | None = None
    ) -> Delivery[Any]:
        """Read the messages of a lane tried ``number`` times; after a failure, only the first."""
        raw, lane = self.link.raw, suspect.lane or ""
        known = retries.attempts(raw, self.reader, lane)
        if known is None or known[0] != number:
            return self._delivery(hand, Suspect(shard=suspect.shard, lane=None))
        limit = limit or (self._most if number == 1 else 1)
        reading.read_lane(raw, hand, lane, number, limit)
        return self._delivery(hand, suspect)

    def _delivery(self, hand: Hand | None, tried: Suspect | None = None) -> Delivery[Any]:
        link = self.link
        return Delivery(
            link.connection,
            link.raw,
            hand,
            self.policy,
            tried,
            verifier=self._verifier,
            own=link.own,
        )

    def _look(self) -> bool:
        """Return whether anything is to be tried alone; if not, do not check again for a while.

        Nothing is while the subscription is paused.
        """
        found = retries.look(self.link.raw, self.reader)
        self.paused = found.paused
        self._allotment.hear(found.rate, found.concurrency)
        troubled = found.troubled
        if self._chosen is not None:
            troubled = self._chosen.troubled(self.link.raw, self.reader)
        checks = troubled or found.paused
        self._look_at = 0.0 if checks else time.monotonic() + LOOK_SECONDS
        return troubled and not found.paused

    def _wait(self, deadline: float, stopping: Event) -> bool:
        """Pause until messages may have arrived, each time longer; False if the time is over."""
        longest = LISTENING_PAUSE_SECONDS if self.listens else LONGEST_PAUSE_SECONDS
        with self.idle(), self._turn.taken(deadline, stopping):
            while (left := deadline - time.monotonic()) > 0:
                held = self._held_seconds()
                pause = min(held or self._turn.next(longest), left)
                if self.listens and not held:
                    await_notification(self.link.raw, pause, stopping)
                else:
                    stopping.wait(pause)
                if stopping.is_set():
                    return False
                if not self._still_quiet():
                    return True
        return False

    def _held_seconds(self) -> float:
        """Return how long to pause because of a pause or a limit; 0 if neither holds this up."""
        if self.paused:
            return PAUSED_SECONDS
        return SEAT_SECONDS if self._allotment.lacks_seat else 0.0

    def _still_quiet(self) -> bool:
        link = self.link
        if self._allotment.lacks_seat and not self.paused:
            return False
        if self._chosen is not None and not self.paused:
            with link.transaction(claims=False), link.locking(link.lock_seconds):
                return self._chosen.quiet(link.raw, self.reader)
        if link.raw.autocommit:  # a statement is a transaction
            with link.locking(link.lock_seconds):
                if self._is_certain():
                    return True
        with link.transaction(claims=False), link.locking(link.lock_seconds):
            if not link.raw.autocommit and self._is_certain():
                return True
            return not self.paused and self._quiet.lasts(link.raw, self.reader)

    def _is_certain(self) -> bool:
        """Return whether one statement shows that there is nothing to take."""
        raw = self.link.raw
        return retries.paused(raw, self.reader) if self.paused else self._quiet.is_certain(raw)

    def unseen(self) -> SetAside:
        """Return the counts of messages set aside without being handed out, since the last call."""
        unseen, self._unseen = self._unseen, SetAside()
        return unseen

    def lend(self) -> None:
        """Let the next receiver of this process continue with a fair receiver's plan."""
        if self._fair is not None:
            fair.lend(self.link.raw, self._subscription, self._fair)

    def listen_if_possible(self) -> None:
        """Be woken by messages from here on, if the inbox notifies and no pooler is in between."""
        with self.link.transaction(claims=False):
            if not is_pooled(self.link.raw):
                self.listens = listen_if_it_notifies(self.link.raw)

    def forget(self) -> None:
        """Give back permits, and stop listening, because the connection may go back to a pool.

        If that fails, close the connection.
        """
        if self.link.raw.closed:
            return
        try:
            self._allotment.give_back(self.link)
            if self.listens:
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

    @property
    def _source(self) -> Fair | Prefetch:
        """Where the next messages are known."""
        return self._fair or self._prefetch

    def _next(self) -> Hand | None:
        """Take the next messages in hand, from the prefetched ones or from the inbox."""
        if self._chosen is not None:
            return self._chosen.next(self.link.raw, self.reader, self._most)
        if self._fair is not None:
            with receiving():
                return self._fair.next(self.link.raw, self.reader)
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
        hand = claim.claim(raw, self.reader, self._most, only, batch)
        if hand is None:
            return None
        for shard in hand.failed:
            hand.shards[shard].allowance = 1
        reading.read(raw, hand, set(hand.shards) - hand.failed, self._most)
        self._prefetch.stay_with(hand)
        return hand


def _toss() -> bool:
    return random.choice((True, False))  # noqa: S311 - nobody gains by guessing it
