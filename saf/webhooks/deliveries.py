"""A broker behind a URL: an ASGI application that other installations' forwarders deliver to.

    app = saf.webhooks.broker(dsn, secrets=[secret])                  # uvicorn partners:app

At the other installation this is a destination of kind ``https``, exactly once. Each chunk of
messages goes to the code that stores at a broker by a dsn. Its marks drop repeats and fence an
older owner in the storing transaction. `saf.destinations.https.wire` defines the protocol.

A request is accepted only with a current signature by one of the ``secrets``. The owner of a secret
may deliver as the forwarder of any source, for any service; ``sources`` and ``services`` limit
that. So give each partner a separate application. A source vouches only for its own senders
(`saf.webhooks.event`).

Memory is bounded: at most ``at_once`` requests of ``max_bytes`` are processed at a time; further
clients are told to retry later. A request must state a current signature before it is read
(`saf.webhooks.asgi`). The signature can be verified only once the body is complete, so a proxy
should buffer slow bodies, as nginx does by default.

It needs the extra ``forwarder``, and the rights of `saf grant --role forwarder`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from saf.database import Dsn
from saf.errors import MissingExtra, NotVerified, SafError, Unavailable, UsageError
from saf.signing.webhook import key_of, verify
from saf.telemetry.logger import Log
from saf.webhooks import asgi
from saf.webhooks.asgi import Entrance, Full

if TYPE_CHECKING:
    from saf.destinations import Refusal
    from saf.destinations.https.chunks import Given
    from saf.destinations.postgresql.inbox import PostgresInbox
    from saf.webhooks.asgi import App, Receive, Scope, Send

MAX_BYTES = 128 << 20
AT_ONCE = 8
BODY_SECONDS = 300.0
"""Longest time for a request's body to arrive, in seconds."""

Answer = tuple[int, bytes]
"""A status and a body."""

log = Log("saf.webhooks")


def broker(
    dsn: str | Dsn,
    *,
    secrets: str | Iterable[str],
    sources: Iterable[UUID | str] | None = None,
    services: Iterable[str] | None = None,
    max_bytes: int = MAX_BYTES,
    at_once: int = AT_ONCE,
) -> App:
    """Return an ASGI application that stores deliveries from forwarders of other installations.

    Args:
        dsn: the broker's database.
        secrets: one or several Standard Webhooks secrets; any may have signed.
        sources: broker_ids whose messages are accepted. Default: all.
        services: the broker's services that may be addressed. Default: all.
        max_bytes: size of the largest request. A forwarder's chunk has 32 MiB, or one more message.
        at_once: requests that are processed at a time.

    Raises:
        UsageError: a secret or a source is invalid.
        MissingExtra: Arrow is not installed.
    """
    known = [secrets] if isinstance(secrets, str) else list(secrets)
    for secret in known:
        key_of(secret)
    if not known:
        raise UsageError("without a secret, anybody could deliver: give one")
    try:
        store = _Store(
            dsn if isinstance(dsn, Dsn) else Dsn(dsn),
            sources=None if sources is None else frozenset(UUID(str(source)) for source in sources),
            services=None if services is None else frozenset(services),
            max_bytes=max_bytes,
        )
    except ImportError:
        raise MissingExtra("forwarder", "saf.webhooks.broker") from None
    except ValueError:
        raise UsageError("a source is a broker_id, as `saf broker list` shows it") from None
    entrance = Entrance(at_once=at_once, max_bytes=max_bytes, seconds=BODY_SECONDS)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await asgi.live(receive, send, at_end=store.close)
            return
        status, content = await _answered(scope, receive)
        length = {"content-type": "application/json", "content-length": str(len(content))}
        await asgi.answer(send, status, length, content)

    async def _answered(scope: Scope, receive: Receive) -> Answer:
        if scope["type"] != "http" or scope["method"] != "POST":
            return store.refuse(405, "unusable", "not a POST", "deliver by kind https")
        try:
            async with entrance.let_in(scope, receive) as (headers, body):
                # outside of the event loop: other requests are served while this one is verified
                # and stored
                return await asyncio.to_thread(_verified, headers, body)
        except NotVerified as error:
            log.warning("delivery_refused", why=error.why)
            cure = "use the secret of the other end, and let both clocks be right"
            return store.refuse(401, "not_signed", error.why, cure)
        except Full as error:
            return store.refuse(503, "unavailable", str(error))
        except asgi.TooLarge:
            return store.refuse(413, "too_large", f"more than {max_bytes:,} bytes at a time")
        except asgi.Gone:
            return store.refuse(408, "unavailable", "the request took too long to come")

    def _verified(headers: Mapping[str, str], body: bytes) -> Answer:
        verify(headers, body, known)
        return store.answer(headers.get("content-type", ""), body)

    return app


