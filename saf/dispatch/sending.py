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
from uuid import UUID

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

BATCH_BYTES = 1 << 20
"""A request gets no further message once the bodies of its messages have so many bytes."""

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
        self._alone: set[UUID] = set()
        """The ids of messages that are to be sent alone, because they have failed together."""

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
        most = self.endpoint.max_in_flight * self.endpoint.messages
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
            self._take(message, *self._others(message))

    def _others(self, message: Received) -> list[Received]:
        """More messages, to be sent by one request together with a message."""
        others: list[Received] = []
        size = message.size
        if not self._may_be_together(message):
            return others
        while len(others) + 1 < self.endpoint.messages and size < BATCH_BYTES:
            of_key = self.endpoint.batch_of == "key"
            one = self.window.next_of(message) if of_key else self.window.next()
            if one is None:
                break
            if not self._may_be_together(one) or not self._within_rate():
                self.window.put_back(one)
                break
            others.append(one)
            size += one.size
        return others

    def _may_be_together(self, message: Received) -> bool:
        return message.message_id not in self._alone and not self._is_spoken(message)

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

    def _take(self, message: Received, *others: Received) -> None:
        """Begin with messages that are in flight from now on."""
        if not self._is_spoken(message):
            self._send([message, *others])
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
            self._send([message], what)

    def _send(self, messages: list[Received], request: Request | None = None) -> None:
        task = asyncio.create_task(self._request(messages, request))
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

    async def _request(self, messages: list[Received], request: Request | None) -> None:
        """Send one message, or several together, and note what came of them."""
        if len(messages) == 1:
            self._alone.discard(messages[0].message_id)
        if request is None:
            messages, request = self._prepared(messages)
        answer = None if request is None else await self._client.post(request)
        probing = any(message is self.probe for message in messages)
        if probing:
            self.probe = None
        if answer is not None:
            fail_point("dispatch_answered")
            if len(messages) > 1:
                self._answered_together(messages, answer)
            else:
                (self._probed if probing else self._answered)(messages[0], answer)
        self.start()
        self._tell()

    def _prepared(self, messages: list[Received]) -> tuple[list[Received], Request | None]:
        """The request that messages become, and those that it holds.

        One that becomes none is settled; where there are several, it has its turn alone, and those
        behind it follow.
        """
        made: dict[Received, Request | bytes] = {}
        for place, message in enumerate(messages):
            if self.endpoint.reply and message.from_service is None:
                self.window.reject(message, "rejected", replies.TO_NOBODY)
                continue
            try:
                made[message] = (
                    envelope.event(message, self.endpoint)
                    if self.endpoint.mode == "batch"
                    else self.made(message)
                )
            except Exception as error:
                if not of_messages(error):
                    raise
                if len(messages) > 1:
                    self._alone.add(message.message_id)
                    for one in reversed(messages[place:]):
                        self.window.put_back(one)
                    break
                self.window.reject(message, "rejected", said(error))
        if not made:
            return messages, None
        first = next(iter(made.values()))
        if isinstance(first, Request):
            return [*made], first
        events = {one.message_id: event for one, event in made.items() if isinstance(event, bytes)}
        return [*made], envelope.together(events)

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

    def _answered_together(self, messages: list[Received], answer: Answer) -> None:
        """Note the answer to several messages.

        If it is bad, one of them may be to blame. So each is sent alone next.
        """
        if answer.meaning is Meaning.DONE:
            self.window.count(self._breaker.succeeded())
            for message in messages:
                self.window.done(message)
            return
        self.window.note(messages[0], answer)
        for message in reversed(messages):
            self.window.put_back(message)
        if self.condition.sends and answer.meaning is Meaning.GONE:
            self._disable(answer)
        elif self.condition.sends and answer.retry_after is not None:
            self._open(answer)
        else:
            self._alone.update(message.message_id for message in messages)

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
            self.window.put_back(message)
            self._disable(answer)
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

    def _disable(self, answer: Answer) -> None:
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
            self.window.put_back(message)
            self._disable(answer)
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
