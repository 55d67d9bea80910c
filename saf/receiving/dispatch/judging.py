"""Judging: the effect of an answer on its message and on the endpoint's condition.

An answer changes the window immediately, in memory. Changes of the endpoint's stored condition are
collected in `Judge.to_write`; the session writes them, and marks the messages. Nothing here queries
the database.

`Breaker` is the policy, without I/O: whether an endpoint is up, and whether a failure is the
endpoint's. One request that fails proves nothing about the endpoint: the message may be to blame.
Several failures in a row, with no success between them, are the endpoint's failure: the breaker
opens. Then only one message is sent from time to time, a probe, until a probe succeeds.

An endpoint that is down does not use up the attempts of messages. So a failure does not count as an
attempt at first; the message is a suspect. If the endpoint accepts another message before the
breaker opens, it is up, and the attempts of all suspects count (`Breaker.succeeded`). If the
breaker opens, they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import psycopg

from saf.errors import InvalidMessage
from saf.receiving.dispatch import replies
from saf.receiving.dispatch.condition import Book, Condition
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Endpoint
from saf.receiving.dispatch.source import TALKS
from saf.receiving.dispatch.talking import Talked
from saf.receiving.dispatch.window import Walk, Window
from saf.receiving.failures import about
from saf.receiving.retries import FailedAttempt, Waiting
from saf.telemetry.logger import Log

T = TypeVar("T")
"""Data kept about an attempt until it is known whether the attempt counts."""

UP = (Meaning.DONE, Meaning.REJECTED, Meaning.FAILED)
"""Answers that show that the endpoint is up."""

log = Log("saf.dispatch")


@dataclass(kw_only=True)
class Breaker(Generic[T]):
    """A process's knowledge of an endpoint that it considers up.

    >>> breaker = Breaker[str](threshold=2)
    >>> breaker.failed("A-1"), breaker.succeeded()
    (False, ['A-1'])
    >>> breaker.failed("A-1"), breaker.failed("A-2"), breaker.succeeded()
    (False, True, [])
    """

    threshold: int
    """Number of failures in a row that opens the breaker."""
    failures: int = 0
    """Number of failures in a row so far."""
    _suspects: list[T] = field(default_factory=list)

    def failed(self, suspect: T) -> bool:
        """Note that an attempt has failed; return whether this opens the breaker."""
        self.failures += 1
        self._suspects.append(suspect)
        if self.failures < self.threshold:
            return False
        self.reset()
        return True

    def succeeded(self) -> list[T]:
        """Note that the endpoint is up; return the attempts that count."""
        suspects = self._suspects
        self.reset()
        return suspects

    def reset(self) -> None:
        """Forget all failures."""
        self.failures = 0
        self._suspects = []


class Judge:
    """Judges the answers of one endpoint to messages of a window.

    If the subscription ``converses``, messages of dialogs are received as such.
    """

    def __init__(self, window: Window, book: Book, endpoint: Endpoint, *, converses: bool) -> None:
        self.name = book.endpoint
        self.endpoint = endpoint
        self.window = window
        self.condition = Condition()
        """Condition of the endpoint, as far as this process knows."""
        self.to_write: list[Callable[[psycopg.Connection[Any]], None]] = []
        self._book = book
        self._converses = converses
        self._breaker = Breaker[FailedAttempt](threshold=endpoint.breaker_failures)

    def hear(self, found: Condition) -> None:
        """Learn the endpoint's condition from the state that all dispatchers share."""
        if self.to_write:
            return  # this process knows better, and is about to write it
        if found.sends and not self.condition.sends:
            self._breaker.reset()
        self.condition = found

    def is_spoken(self, walk: Walk) -> bool:
        """Return whether a message belongs to a dialog that has an end at this subscription."""
        return self._converses and walk.message.from_initiator is not None

    def leave_to_worker(self, walk: Walk) -> None:
        """Make a message of a dialog, and its key behind it, wait for a worker that can reply."""
        message = walk.message
        waiting = Waiting(
            lane=message.lane,
            shard=message.shard,
            attempts=message.attempt - 1,
            error=TALKS,
            awaits_handler=True,
            message_type=message.message_type,
        )
        self.window.wait(walk, waiting)

    def answered_together(self, walks: list[Walk], answer: Answer) -> None:
        """Note the answer to several messages.

        If the answer is bad, one of the messages may be to blame. So each is sent alone next.
        """
        if answer.meaning is Meaning.DONE:
            self.window.count(self._breaker.succeeded())
            for walk in walks:
                self.window.done(walk)
            return
        self.window.note(walks[0], answer)
        for walk in reversed(walks):
            self.window.put_back(walk)
        if self.condition.sends and answer.meaning is Meaning.GONE:
            self._disable(answer)
        elif self.condition.sends and answer.retry_after is not None:
            self._open(answer)
        elif self.condition.sends:
            for walk in walks:
                walk.alone = True

    def answered(self, walk: Walk, answer: Answer) -> None:
        """Note the answer to a message."""
        if answer.meaning in UP:
            self.window.count(self._breaker.succeeded())
            self._settle(walk, answer)
            return
        self.window.note(walk, answer)
        if not self.condition.sends:
            # the endpoint is known to be down: this is not new, and does not blame the message
            self.window.put_back(walk)
        elif answer.meaning is Meaning.GONE:
            self.window.put_back(walk)
            self._disable(answer)
        else:
            self._failed(walk, answer)

    def _settle(self, walk: Walk, answer: Answer) -> None:
        """Apply to a message the answer of an endpoint that is up."""
        if answer.meaning is Meaning.DONE:
            self._done(walk, answer)
            return
        self.window.note(walk, answer)
        last = walk.message.attempt >= self.endpoint.attempts
        if answer.meaning is Meaning.FAILED and not last:
            counted = self._waiting(walk, answer)
            self.window.wait(walk, counted)
            wait = f"in {counted.wait:g} s"
            self._log(log.warning, "message_failed", walk, answer, next_attempt=wait)
            return
        reason = "rejected" if answer.meaning is Meaning.REJECTED else "failed"
        self._reject(walk, reason, answer)

    def _done(self, walk: Walk, answer: Answer) -> None:
        if self.is_spoken(walk):
            self.window.talked(walk, Talked(sent=True, reply=answer.reply))
        elif answer.reply is None:
            self.window.done(walk)
        else:
            try:
                self.window.done(walk, replies.to(walk.message, answer.reply))
            except InvalidMessage as error:
                self._reject(walk, "failed", replace(answer, error=f"its reply: {error}"))

    def _reject(self, walk: Walk, reason: str, answer: Answer) -> None:
        if self.is_spoken(walk):
            self.window.talked(walk, Talked(reason=reason, error=answer.error))
        else:
            self.window.reject(walk, reason, answer.error)
        self._log(log.error, "dead_letter", walk, answer)

    def _failed(self, walk: Walk, answer: Answer) -> None:
        """Make the message wait; its attempt counts once the endpoint is known to be up."""
        counted = self._waiting(walk, answer)
        # a message whose last attempt has failed is checked again immediately
        last = walk.message.attempt >= self.endpoint.attempts
        suspect = replace(counted, wait=0.0) if last else counted
        if self._breaker.failed(suspect) or answer.retry_after is not None:
            self._breaker.reset()
            self.window.put_back(walk)
            self._open(answer)
            return
        self.window.wait(walk, replace(counted, attempts=walk.message.attempt - 1))
        wait = f"in {counted.wait:g} s"
        self._log(log.warning, "message_failed", walk, answer, next_attempt=wait)

    def _waiting(self, walk: Walk, answer: Answer) -> FailedAttempt:
        """Return how a message's lane continues to wait, if this attempt counts."""
        wait = max(self.endpoint.wait_seconds(walk.message.attempt), answer.retry_after or 0.0)
        return FailedAttempt(
            lane=walk.message.lane,
            shard=walk.message.shard,
            id=walk.message.id,
            attempts=walk.message.attempt,
            error=answer.error,
            wait=wait,
        )

    def _open(self, answer: Answer) -> None:
        """Note that the endpoint is down."""
        wait = max(self.endpoint.wait_seconds(1), answer.retry_after or 0.0)
        self.condition = Condition(
            state="open", paused=self.condition.paused, probe_in=wait, error=answer.error
        )
        self.to_write.append(lambda connection: self._book.down(connection, answer.error, wait))
        log.warning(
            "endpoint_down", endpoint=self.name, error=answer.error, next_attempt=f"in {wait:g} s"
        )

    def _disable(self, answer: Answer) -> None:
        self.condition = Condition(state="disabled", error=answer.error)
        self.to_write.append(lambda connection: self._book.disable(connection, answer.error))
        log.error("endpoint_disabled", endpoint=self.name, error=answer.error)

    def probed(self, walk: Walk, answer: Answer) -> None:
        """Note a probe's answer: whether the endpoint is up again."""
        if answer.meaning in UP:
            self._breaker.reset()
            self.condition = Condition(paused=self.condition.paused)
            self.to_write.append(self._book.up)
            log.info("endpoint_up", endpoint=self.name)
            self._settle(walk, answer)
            return
        self.window.note(walk, answer)
        if answer.meaning is Meaning.GONE:
            self.window.put_back(walk)
            self._disable(answer)
            return
        self.window.put_back(walk)
        wait = max(
            self.endpoint.wait_seconds(self.condition.failures + 1), answer.retry_after or 0.0
        )
        longest = self.endpoint.disable_after_seconds
        self.to_write.append(
            lambda connection: self._book.still_down(connection, answer.error, wait, longest)
        )

    def _log(
        self,
        write: Callable[..., Any],
        event: str,
        walk: Walk,
        answer: Answer,
        **fields: str,
    ) -> None:
        write(
            event,
            endpoint=self.name,
            **about(walk.message),
            attempt=f"{walk.message.attempt} of {self.endpoint.attempts}",
            error=answer.error,
            **fields,
        )
