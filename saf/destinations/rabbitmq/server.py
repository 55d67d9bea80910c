"""A channel of a RabbitMQ server, for one destination, using the client pika.

The client is asynchronous: it uses callbacks, and this module runs its loop until something
arrives. An error is recognised by its class, and by AMQP's reply code. If a later attempt may
succeed, it is `Unavailable`; if an operator must fix something, `Refused`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from saf.database import pinned
from saf.destinations.addresses import context_of, first_of
from saf.destinations.settings import rights, unusable
from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    from saf.destinations.rabbitmq import Rabbitmq

ERRORS = (AMQPError, AMQPConnectorException, OSError)
"""Errors that the client raises; the second one only while it connects."""
DENIED, NO_EXCHANGE, NOT_MET, NOT_ALLOWED = 403, 404, 406, 530
AT_ONCE = 200
"""Messages given to the client before it may call back."""
GOODBYE_SECONDS = 2.0
PAUSE_SECONDS = 0.001
NACK = pika.spec.Basic.Nack.INDEX


class Properties(pika.BasicProperties):  # type: ignore[misc] # it has no types
    """Message properties that are encoded already."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self.encoded = encoded

    def encode(self) -> list[bytes]:
        """Return the encoded properties as the client expects them."""
        return [self.encoded]


class NotAll(Exception):
    """The server stored only some of the messages."""

    def __init__(
        self, reason: str, there: npt.NDArray[np.bool_], returned: Collection[str]
    ) -> None:
        super().__init__(reason)
        self.there = there
        """For each message, True if it was confirmed."""
        self.returned = returned
        """Ids of the messages that no queue gets, which are confirmed too."""


class NotTaken(NotAll):
    """The server will never take one of the remaining messages."""


class Broken(NotAll):
    """The connection broke, or an answer timed out: the fate of the other messages is unknown."""

    def __init__(
        self, cause: Exception, there: npt.NDArray[np.bool_], returned: Collection[str]
    ) -> None:
        super().__init__(str(cause), there, returned)
        self.cause = cause


class NotNow(NotAll):
    """A queue refuses the remaining messages, and may take them later."""


class Channel:
    """A connection with a channel; not thread-safe."""

    heartbeat_seconds: ClassVar[int] = 0
    """Silence after which the server closes the connection, in seconds; 0: none."""

    def __init__(self, what: str, settings: Rabbitmq) -> None:
        self.what = what
        self._settings = settings
        self._error: BaseException | None = None
        self._connection: Any = None
        self._channel: Any = None
        first_of(settings.address.hosts, self._open, ERRORS)

    def _open(self, host: str, port: int) -> None:
        try:
            self._connect(host, port)
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _connect(self, host: str, port: int) -> None:
        bounds = self._settings.bounds
        self._error = None
        self._connection = pika.SelectConnection(
            _parameters(self._settings, host, port, self.heartbeat_seconds),
            on_open_callback=self._come,
            on_open_error_callback=self._failed,
            on_close_callback=self._failed,
        )
        self._wait(bounds.network_seconds)
        self.version = str(self._connection.server_properties["version"])
        self._channel = self._connection.channel(on_open_callback=self._come)
        self._channel.add_on_close_callback(self._failed)
        self._wait(bounds.statement_seconds)

    def _prepare(self) -> None:
        """Prepare the channel for its use."""

    def close(self) -> None:
        """Close the connection."""
        connection = self._connection
        if connection is None:
            return
        with suppress(AMQPError, OSError):
            if connection.is_open:
                connection.close()  # `_failed` ends the loop
                connection.ioloop.call_later(GOODBYE_SECONDS, connection.ioloop.stop)
                connection.ioloop.start()
        if not connection.is_closed and pinned.abort(connection):
            connection.ioloop.call_later(0, connection.ioloop.stop)
            connection.ioloop.start()
        self._connection = None
        connection.ioloop.close()

    # Callbacks of the client

    def _come(self, *_: object) -> None:
        self._connection.ioloop.stop()

    def _failed(self, _: object, error: BaseException) -> None:
        self._error = self._error or error
        if self._connection is not None:
            self._connection.ioloop.stop()

    def _wait(self, seconds: float) -> None:
        """Run the client's loop until it is stopped, as long as there is progress in time.

        Raises:
            TimeoutError: no progress within ``seconds``.
        """
        ioloop = self._connection.ioloop
        seen, late, timer = self._progress(), False, None

        def look() -> None:
            nonlocal seen, late, timer
            now = self._progress()
            if late := now == seen:
                ioloop.stop()
            else:
                seen, timer = now, ioloop.call_later(seconds, look)

        timer = ioloop.call_later(seconds, look)
        ioloop.start()
        ioloop.remove_timeout(timer)
        if self._error is not None:
            raise self._error
        if late:
            raise TimeoutError(f"no answer for {seconds:g} s")

    def _progress(self) -> int:
        """Return a number that rises while the server answers."""
        return 0


