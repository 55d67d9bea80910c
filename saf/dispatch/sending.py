"""Sending: which requests are in flight, and what the answers do to messages and the endpoint.

At most ``max_in_flight`` requests are in flight, and as many messages may be answered and not
marked. So a dispatcher that is killed leaves no more than twice that many messages which the
endpoint gets again.

An answer changes the window at once, in memory. What is to be written of the endpoint's condition
is in `Sender.to_write`; the session writes it, and marks the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg

from saf.dispatch import envelope, replies, xmlrpc
from saf.dispatch.answers import Answer, Meaning
from saf.dispatch.breaker import Breaker
from saf.dispatch.condition import Book, Condition
from saf.dispatch.envelope import Request
from saf.dispatch.http import Client
from saf.dispatch.rate import Bucket, per_second
from saf.dispatch.settings import Endpoint
from saf.dispatch.talking import Outcome
from saf.dispatch.window import Window
from saf.errors import InvalidMessage
from saf.failpoints import fail_point
from saf.logger import Log
from saf.received import Received
from saf.receiving.retries import Waiting
from saf.setaside.isolation import of_messages, said

UP = (Meaning.DONE, Meaning.REJECTED, Meaning.FAILED)
"""The answers of an endpoint that is up."""

TALKS = "messages of dialogs are sent with reply = true only; or let a worker handle them"

log = Log("saf.dispatch")


class Sender:
    """Sends messages of a window to an endpoint.

    ``tell`` is called when there is any news. Where the subscription ``converses``, messages of
    dialogs are sent by the session, by `talk`, because it knows whose turn it is.
    """

    def __init__(
        self,
        window: Window,
        book: Book,
        endpoint: Endpoint,
        client: Client,
        tell: Callable[[], None],
        *,
        converses: bool,
    ) -> None:
        self.name = book.endpoint
        self.endpoint = endpoint
        self.window = window
        self.condition = Condition()
        """How the endpoint is, as far as this process knows."""
        self.to_write: list[Callable[[psycopg.Connection[Any]], None]] = []
        self.requests: set[asyncio.Task[None]] = set()
        self.talks: list[Received] = []
        """Messages of dialogs that count as in flight, and are not looked at yet."""
        self.probe: Received | None = None
        """The message that is sent to see whether the endpoint is up."""
        self.failure: BaseException | None = None
        """What a request has raised, which is nobody's fault but saf's."""
        self.stopping = False
        """Whether to send nothing more."""
        self.bucket = Bucket(per_second=per_second(endpoint.rate)) if endpoint.rate else None
        self._book = book
        self._client = client
        self._tell = tell
        self._converses = converses
        self._breaker = Breaker[Waiting](threshold=endpoint.breaker_failures)
        self._throttled: asyncio.TimerHandle | None = None

    def hear(self, found: Condition) -> None:
        """Learn how the endpoint is, from what all dispatchers share."""
        if self.to_write:
            return  # this process knows better, and is about to say so
        if found.sends and not self.condition.sends:
            self._breaker.reset()
        self.condition = found

    async def cancel(self) -> None:
        """Give up what is in flight."""
        if self._throttled is not None:
            self._throttled.cancel()
        for request in self.requests:
            request.cancel()
        if self.requests:
            await asyncio.wait(self.requests)

    def start(self) -> None:
        """Send as many messages as may be in flight."""
        most = self.endpoint.max_in_flight
        window = self.window
        while (
            self.condition.sends
            and not self.stopping
            and window.in_flight < most
            and window.in_flight + window.unmarked < 2 * most
            and window.anything_ready
            and self._within_rate()
            and (message := window.next()) is not None
        ):
            self._take(message)

    def _within_rate(self) -> bool:
        """Whether the rate allows one more message now; if not, begin again when it does."""
        if self.bucket is None:
            return True
        loop = asyncio.get_running_loop()
        wait = self.bucket.take(loop.time())
        if wait > 0 and self._throttled is None:
            self._throttled = loop.call_later(wait, self._go_on)
        return wait == 0

    def _go_on(self) -> None:
        self._throttled = None
        self.start()

    def _take(self, message: Received) -> None:
        """Begin with a message that is in flight from now on."""
        if not self._is_spoken(message):
            self._send(message)
        elif self.endpoint.reply:
            self.talks.append(message)
            self._tell()
        else:
            self._leave_to_worker(message)
            self._tell()

    def _is_spoken(self, message: Received) -> bool:
        """Whether a message belongs to a dialog that this subscription is an end of."""
        return self._converses and message.from_initiator is not None

    def talk(self, message: Received, what: Request | Outcome) -> None:
        """Send a message of a dialog as this request, or settle it."""
        if isinstance(what, Outcome):
            if message is self.probe:
                self.probe = None
            self.window.talked(message, what)
        else:
            self._send(message, what)

    def _send(self, message: Received, request: Request | None = None) -> None:
        task = asyncio.create_task(self._request(message, request))
        self.requests.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.requests.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()
            self._tell()

    def send_probe(self) -> None:
        """Send one message to see whether the endpoint is up."""
        message = self.window.next()
        if message is not None:
            self.probe = message
            self._take(message)

    async def _request(self, message: Received, request: Request | None) -> None:
        """Send one message, and note what came of it."""
        request = request or self._prepared(message)
        answer = None if request is None else await self._client.post(request)
        probing = message is self.probe
        if probing:
            self.probe = None
        if answer is not None:
            fail_point("dispatch_answered")
            (self._probed if probing else self._answered)(message, answer)
        self.start()
        self._tell()

    def _prepared(self, message: Received) -> Request | None:
        """The request that a message becomes; None if it becomes none, and is settled."""
        if self.endpoint.reply and message.from_service is None:
            self.window.reject(message, "rejected", replies.TO_NOBODY)
            return None
        try:
            return self.made(message)
        except Exception as error:
            if not of_messages(error):
                raise
            self.window.reject(message, "rejected", said(error))
            return None

    def made(self, message: Received) -> Request:
        """The request that a message becomes."""
        if self.endpoint.method is not None:
            return xmlrpc.request(message, self.endpoint.method)
        return envelope.request(message, self.endpoint)

    def _leave_to_worker(self, message: Received) -> None:
        """Let a message of a dialog, and its key behind it, wait for somebody who can reply."""
        waiting = Waiting(
            lane=message.lane,
            shard=message.shard,
            attempts=message.attempt - 1,
            error=TALKS,
            awaits_handler=True,
            message_type=message.message_type,
        )
        self.window.wait(message, waiting)

    def _answered(self, message: Received, answer: Answer) -> None:
        if answer.meaning in UP:
            self.window.count(self._breaker.succeeded())
            self._settle(message, answer)
            return
        self.window.note(message, answer)
        if not self.condition.sends:
            # it is known to be down: this says nothing new, and nothing of the message
            self.window.put_back(message)
        elif answer.meaning is Meaning.GONE:
            self._disable(message, answer)
        else:
            self._failed(message, answer)

    def _settle(self, message: Received, answer: Answer) -> None:
        """Do with a message what an endpoint says that is up."""
        if answer.meaning is Meaning.DONE:
            self._done(message, answer)
            return
        self.window.note(message, answer)
        last = message.attempt >= self.endpoint.attempts
        if answer.meaning is Meaning.FAILED and not last:
            counted = self._waiting(message, answer)
            self.window.wait(message, counted)
            wait = f"in {counted.wait:g} s"
            self._log(log.warning, "message_failed", message, answer, next_attempt=wait)
            return
        reason = "rejected" if answer.meaning is Meaning.REJECTED else "failed"
        self._reject(message, reason, answer)

    def _done(self, message: Received, answer: Answer) -> None:
        if self._is_spoken(message):
            self.window.talked(message, Outcome(sent=True, reply=answer.reply))
        elif answer.reply is None:
            self.window.done(message)
        else:
            try:
                self.window.done(message, replies.to(message, answer.reply))
            except InvalidMessage as error:
                self._reject(message, "failed", replace(answer, error=f"its reply: {error}"))

    def _reject(self, message: Received, reason: str, answer: Answer) -> None:
        if self._is_spoken(message):
            self.window.talked(message, Outcome(reason=reason, error=answer.error))
        else:
            self.window.reject(message, reason, answer.error)
        self._log(log.error, "dead_letter", message, answer)

    def _failed(self, message: Received, answer: Answer) -> None:
        """Let the message wait; its attempt counts once the endpoint is known to be up."""
        counted = self._waiting(message, answer)
        # a message whose last attempt has failed is looked at again at once
        last = message.attempt >= self.endpoint.attempts
        suspect = replace(counted, wait=0.0) if last else counted
        if self._breaker.failed(suspect) or answer.retry_after is not None:
            self._breaker.reset()
            self.window.put_back(message)
            self._open(answer)
            return
        self.window.wait(message, replace(counted, attempts=message.attempt - 1))
        wait = f"in {counted.wait:g} s"
        self._log(log.warning, "message_failed", message, answer, next_attempt=wait)

    def _waiting(self, message: Received, answer: Answer) -> Waiting:
        """How the lane of a message goes on waiting, if this attempt counts."""
        wait = max(self.endpoint.wait_seconds(message.attempt), answer.retry_after or 0.0)
        return Waiting(
            lane=message.lane,
            shard=message.shard,
            attempts=message.attempt,
            error=answer.error,
            wait=wait,
        )

    def _open(self, answer: Answer) -> None:
        """The endpoint is down."""
        wait = max(self.endpoint.wait_seconds(1), answer.retry_after or 0.0)
        self.condition = Condition(
            state="open", paused=self.condition.paused, probe_in=wait, error=answer.error
        )
        self.to_write.append(lambda connection: self._book.down(connection, answer.error, wait))
        log.warning(
            "endpoint_down", endpoint=self.name, error=answer.error, next_attempt=f"in {wait:g} s"
        )

    def _disable(self, message: Received, answer: Answer) -> None:
        self.window.put_back(message)
        self.condition = Condition(state="disabled", error=answer.error)
        self.to_write.append(lambda connection: self._book.disable(connection, answer.error))
        log.error("endpoint_disabled", endpoint=self.name, error=answer.error)

    def _probed(self, message: Received, answer: Answer) -> None:
        """See from a probe whether the endpoint is up again."""
        if answer.meaning in UP:
            self._breaker.reset()
            self.condition = Condition(paused=self.condition.paused)
            self.to_write.append(self._book.up)
            log.info("endpoint_up", endpoint=self.name)
            self._settle(message, answer)
            return
        self.window.note(message, answer)
        if answer.meaning is Meaning.GONE:
            self._disable(message, answer)
            return
        self.window.put_back(message)
        wait = max(
            self.endpoint.wait_seconds(self.condition.failures + 1), answer.retry_after or 0.0
        )
        longest = self.endpoint.disable_after_seconds
        self.to_write.append(
            lambda connection: self._book.still_down(connection, answer.error, wait, longest)
        )

    def _log(
        self,
        say: Callable[..., Any],
        event: str,
        message: Received,
        answer: Answer,
        **more: str,
    ) -> None:
        say(
            event,
            endpoint=self.name,
            message_id=str(message.message_id),
            key=message.key,
            message_type=message.message_type,
            attempt=f"{message.attempt} of {self.endpoint.attempts}",
            error=answer.error,
            **more,
        )
