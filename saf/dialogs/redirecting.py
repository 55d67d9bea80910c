"""Redirecting: a routing service puts two ends together, and then both do without it.

A routing service that redirects has no end of a dialog. It passes the initiator's messages on
unchanged, to the service that the first one was resolved to:

    initiator ── 1, 2, 3 ──▶ router ── 1, 2, 3 ──▶ target
              ◀───────────────── 1 ───────────────
              ── direct ───▶ router
              ── 4, 5 ──────────────────────────▶ target

- Its header `REDIRECTED` names the router, and the broker that the messages came from: an answer to
  a message whose end is gone goes there.
- The target answers directly, because the first message names the initiator's broker. Its first
  answer names the router, in the same header.
- With that answer, the initiator learns its true far end: the service, and the broker that has
  answered. The last message that it sends to the router has the type `DIRECT`. It travels as all
  earlier ones have, so no message of the dialog comes after it.

The ends take numbers in order, so it does not matter that two ways carry them.

The routing service remembers a resolution for as long as messages may come: until `DIRECT`, an End
or an Error, or the end of the dialog's lifetime. From then on, a resolution is forgotten like any
other if it is not used (`saf.routing.resolved`). So repeats find the same target.

A message is redirected once: by a second routing service of this kind, it could not be told which
of the two the initiator speaks to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import psycopg

from saf.database import of_broker
from saf.dialogs.introduction import introduction
from saf.dialogs.statements import COMPARE, DIRECT, END, ERROR, JSON, Code
from saf.errors import UnreadableHeaders
from saf.message import REDIRECTED, as_json
from saf.received import Received

# Only an answer of another service than the addressed one is asked about. The rows are locked
GO_DIRECT = f"""
WITH redirected AS (
    SELECT c.handle, c.far_service AS router, c.far_broker AS at, a.service, a.broker
    FROM unnest(%(conversation_id)s::uuid[], %(from_service)s::text[], %(source)s::uuid[],
                %(router)s::text[]) AS a (conversation_id, service, broker, router)
    JOIN saf.conversation c USING (conversation_id)
    WHERE c.is_initiator AND c.far_service = a.router AND a.service <> a.router
), known AS (
    UPDATE saf.conversation c SET far_service = r.service, far_broker = r.broker
    FROM redirected r WHERE c.handle = r.handle
    RETURNING c.handle, c.service, c.conversation_id, r.router, r.at
)
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, message_type, headers, body)
SELECT gen_random_uuid(), service, router, at, CAST(conversation_id AS text), conversation_id,
       true, '{DIRECT}', {JSON}, convert_to('{{}}', 'UTF8')
FROM known
"""

REMEMBER = """
UPDATE saf.resolved_conversation r SET kept_until = one.until
FROM unnest(%(keys)s::text[], %(until)s::timestamptz[]) AS one (key, until)
WHERE r.key = one.key AND r.router = %(router)s
"""
PASSING = """
SELECT count(*) FILTER (WHERE handle IS NULL AND kept_until > now()),
       count(*) FILTER (WHERE handle IS NOT NULL) / 2  -- a row for each way
FROM saf.resolved_conversation WHERE router = %(router)s
"""

SET_BACK = "SELECT incarnation > 1 FROM saf.broker"
TELL = f"""
INSERT INTO saf.outbox (message_id, from_service, to_service, to_broker, key, conversation_id,
                        from_initiator, message_type, headers, body)
VALUES (gen_random_uuid(), %(router)s, %(service)s, %(broker)s, CAST(%(conversation_id)s AS text),
        %(conversation_id)s, false, '{ERROR}', {JSON}, %(body)s)
"""


def go_direct(raw: psycopg.Connection[Any], answers: Iterable[Received]) -> None:
    """Address initiators' messages to the targets of these first answers, if they are redirected.

    The routers learn that no more messages come.
    """
    told = [
        (one.conversation_id, one.from_service, one.source, router)
        for one in answers
        if one.source is not None and (router := _said(one).get("by"))
    ]
    if told:
        names = ("conversation_id", "from_service", "source", "router")
        raw.execute(GO_DIRECT, dict(zip(names, map(list, zip(*told, strict=True)), strict=True)))


def redirected_by(message: Received) -> str | None:
    """Return the router that has redirected a message, if any."""
    return _said(message).get("by")


def may_go_direct(message: Received) -> str | None:
    """Return the router that an initiator can do without, by the first message to its target.

    None if a router has given the message another key: all messages must get it.
    """
    keeps_key = message.key == str(message.conversation_id)
    return redirected_by(message) if keeps_key else None


def sent_from(message: Received) -> UUID | None:
    """Return the broker of a message's sender, whether or not a router has redirected it."""
    named = _said(message).get("from") if message.from_initiator else None
    try:
        return UUID(named) if named else message.source
    except ValueError:
        return message.source


def headers(message: Received, router: str) -> dict[str, Any]:
    """Return the headers of a message that a router redirects."""
    said = {"by": router}
    if message.source is not None:
        said["from"] = str(message.source)
    return {**message.exact_headers, REDIRECTED: said}


def remember(raw: psycopg.Connection[Any], router: str, messages: Iterable[Received]) -> None:
    """Note until when the resolutions of redirected messages are needed."""
    until: dict[str, str | None] = {}
    for one in messages:
        if one.from_initiator is None or one.conversation_id is None:
            continue
        if one.message_type in (END, ERROR, DIRECT):
            until[str(one.conversation_id)] = None
        elif one.sequence == 1:
            until[str(one.conversation_id)] = _end_of_lifetime(one)
    if until:
        params = {"keys": [*until], "until": [*until.values()], "router": router}
        raw.execute(REMEMBER, params)


def passing(raw: psycopg.Connection[Any], router: str) -> tuple[int, int]:
    """Return the numbers of open dialogs that a router redirects, and of those it forwards."""
    ((redirects, forwards),) = raw.execute(PASSING, {"router": router}).fetchall()
    return int(redirects), int(forwards)


def tell(raw: psycopg.Connection[Any], message: Received, router: str, error: str) -> None:
    """Tell the initiator that its dialog cannot be resolved.

    A later message says nothing about that: its first one may be a dead letter on its way, which
    can be retried. But a broker that was set back may have forgotten the dialog.
    """
    if message.sequence != 1 or message.message_type == COMPARE:
        if not of_broker(raw, SET_BACK)[0]:
            return
        error = f"{error}: the router's broker was set back"
    # like a message to oneself, it has no number, because the router has no end
    body = as_json({"code": int(Code.UNRESOLVED), "text": error}).encode()
    params = {
        "router": router,
        "service": message.from_service,
        "broker": sent_from(message),
        "conversation_id": message.conversation_id,
        "body": body,
    }
    raw.execute(TELL, params)


def _end_of_lifetime(message: Received) -> str:
    """Return the end of a dialog's lifetime, by its first message, as PostgreSQL's text."""
    ends = introduction(message).expires_at
    return "infinity" if ends is None else ends.isoformat()


def _said(message: Received) -> Mapping[str, str]:
    """Return the content of the header `REDIRECTED`; only texts count."""
    try:
        said = message.headers.get(REDIRECTED) if message.may_say(REDIRECTED) else None
    except (UnreadableHeaders, AttributeError):
        said = None
    texts = said if isinstance(said, dict) else {}
    return {name: value for name, value in texts.items() if isinstance(value, str)}