class _NotAllowed(Exception):
    """The application does not accept this source."""


class _Store:
    """Processes signed requests; safe to use from many threads."""

    def __init__(
        self,
        dsn: Dsn,
        *,
        sources: Collection[UUID] | None,
        services: Collection[str] | None,
        max_bytes: int,
    ) -> None:
        from saf.destinations import Refusal
        from saf.destinations.https import chunks, wire
        from saf.destinations.postgresql import Postgresql, inbox
        from saf.webhooks.event import vouched_by

        self._chunks, self._refusal, self._wire = chunks, Refusal, wire
        self._vouched_by = vouched_by
        self._at, self._inbox = Postgresql(dsn=dsn), inbox
        self._sources, self._services = sources, services
        self._max_bytes = max_bytes
        self._idle: list[PostgresInbox] = []
        """Connected inboxes that are not in use."""

    def refuse(self, status: int, error: str, reason: str, cure: str = "") -> Answer:
        """Return a refusal."""
        return status, self._wire.written(error=error, reason=reason, cure=cure)

    def answer(self, kind: str, body: bytes) -> Answer:
        """Return the answer to a signed request."""
        wire = self._wire
        try:
            answer: dict[str, Any] | Refusal = (
                self._stored(self._chunks.chunk_of(body))
                if kind == wire.ARROW
                else self._asked(wire.read(body))
            )
        except wire.OtherVersion:
            return 400, wire.written(error="version", speaks=wire.VERSION)
        except _NotAllowed as error:
            return self.refuse(403, "not_allowed", str(error), "name it there in `sources`")
        except wire.NotUnderstood as error:
            return self.refuse(400, "unusable", str(error), "see docs/destinations.md")
        except SafError as error:
            if isinstance(error, Unavailable):
                log.warning("delivery_not_stored", error=str(error))
            answer = self._refusal(error=error)
        status, fields = (200, answer) if isinstance(answer, dict) else wire.told(answer)
        return status, wire.written(**fields)

    def _asked(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question."""
        wire, question = self._wire, document.get("ask")
        if question == wire.IDENTITY:
            with self._an_inbox() as inbox:
                inbox.connect()
                return {"identity": str(inbox.identity()), "max_bytes": self._max_bytes}
        if question == wire.KNOWN:
            try:
                source = UUID(document["source"])
            except wire.UNLIKE:
                raise wire.NotUnderstood("its source is missing") from None
            self._allow(source)
            known = self._at.known("here", source, role="deliver")
            return {"identity": str(known.destination), **wire.of_known(known)}
        if question == wire.GUARANTEE:
            given = self._at.guarantee("here")
            promise = given.promise.partition("; ")[2]
            return {"server": given.server, "promise": promise, "more": [*given.more]}
        raise wire.NotUnderstood("its request is unknown")

    def _stored(self, given: Given) -> dict[str, Any] | Refusal:
        """Store a chunk, or return its marks."""
        chunk = given.chunk
        self._allow(chunk.source)
        with self._an_inbox() as inbox:
            if not given.store:
                return {"marks": self._wire.of_marks(inbox.marks(chunk))}
            chunk = replace(chunk, rows=self._vouched_by(chunk.rows, chunk.source))
            done = inbox.store(chunk, exactly_once=given.exactly_once)
        if isinstance(done, self._refusal):
            return done
        return {
            "messages": done.messages,
            "dropped": done.dropped,
            "marks": self._wire.of_marks(done.marks),
        }

    def _allow(self, source: UUID) -> None:
        if self._sources is not None and source not in self._sources:
            raise _NotAllowed(f"it does not accept messages from source {source}")

    def close(self) -> None:
        """Close the unused connections."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    @contextmanager
    def _an_inbox(self) -> Iterator[PostgresInbox]:
        """Lend an inbox to one thread at a time."""
        try:
            one = self._idle.pop()
        except IndexError:
            one = self._inbox.PostgresInbox("here", self._at.dsn, services=self._services)
        try:
            yield one
        except Unavailable:
            self.close()  # the others may be lost, too: connect again
            raise
        finally:
            self._idle.append(one)
