"""The inbox behind a URL: an ASGI application that stores signed events, each once.

    app = saf.webhooks.inbox(engine, "billing", secrets=[secret])      # uvicorn consumers:app

It verifies the signature (`saf.signing.webhook`), and stores the event as a message for the
service. It remembers the event's id in the same transaction, so that an event is stored once even
if a lost answer makes the sender repeat it. This connects two installations that can reach each
other only by HTTPS: `saf dispatch` at one, this application at the other, exactly once in effect
and in the order of keys.

A signature covers the ``webhook-id``, the time of the request, and the body. So the event's id must
be the webhook-id, and is accepted once: a stored request cannot be altered to store another event.
Other ``ce-…`` headers are not signed: source, type, key and time of the event. An event as one JSON
object is signed as a whole. Senders whose ids are not their webhook-ids, or not unique among all
senders, need ``signed_ids=False``; then source and id identify an event.

    204    the event is stored, now or before
    400    it is not a CloudEvents 1.0 event, its id is not the signed one, or no broker takes it
    401    it is not signed by one of the secrets, or its time is out of range
    404    this broker has services, but not this one
    405    the request is not a POST
    408    the request took more than a minute to arrive
    409    a stored event from another source has the same id
    413    the request is larger than ``max_bytes``
    503    the database does not answer within 15 s, or ``at_once`` requests are in hand already:
           send it again later

The memory of ids is bounded: each stored event removes some that are older than ``remember_days``.
This time must be longer than senders keep retrying.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID, uuid5

import psycopg

from saf.database import fetch
from saf.database.bounds import GRACE_SECONDS, answer_within, shut
from saf.errors import InvalidMessage, NotVerified, SafError
from saf.message import CONTENT_TYPE, FIRST_DAY, LAST_DAY, OUT_OF_CALENDAR, Message, encode
from saf.receiving.link import connected
from saf.signing.webhook import key_of, verify
from saf.telemetry.logger import Log
from saf.webhooks import asgi
from saf.webhooks.asgi import Entrance, Full
from saf.webhooks.event import Event, NoEvent, event

if TYPE_CHECKING:
    from saf.receiving.link import Engine
    from saf.webhooks.asgi import App, Receive, Scope, Send

MAX_BYTES = 1 << 20
AT_ONCE = 200
BODY_SECONDS = 60.0
"""Longest time for a request's body to arrive, in seconds."""
REMEMBER_DAYS = 14.0
STORE_SECONDS = 10.0
"""Longest time for a statement, in seconds. The wait for its answer is a little longer."""

EVENTS = UUID("6f3b3a0e-6d2c-5d0b-9a39-0d7b7a2f3c11")
"""Namespace of message ids for events whose id is not a UUID."""

# Also in the application's own sessions, for this transaction only
BOUNDS = """
SELECT set_config('lock_timeout', '{milliseconds}', true),
       set_config('statement_timeout', '{milliseconds}', true)
"""
# One statement remembers and stores: even if each statement is a transaction of its own, a
# remembered event is stored. It waits for a concurrent transaction that stores the same event. At a
# server whose default is off, a crash could lose an event that was answered with 204.
STORE = """
WITH durable AS MATERIALIZED (
    SELECT CASE WHEN current_setting('synchronous_commit') IN ('off', 'local')
                THEN set_config('synchronous_commit', 'on', true) END
), here AS (
    SELECT NOT EXISTS (SELECT FROM saf.service)
        OR EXISTS (SELECT FROM saf.service WHERE name = %(service)s) AS lives
    FROM durable
), new AS (
    INSERT INTO saf.webhook (digest) SELECT %(known_by)s::bytea FROM here
    WHERE lives AND NOT EXISTS (SELECT FROM saf.webhook WHERE digest = %(digest)s)
    ON CONFLICT DO NOTHING RETURNING digest
), whole AS (
    INSERT INTO saf.webhook (digest) SELECT %(digest)s::bytea FROM new
    WHERE %(digest)s::bytea <> %(known_by)s::bytea
), stored AS (
    INSERT INTO saf.inbox
        (message_id, to_service, key, message_type, headers, body, created_at)
    SELECT %(message_id)s::uuid, %(service)s::text, %(key)s::text, %(message_type)s::text,
           %(headers)s::jsonb, %(body)s::bytea, %(created_at)s::timestamptz
    FROM new
)
SELECT lives FROM here
"""
# True for the same event. An event of another source with the same id is not remembered
REMEMBERED = "SELECT EXISTS (SELECT FROM saf.webhook WHERE digest = %(digest)s)"
# Each event adds two digests and removes a few more, so that little work accumulates. Digests that
# another transaction is removing are skipped.
FORGET = """
DELETE FROM saf.webhook WHERE digest = ANY (ARRAY(
    SELECT digest FROM saf.webhook
    WHERE stored_at < now() - make_interval(secs => %(seconds)s)
    ORDER BY stored_at LIMIT 5 FOR UPDATE SKIP LOCKED))
"""

log = Log("saf.webhooks")


