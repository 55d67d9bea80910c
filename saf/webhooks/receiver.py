"""The inbox behind a URL: an ASGI application that stores signed events, each of them once.

    app = saf.webhooks.inbox(engine, "billing", secrets=[secret])      # uvicorn consumers:app

It verifies the signature (`saf.signing.webhook`), and stores the event as a message for the
service. The event's source and id are remembered in the same transaction, so that an event which is
sent again, because an answer got lost, is stored once. Two installations that see each other by
HTTPS alone are connected by it: `saf dispatch` at one, this at the other, exactly once in effect
and in the order of keys.

    204    it is stored, now or before
    400    it is no event of CloudEvents 1.0, or no broker would store it
    401    it is not signed by one of the secrets, or not now
    404    this broker has services, and not this one
    405    it is no POST
    408    it took more than a minute to come
    413    it is larger than ``max_bytes``
    503    the database does not answer: send it again later

What is remembered is bounded: with each event that is stored, some older than ``remember_days`` are
forgotten. It must be longer than a sender goes on trying.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

import psycopg

from saf.errors import InvalidMessage, NotVerified, SafError
from saf.logger import Log
from saf.message import CONTENT_TYPE, OUT_OF_CALENDAR, Message, encode, in_calendar
from saf.receiving.link import connected
from saf.signing.webhook import key_of, verify
from saf.webhooks import asgi
from saf.webhooks.event import Event, NoEvent, event

if TYPE_CHECKING:
    from saf.receiving.link import Engine
    from saf.webhooks.asgi import App, Receive, Scope, Send

MAX_BYTES = 1 << 20
BODY_SECONDS = 60.0
"""How long the body of a request may take to come, in seconds."""
REMEMBER_DAYS = 14.0

EVENTS = UUID("6f3b3a0e-6d2c-5d0b-9a39-0d7b7a2f3c11")
"""The namespace of ids of messages whose event has an id that is no UUID."""

# Remembered and stored by one statement: also where each statement is a transaction of its own, an
# event that is remembered is stored. It waits for a transaction that stores the same event.
STORE = """
WITH here AS (
    SELECT NOT EXISTS (SELECT FROM saf.service)
        OR EXISTS (SELECT FROM saf.service WHERE name = %(service)s) AS lives
), new AS (
    INSERT INTO saf.webhook (digest) SELECT %(digest)s::bytea FROM here WHERE lives
    ON CONFLICT DO NOTHING RETURNING digest
), stored AS (
    INSERT INTO saf.inbox
        (message_id, to_service, key, message_type, headers, body, created_at)
    SELECT %(message_id)s::uuid, %(service)s::text, %(key)s::text, %(message_type)s::text,
           %(headers)s::jsonb, %(body)s::bytea, %(created_at)s::timestamptz
    FROM new
)
SELECT lives FROM here
"""
# A few with each event, so that there is never much to do; whoever has one in hand goes on with it
FORGET = """
DELETE FROM saf.webhook WHERE digest = ANY (ARRAY(
    SELECT digest FROM saf.webhook
    WHERE stored_at < now() - make_interval(secs => %(seconds)s)
    ORDER BY stored_at LIMIT 3 FOR UPDATE SKIP LOCKED))
"""

log = Log("saf.webhooks")


def inbox(
    engine: Engine,
    service: str,
    *,
    secrets: str | Iterable[str],
    max_bytes: int = MAX_BYTES,
    remember_days: float = REMEMBER_DAYS,
) -> App:
    """Return an ASGI application that stores signed events for a service.

    Args:
        engine: as for `saf.receive`: best a pool's ``connection``, because each event takes one.
        service: whom the messages are for.
        secrets: one or several of Standard Webhooks, any of which may have signed.
        max_bytes: the largest request.
        remember_days: for how long an event that is sent again is recognised.

    Raises:
        UsageError: a secret is none.
    """
    known = [secrets] if isinstance(secrets, str) else list(secrets)
    for secret in known:
        key_of(secret)
    seconds = remember_days * 86400

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await asgi.live(receive, send)
            return
        status, why = await _answer(scope, receive)
        headers = {"content-type": "text/plain; charset=utf-8"} if why else {}
        await asgi.answer(send, status, headers, why.encode())

    async def _answer(scope: Scope, receive: Receive) -> tuple[int, str]:
        if scope["type"] != "http" or scope["method"] != "POST":
            return 405, "send events by POST"
        try:
            body = await asgi.body_of(scope, receive, most=max_bytes, seconds=BODY_SECONDS)
        except asgi.TooLarge:
            return 413, f"more than {max_bytes:,} bytes"
        except asgi.Gone:
            return 408, "it took too long"
        return await _stored(asgi.headers_of(scope), body)

    async def _stored(headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        try:
            verify(headers, body, known)
        except NotVerified as error:
            log.warning("webhook_refused", service=service, why=error.why)
            return 401, str(error)
        try:
            one = event(headers, body)
            stored = await asyncio.to_thread(_store, engine, service, one, seconds)
        except (NoEvent, InvalidMessage) as error:
            return 400, str(error)
        except (psycopg.Error, SafError, OSError) as error:
            log.warning("webhook_not_stored", service=service, error=type(error).__name__)
            return 503, "try again later"
        return (204, "") if stored else (404, f"there is no service {service!r} here")

    return app


def _store(engine: Engine, service: str, one: Event, seconds: float) -> bool:
    """Store an event, unless it is stored already; False if the service does not live here."""
    carried = dict(one.headers)
    if one.content_type is not None:
        carried[CONTENT_TYPE] = one.content_type
    row = encode(
        Message(
            service=service,
            body=one.body,
            key=one.key,
            message_type=one.type,
            headers=carried,
        )
    )
    parts = (service, one.source, one.id)
    text = "\0".join(parts)
    params = {
        "service": service,
        "digest": hashlib.sha256(text.encode(errors="replace")).digest(),
        "message_id": _uuid(one),
        "key": row.key,
        "message_type": row.message_type,
        "headers": row.headers,
        "body": row.body,
        "created_at": _moment(one.headers.get("time")),
        "seconds": seconds,
    }
    with connected(engine) as link, link.transaction(claims=False):
        ((lives,),) = link.raw.execute(STORE, params).fetchall()
        link.raw.execute(FORGET, params)
    return bool(lives)


def _uuid(one: Event) -> UUID:
    """The event's id if it is a UUID; otherwise one that is always the same for this event."""
    try:
        return UUID(one.id)
    except ValueError:
        return uuid5(EVENTS, f"{one.source}\0{one.id}".encode(errors="replace").decode())


def _moment(said: object) -> datetime:
    """When the event happened, as it says itself; now, if it does not.

    Raises:
        NoEvent: it says a time that no log takes.
    """
    try:
        moment = datetime.fromisoformat(said) if isinstance(said, str) else datetime.now(UTC)
    except ValueError:
        return datetime.now(UTC)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if not in_calendar(moment):
        raise NoEvent(f"time: {said} {OUT_OF_CALENDAR}")
    return moment