class Link(Channel):
    """A destination's connection, with a channel that confirms; not thread-safe."""

    def __init__(self, name: str, settings: Rabbitmq) -> None:
        self._tag = 0
        """Number of the last message sent on the channel."""
        self._sending: _Sending | None = None
        super().__init__(f"destination {name!r}", settings)

    def _prepare(self) -> None:
        seconds, exchange = self._settings.bounds.statement_seconds, self._settings.exchange
        self._channel.add_on_return_callback(self._returned)
        self._channel.confirm_delivery(self._confirmed, callback=self._come)
        self._wait(seconds)
        if exchange:
            self._channel.exchange_declare(exchange, passive=True, callback=self._come)
            self._wait(seconds)

    def publish(
        self, topics: Sequence[str], properties: Sequence[bytes], bodies: Sequence[bytes]
    ) -> None:
        """Publish messages, and wait until all are confirmed.

        A full queue refuses messages, and may still have taken later ones. So no more messages are
        sent after a refusal. The missing messages are published again, in order and fewer at a
        time, as long as the queue takes some of them.

        Raises:
            NotTaken: a message has no queue, or is too large.
            NotNow: a queue refuses all missing messages.
            Broken: the server stopped answering.
        """
        confirmed, returned, reason = np.zeros(len(bodies), bool), set[str](), ""
        limit = self._settings.step_rows
        while not confirmed.all():
            rest = np.flatnonzero(~confirmed)
            sending = self._sending = _Sending(before=self._tag, count=len(rest), most=limit)
            try:
                self._send(sending, ((topics[n], properties[n], bodies[n]) for n in rest.tolist()))
            except ERRORS as error:
                confirmed[rest], returned = sending.taken, returned | sending.returned
                if isinstance(error, ChannelClosedByBroker) and error.reply_code == NOT_MET:
                    raise NotTaken(error.reply_text, confirmed, returned) from None
                raise Broken(error, confirmed, returned) from error
            confirmed[rest] = sending.taken
            returned, reason = returned | sending.returned, sending.reason or reason
            taken = int(sending.taken.sum())
            if not taken:
                why = "a queue is full, or cannot write: it has refused messages"
                raise NotNow(why, confirmed, returned)
            limit = min(limit, 2 * taken)
        if returned:
            raise NotTaken(reason, confirmed, returned)

    def _send(self, sending: _Sending, messages: Iterator[tuple[str, bytes, bytes]]) -> None:
        """Send messages until one is refused, and wait for all answers."""
        exchange = self._settings.exchange
        publish, ioloop = self._channel.basic_publish, self._connection.ioloop

        def more() -> None:
            if self._sending is not sending or self._error is not None or sending.full:
                return
            room = min(AT_ONCE, sending.most - sending.on_their_way)
            for topic, encoded, body in islice(messages, room):
                self._tag += 1
                sending.on_their_way += 1
                publish(exchange, topic, body, Properties(encoded), mandatory=True)
            if self._error is None and self._tag < sending.before + sending.count:
                ioloop.call_later(0 if sending.on_their_way < sending.most else PAUSE_SECONDS, more)

        more()
        while not sending.over:
            self._wait(self._settings.bounds.statement_seconds)

    def close(self) -> None:
        """Close the connection."""
        self._sending = None
        super().close()

    # Callbacks of the client

    def _confirmed(self, frame: Any) -> None:
        sending, answer = self._sending, frame.method
        if sending is None:
            return
        last = answer.delivery_tag - sending.before
        first = sending.first if answer.multiple else last - 1
        new = ~sending.answered[first:last]
        if answer.INDEX == NACK:
            sending.refused[first:last] |= new
            sending.full = True
        sending.on_their_way -= int(new.sum())
        sending.answered[first:last] = True
        while sending.first < sending.count and sending.answered[sending.first]:
            sending.first += 1
        if sending.over:
            self._connection.ioloop.stop()

    def _returned(self, _: object, method: Any, properties: Any, __: object) -> None:
        if self._sending is not None:
            self._sending.returned.add(str(properties.message_id))
            self._sending.reason = (
                f"{method.reply_text}: no queue is bound for routing key "
                f"{method.routing_key!r} at exchange {method.exchange!r}"
            )

    def _progress(self) -> int:
        return self._sending.first if self._sending is not None else 0


