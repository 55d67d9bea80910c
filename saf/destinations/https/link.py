"""The forwarder's side: a link to a broker behind a URL, and its inbox as a destination.

`Link` sends signed requests, one after the other, over one connection. It uses Python's own
`http.client`, so a forwarder needs no more packages, and its driver no Arrow. It follows no
redirects, ignores proxies in the environment, and verifies certificates. Each answer has a time
limit (`saf.database.bounds`), however slowly its bytes arrive, and a limit on its size.

`RemoteInbox` stores a chunk by one request. The other end (`saf.webhooks.deliveries`) passes it to
the same code that stores at a broker with a dsn: in one transaction, it refuses an older epoch,
drops repeats, writes the rest, and moves the marks. So nothing is lost or doubled if an answer gets
lost, if the other end is killed in the middle, or if a process wakes up late.
"""

from __future__ import annotations

import http.client
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from saf.database.bounds import Waiting, answer_within
from saf.destinations import Chunk, Refusal, Stored
from saf.destinations.addresses import connect, context_of
from saf.destinations.https import wire
from saf.destinations.https.wire import (
    ARROW,
    UNLIKE,
    NotUnderstood,
    OtherVersion,
    Said,
    refused,
    to_marks,
)
from saf.destinations.marks import Known, Mark, Place
from saf.destinations.settings import Guarantee, unusable
from saf.errors import Refused, Rejected, SafError, Unavailable
from saf.failpoints import fail_point
from saf.signing.webhook import key_of, sign

if TYPE_CHECKING:
    from saf.destinations.https import Https

LARGEST_ANSWER = 64 << 20
TOO_LARGE, NO_APPLICATION = 413, (404, 405, 411, 501)
LATER = (408, 425, 429)
SHOWN = 100
"""Bytes to show of an answer that is not understood."""


