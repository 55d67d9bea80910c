"""Sending: the requests in flight and their messages.

At most ``max_in_flight`` requests are in flight, and as many messages as they may hold may be
answered and not marked. So after a kill, the endpoint gets no more than twice that many messages
again. `saf.receiving.dispatch.judging` defines the effects of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from saf.failpoints import fail_point
from saf.log.rates import per_second
from saf.received import Received
from saf.receiving.dispatch import envelope, replies
from saf.receiving.dispatch.envelope import Request
from saf.receiving.dispatch.http import Client
from saf.receiving.dispatch.judging import Judge
from saf.receiving.dispatch.replies import Answer, Meaning
from saf.receiving.dispatch.settings import Apart, Bucket, Endpoint
from saf.receiving.dispatch.talking import Talked
from saf.receiving.dispatch.window import Walk, Window
from saf.setaside.dropped import EXPIRED
from saf.setaside.isolation import of_messages, said
from saf.telemetry.metrics import ANSWERS, DISPATCH_SECONDS, IN_FLIGHT, count, observe
from saf.telemetry.tracing import dispatching

BATCH_BYTES = 1 << 20
"""Size of bodies in bytes from which a request gets no further message."""


class Sender:
    """Sends messages of a window to an endpoint.

    ``tell`` is called at any news. The session sends messages of dialogs, by `talk`, because it
    knows whose turn it is.
    """

    def __init__(
        self,
        window: Window,
        judge: Judge,
        endpoint: Endpoint,
        client: Client,
        tell: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.window = window
        self.requests: set[asyncio.Task[None]] = set()
        self.talks: list[Walk] = []
        """Messages of dialogs that count as in flight, and are not checked yet."""
        self.probe: Walk | None = None
        """Message sent to check whether the endpoint is up."""
        self.failure: BaseException | None = None
        """Error of a request that is saf's own fault."""
        self.stopping = False
        """True if no more messages are to be sent."""
        self.clock = datetime.now(UTC), time.monotonic()
        """The database's clock, by which messages expire, and the monotonic clock at that time."""
        self.bucket = Bucket(per_second=per_second(endpoint.rate)) if endpoint.rate else None
        self._apart = (
            Apart(seconds=1 / per_second(rate)) if (rate := endpoint.rate_per_key) else None
        )
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timers that wake resting lanes."""
        self._judge = judge
        self._client = client
        self._tell = tell
        self._throttled: asyncio.TimerHandle | None = None

    async def cancel(self) -> None:
        """Give up all requests in flight."""
        if self._throttled is not None:
            self._throttled.cancel()
        for timer in self._timers.values():
            timer.cancel()
        for request in self.requests:
            request.cancel()
        if self.requests:
            await asyncio.wait(self.requests)

    def start(self) -> None:
        """Send as many messages as may be in flight."""
        window, requests = self.window, self.requests
        while (
            self._judge.condition.sends
            and not self.stopping
            and len(requests) < self.endpoint.max_in_flight
            and self._has_room
            and window.anything_ready
            and (walk := self._next()) is not None
        ):
            if self._rests(walk):
                continue
            if not self._within_rate():
                window.put_back(walk)
                break
            self._take(walk, *self._others(walk))

    @property
    def _has_room(self) -> bool:
        """True if one more message may be in flight."""
        most = self.endpoint.max_in_flight * self.endpoint.messages
        in_flight = self.window.in_flight
        return in_flight < most and in_flight + self.window.unmarked < 2 * most

    def _next(self) -> Walk | None:
        """Return the next message to send; expired ones before it become dead letters."""
        while (walk := self.window.next()) is not None and self._has_expired(walk):
            self.window.reject(walk, "expired", EXPIRED)
            self._tell()
        return walk

    def _has_expired(self, walk: Walk) -> bool:
        expiry = walk.message.expires_at
        now, read_at = self.clock  # this machine's clock may be set at any time
        return expiry is not None and expiry <= now + timedelta(seconds=time.monotonic() - read_at)

    def _others(self, walk: Walk) -> list[Walk]:
        """Return further messages to send in one request with a message."""
        further: list[Walk] = []
        if self.endpoint.messages == 1 or not self._may_be_together(walk):
            return further
        size = walk.message.size
        most = self.endpoint.messages
        while len(further) + 1 < most and size < BATCH_BYTES and self._has_room:
            of_key = self.endpoint.batch_of == "key"
            one = self.window.next_of(walk) if of_key else self._next()
            if one is None:
                break
            if self._rests(one):
                continue
            apart = of_key and self._has_expired(one)  # a dead letter once it is first of its key
            if apart or not self._may_be_together(one) or not self._within_rate():
                self.window.put_back(one)
                break
            further.append(one)
            size += one.message.size
        return further

    def _may_be_together(self, walk: Walk) -> bool:
        return not walk.alone and not self._judge.is_spoken(walk)

    def _rests(self, walk: Walk) -> bool:
        """Return whether a message's key has to rest; if so, it rests, and a timer wakes it."""
        if self._apart is None:
            return False
        loop, lane = asyncio.get_running_loop(), walk.message.lane
        wait = self._apart.wait(lane, loop.time())
        if wait > 0:
            self.window.rest(walk)
            self._timers[lane] = loop.call_later(wait, self._wake, lane)
        return wait > 0

    def _wake(self, lane: str) -> None:
        self._timers.pop(lane, None)
        self.window.wake(lane)
        self.start()
        self._tell()

    def _within_rate(self) -> bool:
        """Return whether the rate allows one more message now; if not, continue when it does."""
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

    def _take(self, walk: Walk, *further: Walk) -> None:
        """Process messages that are in flight from now on."""
        if self._apart is not None:
            for item in (walk, *further):
                self._apart.sent(item.message.lane, asyncio.get_running_loop().time())
        if not self._judge.is_spoken(walk):
            self._send([walk, *further])
        elif self.endpoint.reply:
            self.talks.append(walk)
            self._tell()
        else:
            self._no_probe(walk)
            self._judge.leave_to_worker(walk)
            self._tell()

    def talk(self, walk: Walk, what: Request | Talked) -> None:
        """Send a message of a dialog as this request, or settle it."""
        if isinstance(what, Talked):
            self._no_probe(walk)
            self.window.talked(walk, what)
        elif self._judge.condition.sends or walk is self.probe:
            self._send([walk], what)
        else:
            self.window.put_back(walk)

    def reject(self, walk: Walk, error: str) -> None:
        """Settle a message that cannot be sent."""
        self._no_probe(walk)
        self.window.reject(walk, "rejected", error)

    def _no_probe(self, walk: Walk) -> None:
        """Note that a message is not sent; if it was the probe, another one will be."""
        if walk is self.probe:
            self.probe = None

    def _send(self, walks: list[Walk], request: Request | None = None) -> None:
        task = asyncio.create_task(self._request(walks, request))
        self.requests.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.requests.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()
            self._tell()

    def send_probe(self) -> None:
        """Send one message to check whether the endpoint is up; skip those that cannot be sent."""
        while self.probe is None and (walk := self._next()) is not None:
            self.probe = walk
            self._take(walk)

    async def _request(self, walks: list[Walk], request: Request | None) -> None:
        """Send one message, or several together, and note the result."""
        if len(walks) == 1:
            walks[0].alone = False
        if request is None:
            walks, request = self._prepared(walks)
        answer = None if request is None else await self._post(walks, request)
        probing = any(walk is self.probe for walk in walks)
        if probing:
            self.probe = None
        if answer is not None:
            fail_point("dispatch_answered")
            if len(walks) > 1:
                self._judge.answered_together(walks, answer)
            elif probing:
                self._judge.probed(walks[0], answer)
            else:
                self._judge.answered(walks[0], answer)
        if (task := asyncio.current_task()) is not None:
            self.requests.discard(task)  # this request has ended, and the next one gets its place
        self.start()
        self._tell()

    async def _post(self, walks: list[Walk], request: Request) -> Answer:
        endpoint = self._judge.name
        count(IN_FLIGHT, 1, endpoint=endpoint)
        try:
            with dispatching(endpoint, [walk.message for walk in walks]) as traced:
                request = replace(request, headers=traced.going_on(request.headers))
                answer = await self._client.post(request)
                problem = None if answer.meaning is Meaning.DONE else answer.meaning.value
                traced.answered(answer.status, problem)
        finally:
            count(IN_FLIGHT, -1, endpoint=endpoint)
        count(ANSWERS, endpoint=endpoint, outcome=answer.meaning)
        observe(DISPATCH_SECONDS, answer.seconds, endpoint=endpoint)
        return answer

    def _prepared(self, walks: list[Walk]) -> tuple[list[Walk], Request | None]:
        """Return the request for messages, and the messages that it contains.

        A message that cannot be sent is settled. Among several, it is first put back, to be sent
        alone; the messages after it follow it.
        """
        requests: dict[Walk, Request | bytes] = {}
        for place, walk in enumerate(walks):
            message = walk.message
            if self.endpoint.reply and message.from_service is None:
                self.reject(walk, replies.TO_NOBODY)
                continue
            try:
                requests[walk] = (
                    envelope.event(message, self.endpoint)
                    if self.endpoint.mode == "batch"
                    else self.made(message)
                )
            except Exception as error:
                if not of_messages(error):
                    raise
                if len(walks) > 1:
                    walk.alone = True
                    for one in reversed(walks[place:]):
                        self.window.put_back(one)
                    break
                self.reject(walk, said(error))
        if not requests:
            return walks, None
        first = next(iter(requests.values()))
        if isinstance(first, Request):
            return [*requests], first
        events = {
            one.message.message_id: event
            for one, event in requests.items()
            if isinstance(event, bytes)
        }
        return [*requests], envelope.together(events)

    def made(self, message: Received) -> Request:
        """Return the request for a message."""
        if self._client.call is not None:
            return self._client.call.request(message)
        return envelope.request(message, self.endpoint)