def inbox(
    engine: Engine,
    service: str,
    *,
    secrets: str | Iterable[str],
    max_bytes: int = MAX_BYTES,
    at_once: int = AT_ONCE,
    remember_days: float = REMEMBER_DAYS,
    signed_ids: bool = True,
) -> App:
    """Return an ASGI application that stores signed events for a service.

    Args:
        engine: as for `saf.receive`; preferably a pool's ``connection``, as each event needs one.
        service: the service that the messages are for.
        secrets: one or several Standard Webhooks secrets; any may have signed.
        max_bytes: size of the largest request.
        at_once: requests that are processed at a time.
        remember_days: how long repeated events are recognised.
        signed_ids: True if an event's id must be the webhook-id, which is signed, as `saf dispatch`
            sends it. Otherwise, source and id identify an event; in headers they are not signed.

    Raises:
        UsageError: a secret is invalid.
    """
    known = [secrets] if isinstance(secrets, str) else list(secrets)
    for secret in known:
        key_of(secret)
    seconds = remember_days * 86400
    entrance = Entrance(at_once=at_once, max_bytes=max_bytes, seconds=BODY_SECONDS)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await asgi.live(receive, send)
            return
        status, reason = await _answer(scope, receive)
        headers = {"content-type": "text/plain; charset=utf-8"} if reason else {}
        await asgi.answer(send, status, headers, reason.encode())

    async def _answer(scope: Scope, receive: Receive) -> tuple[int, str]:
        if scope["type"] != "http" or scope["method"] != "POST":
            return 405, "send events by POST"
        try:
            async with entrance.let_in(scope, receive) as (headers, body):
                return await _stored(headers, body)
        except NotVerified as error:
            log.warning("webhook_refused", service=service, why=error.why)
            return 401, str(error)
        except Full as error:
            return 503, str(error)
        except asgi.TooLarge:
            return 413, f"more than {max_bytes:,} bytes"
        except asgi.Gone:
            return 408, "it took too long"

    async def _stored(headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
        signed_id = verify(headers, body, known)
        try:
            one = event(headers, body)
            if signed_ids:
                _check_id(one, signed_id)
            async with asyncio.timeout(STORE_SECONDS + GRACE_SECONDS):
                stored = await asyncio.to_thread(
                    _store, engine, service, one, seconds, signed_ids=signed_ids
                )
        except _Taken as error:
            log.warning("webhook_refused", service=service, why=str(error))
            return 409, str(error)
        except (NoEvent, InvalidMessage) as error:
            return 400, str(error)
        except _not_stored() as error:
            log.warning("webhook_not_stored", service=service, error=type(error).__name__)
            return 503, "try again later"
        return (204, "") if stored else (404, f"no service {service!r} here")

    return app


def _not_stored() -> tuple[type[Exception], ...]:
    """Return the exceptions of an engine whose database does not answer."""
    if "sqlalchemy" not in sys.modules:
        return psycopg.Error, SafError, OSError
    from sqlalchemy.exc import SQLAlchemyError

    return psycopg.Error, SafError, OSError, SQLAlchemyError


def _check_id(one: Event, signed_id: str) -> None:
    """Raise NoEvent if an event's id is not the signed one."""
    if one.id != signed_id:
        raise NoEvent("the event's id is not the webhook-id, which is signed")


class _Taken(Exception):
    """A stored event from another source has the same id."""

    def __str__(self) -> str:
        return "an event with this id has come from another source: ids must be unique"


def _store(
    engine: Engine, service: str, one: Event, seconds: float, *, signed_ids: bool = True
) -> bool:
    """Store an event, unless it is already stored; False if the service does not live here.

    Raises:
        _Taken: another event with the same id is stored.
    """
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
    params = {
        "service": service,
        "known_by": _digest(service, "" if signed_ids else one.source, one.id),
        "digest": _digest(service, one.source, one.id),
        "message_id": _uuid(one),
        "key": row.key,
        "message_type": row.message_type,
        "headers": row.headers,
        "body": row.body,
        "created_at": _moment(one.headers.get("time")),
        "seconds": seconds,
    }
    bounds = BOUNDS.format(milliseconds=round(STORE_SECONDS * 1000))
    with connected(engine) as link:
        descriptor = link.raw.pgconn.socket
        with (
            answer_within(STORE_SECONDS + GRACE_SECONDS, lambda: shut([descriptor])),
            replace(link, always=bounds).transaction(claims=False),
        ):
            ((is_local,),) = fetch(link.raw, STORE, params)
            # nothing was written if the id belongs to another event
            if is_local and not fetch(link.raw, REMEMBERED, params)[0][0]:
                raise _Taken
            link.raw.execute(FORGET, params)
    return bool(is_local)


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()


def _uuid(one: Event) -> UUID:
    """Return the event's id if it is a UUID; otherwise a UUID that is always the same for it."""
    try:
        return UUID(one.id)
    except ValueError:
        return uuid5(EVENTS, f"{one.source}\0{one.id}")


def _moment(value: object) -> datetime:
    """Return the event's time; the current time if the event has none.

    Some languages use a time before the calendar, or on its first day, for a missing one.

    Raises:
        NoEvent: no log takes the event's time.
    """
    now = datetime.now(UTC)
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else now
    except ValueError:
        return now
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if moment >= LAST_DAY:
        raise NoEvent(f"time: {value} {OUT_OF_CALENDAR}")
    return moment if moment >= FIRST_DAY else now