@dataclass(kw_only=True)
class _Sending:
    """Progress of messages that are being sent."""

    before: int
    """Number of the last message sent before these."""
    count: int
    most: int
    """Most messages in flight."""
    on_their_way: int = 0
    first: int = 0
    """Index of the first message without an answer."""
    full: bool = False
    """True if a queue has refused a message."""
    reason: str = ""
    returned: set[str] = field(default_factory=set)
    answered: npt.NDArray[np.bool_] = field(init=False)
    """For each message, True if it was confirmed or refused."""
    refused: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.answered = np.zeros(self.count, bool)
        self.refused = np.zeros(self.count, bool)

    @property
    def over(self) -> bool:
        """True if all sent messages are answered, and no more will be sent."""
        return self.first == self.count or (self.full and not self.on_their_way)

    @property
    def taken(self) -> npt.NDArray[np.bool_]:
        """For each message, True if the server has taken or returned it."""
        return self.answered & ~self.refused


@contextmanager
def errors(what: str, settings: Rabbitmq) -> Iterator[None]:
    """Translate the client's errors."""
    try:
        yield
    except ERRORS as error:
        raise translated(what, settings, error) from None


def translated(what: str, settings: Rabbitmq, error: Exception) -> SafError:
    """Return saf's error for an error of the client."""
    code = getattr(error, "reply_code", 0)
    text = settings.redact(getattr(error, "reply_text", "") or _inner(error))
    if isinstance(error, ProbableAuthenticationError):
        return Refused(what, "the login is refused", "fix username and password in saf.toml")
    if isinstance(error, ProbableAccessDeniedError) or code == NOT_ALLOWED:
        host = settings.address.virtual_host
        reason = f"this user has no access to the virtual host {host!r}"
        return Refused(what, reason, "fix its address, or give its user access")
    if code == DENIED:
        return Refused(what, text, rights(what))
    if code == NO_EXCHANGE:
        return unusable(what, text, "declare the exchange, or name another one in saf.toml")
    unavailable = Unavailable(what, f"{settings.server}: {text}")
    unavailable.hangs = isinstance(error, TimeoutError)
    return unavailable


def _inner(error: BaseException) -> str:
    """Return the text of an error, or of the one wrapped in it: the client wraps some."""
    wrapped = [*getattr(error, "exceptions", ()), getattr(error, "exception", None), *error.args]
    for inner in wrapped:
        if isinstance(inner, BaseException):
            return _inner(inner)
    return str(error) or type(error).__name__


def _parameters(
    settings: Rabbitmq, host: str, port: int, heartbeat: int
) -> pika.ConnectionParameters:
    secure = pika.SSLOptions(context_of(settings), host) if settings.address.tls else None
    return pika.ConnectionParameters(
        host=host,
        port=port,
        virtual_host=settings.address.virtual_host,
        credentials=pika.PlainCredentials(settings.username, settings.secret),
        ssl_options=secure,
        socket_timeout=settings.bounds.network_seconds,
        stack_timeout=settings.bounds.network_seconds,
        connection_attempts=1,
        heartbeat=heartbeat,
        client_properties={"connection_name": "saf"},
    )