class _Connection(http.client.HTTPConnection):
    """A connection whose socket can be cut at any time until `end`.

    `http.client` closes a connection as soon as an answer declares itself the last one, and
    continues to read the answer. So `cut` uses a separate socket object for the same connection.
    """

    def __init__(self, settings: Https, context: ssl.SSLContext | None) -> None:
        address = settings.address
        super().__init__(address.host, address.port)
        self.default_port = 443 if address.tls else 80
        self._own: socket.socket | None = None
        self._network_seconds = settings.bounds.network_seconds
        self._context = context

    def connect(self) -> None:
        connection = connect(self.host, self.port, self._network_seconds)
        try:
            self._own = connection.dup()
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_hostname=self.host)
            connection.settimeout(None)  # the link keeps time
        except BaseException:
            connection.close()
            raise
        self.sock = connection

    def end(self) -> None:
        """Close the connection; no more answers are read."""
        self.close()
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def cut(self) -> None:
        """Stop waiting on the connection; called by another thread."""
        if (own := self._own) is not None:
            with suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)

    def is_usable(self) -> bool:
        """Return True if it is connected, and the other side has not closed the connection."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)


class Link:
    """A destination's link; not thread-safe."""

    def __init__(self, name: str, settings: Https) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self._context = self._tls() if settings.address.tls else None
        self._connection = _Connection(settings, self._context)

    def close(self) -> None:
        """Close the connection."""
        self._connection.end()

    def identity(self) -> UUID:
        """Ask the broker for its identity."""
        with self._reading():
            return UUID(self.ask(wire.IDENTITY)["identity"])

    def known(self, source: UUID) -> Known:
        """Ask the broker for its marks of a source."""
        with self._reading():
            return wire.to_known(self.ask(wire.KNOWN, source=str(source)))

    def guarantee(self) -> Guarantee:
        """Ask the broker for its database's promise."""
        with self._reading():
            answer = self.ask(wire.GUARANTEE)
            findings = [(str(finding), str(cure)) for finding, cure in answer["more"]]
            return Guarantee(
                server=f"{answer['server']}, at {self.settings.server}",
                promise=f"{self.settings.quality.replace('_', ' ')}; {answer['promise']}",
                more=findings,
            )

    def ask(self, question: str, **fields: Any) -> Said:
        """Ask the broker a question.

        Raises the broker's refusal, or `Unavailable`.
        """
        body = wire.written(ask=question, **fields)
        answer = self.post(body, wire.JSON, self.settings.bounds.statement_seconds)
        assert not isinstance(answer, Refusal)  # noqa: S101 - a question has no rows
        return answer

    def post(
        self, body: Any, kind: str, seconds: float, chunk: Chunk | None = None
    ) -> Said | Refusal:
        """Send a signed body, such as that of ``chunk``, and return the broker's answer.

        Raises the broker's refusal unless it names rows of the chunk, or `Unavailable`.
        """
        status, reason, answer = self._answered(body, kind, seconds)
        try:
            message = wire.read(answer)
        except OtherVersion as error:
            raise self._unlike(error.version) from None
        except NotUnderstood:
            raise self._of_another(status, reason, answer) from None
        with self._reading():
            if status != http.client.OK:
                if message["error"] == "version":
                    raise self._unlike(message["speaks"])
                refusal = refused(self.what, message, chunk)
                if refusal.rows is None:
                    raise refusal.error
                return refusal
        return message

    def _answered(self, body: Any, kind: str, seconds: float) -> tuple[int, str, bytes]:
        key = key_of(self.settings.secret.get_secret_value())
        headers = {
            "content-type": kind,
            "accept": wire.JSON,
            **sign(str(uuid4()), int(time.time()), body, [key]),
        }
        connection = self._connection
        if not connection.is_usable():
            connection.end()
        waiting: Waiting | None = None
        try:
            with answer_within(seconds, connection.cut) as waiting:
                assert waiting is not None  # noqa: S101 - seconds are given
                # a server that stops reading early may have sent the reason
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request("POST", self.settings.address.path, body, headers)
                with connection.getresponse() as answer:
                    text = answer.read(LARGEST_ANSWER + 1)
        except (OSError, http.client.HTTPException) as error:
            connection.end()
            raise self._translated(error, waiting) from None
        except BaseException:
            connection.end()
            raise
        too_long = len(text) > LARGEST_ANSWER
        breaks_off = waiting.given_up or (answer.length and not too_long)
        if too_long or breaks_off or answer.will_close:
            connection.end()
        if breaks_off:
            raise self._translated(ConnectionResetError("its answer breaks off"), waiting)
        if too_long:
            raise Unavailable(self.what, f"its answer has more than {LARGEST_ANSWER:,} bytes")
        return answer.status, answer.reason, text

    def _translated(self, error: Exception, waiting: Waiting | None) -> SafError:
        server = self.settings.server
        if isinstance(error, ssl.SSLCertVerificationError):
            return unusable(
                self.what,
                f"the certificate of {server} is not accepted: {error.verify_message}",
                "name the certificates that have signed it as ca_file in saf.toml",
            )
        if waiting is not None and waiting.given_up:
            return Unavailable(self.what, f"{server}: {waiting}", hangs=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        return Unavailable(self.what, f"{server}: {reason}", hangs=isinstance(error, TimeoutError))

    def _of_another(self, status: int, reason: str, answer: bytes) -> SafError:
        """Return the error for an answer from another server, such as a proxy."""
        server = self.settings.server
        excerpt = " ".join(answer[:SHOWN].decode(errors="replace").split())
        text = self.settings.redact(f"{server} answers {status} {reason}: {excerpt}")
        if status == TOO_LARGE:
            return Rejected(self.what, text)
        if status in LATER or status >= http.client.INTERNAL_SERVER_ERROR:
            return Unavailable(self.what, text)
        return unusable(
            self.what, text, "let its URL lead to saf.webhooks.broker, and everything be passed on"
        )

    def _unlike(self, version: object) -> Refused:
        return unusable(
            self.what,
            f"{self.settings.server} speaks version {version!r} of the protocol, and this "
            f"forwarder version {wire.VERSION}",
            "install the same version of saf-outbox at both ends",
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Translate errors of reading an answer."""
        try:
            yield
        except wire.UNLIKE as error:
            if isinstance(error, SafError):
                raise
            raise Unavailable(
                self.what,
                f"{self.settings.server} sent an answer that is not understood "
                f"({type(error).__name__})",
            ) from None

    def _tls(self) -> ssl.SSLContext:
        settings = self.settings
        try:
            return context_of(settings)
        except OSError as error:  # also raised for a wrong format
            text = error.strerror or str(error)
            raise unusable(
                self.what, f"its certificates cannot be read: {text}", "fix saf.toml, or the files"
            ) from None


@contextmanager
def linked(name: str, settings: Https) -> Iterator[Link]:
    """Yield a link for a few questions."""
    link = Link(name, settings)
    try:
        yield link
    finally:
        link.close()


class RemoteInbox:
    """An inbox as a `saf.destinations.Destination`, which connects at the first chunk."""

    def __init__(self, name: str, settings: Https) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self._name = name
        self._link: Link | None = None
        self._identity: UUID | None = None
        self._most: int | None = None

    def identity(self) -> UUID:
        """Return the inbox's broker_id."""
        if self._identity is None:
            self.connect()
        assert self._identity is not None  # noqa: S101 - set by connect()
        return self._identity

    def connect(self) -> None:
        """Ask for the inbox's identity. If this fails, nothing was sent."""
        answer = self._linked().ask("identity")
        try:
            self._identity = UUID(answer["identity"])
            self._most = int(answer["max_bytes"])
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not name the inbox's broker") from None

    def store(self, chunk: Chunk, *, exactly_once: bool) -> Stored | Refusal:
        """Store a chunk; see `saf.destinations.Destination`."""
        fail_point("mom_insert")
        answer = self._given(chunk, store=True, exactly_once=exactly_once)
        fail_point("mom_commit")
        if isinstance(answer, Refusal):
            return answer
        try:
            return Stored(
                messages=int(answer["messages"]),
                dropped=int(answer["dropped"]),
                marks=to_marks(answer["marks"]),
            )
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not list what it stored") from None

    def marks(self, chunk: Chunk) -> Mapping[Place, Mark]:
        """Return how far the lanes and shards of a chunk are stored; see `Destination.marks`."""
        answer = self._given(chunk, store=False, exactly_once=False)
        if isinstance(answer, Refusal):
            raise answer.error
        try:
            return to_marks(answer["marks"])
        except UNLIKE:
            raise Unavailable(self.what, "its answer does not list what it stored") from None

    def close(self) -> None:
        """Close the connection, if one is open."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _given(self, chunk: Chunk, *, store: bool, exactly_once: bool) -> Said | Refusal:
        from saf.destinations.https.chunks import body_of  # needs Arrow, which drivers lack

        body = body_of(chunk, store=store, exactly_once=exactly_once)
        if self._most is None:
            self.connect()
        if self._most is not None and body.size > self._most:
            raise Rejected(
                self.what,
                f"{body.size:,} bytes are more than the max_bytes of its application, "
                f"{self._most:,}",
            )
        return self._linked().post(body, ARROW, self.settings.bounds.chunk_seconds, chunk)

    def _linked(self) -> Link:
        if self._link is None:
            self._link = Link(self._name, self.settings)
        return self._link
