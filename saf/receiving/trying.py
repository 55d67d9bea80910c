"""Trying alone: how a receiver treats messages whose delivery failed before.

It chooses a lane or a shard that is due, counts the attempt in a transaction of its own, and only
then hands the messages out: so an attempt that kills its process has been counted. An error that
keeps a message from being handed out is blamed on that message only. `saf.receiving.retries`
describes the attempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saf.logger import Log
from saf.receiving import claim, outcome, reading, retries
from saf.receiving.arrival import Arrival
from saf.receiving.delivery import Delivery
from saf.receiving.failures import LAST, about, failure
from saf.receiving.hand import Hand, Reader
from saf.receiving.link import Link
from saf.receiving.outcome import Dead
from saf.receiving.retries import Policy, Suspect
from saf.receiving.summary import SetAside
from saf.setaside.isolation import of_messages, said
from saf.signing.verifier import Verifier

log = Log("saf.receive")


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


class Trying:
    """The part of a receiver that tries failed messages alone."""

    link: Link
    reader: Reader
    policy: Policy
    max_messages: int
    _verifier: Verifier | None
    _unseen: SetAside
    """Counts of messages set aside without being handed out."""

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
                    self._unseen += last.settle()
                return suspect
            retries.count(raw, reader, suspect.lane or "", suspect.attempts, self.policy)
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
        outcome.write(raw, hand, outcomes, arrival=Arrival(raw=raw))
        claim.move(raw, hand)
        self._unseen += SetAside(buried=len(outcomes))

    @contextmanager
    def _tried(self, suspect: Suspect) -> Iterator[Delivery[Any]]:
        """Yield a delivery of a suspect alone. If its block fails, note the error afterwards."""
        raw = self.link.raw
        try:
            with self._transaction():
                hand = claim.claim_shard(raw, self.reader, suspect.shard, self.max_messages)
                if hand is None:
                    if suspect.lane is not None:
                        retries.uncount(raw, self.reader, suspect.lane, suspect.attempts)
                    yield self._delivery(None)
                    return
                shard = hand.shards[suspect.shard]
                if suspect.lane is None:
                    allowance = min(shard.allowance or self.max_messages, self.max_messages)
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
        limit = limit or (self.max_messages if number == 1 else 1)
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
