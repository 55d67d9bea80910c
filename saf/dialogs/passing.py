"""Passing on: messages that arrive on one of two joined dialogs are sent on the other.

A message is passed on in the transaction in which it arrives. Both ends here belong to one group,
so that one receiver at a time has both in hand, whichever way a message comes. They have the same
contract, and their lifetimes end at the same time.

``saf.resolved_conversation`` maps each of the two conversations to the other's end here, so both
directions use the same look-up. An End or an Error ends both ends here, and the row that joins them
is deleted. Messages from one side after the other has ended are dropped, as they would be at that
end; `pass_on` returns False, so that the caller can count them.

The signature of a message travels inside its successor (`saf.signing.origin`), if the dialog's
first message was signed: the id of the second dialog is then derived from the id of the first. A
large body is passed on in fragments of the same size, so that both dialogs number it alike.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from saf.dialogs.assembly import Assembled
from saf.dialogs.dialog import FRAGMENT_BYTES, Dialog, open_dialog
from saf.dialogs.facts import Facts
from saf.dialogs.statements import END, ERROR, EXPIRE, TIMER
from saf.errors import DialogEnded, DialogExpired, UnreadableBody, UnreadableHeaders
from saf.message import (
    DEFAULT_MAX_BYTES,
    HELLO,
    LINEAGE,
    ORIGIN,
    REDIRECTED,
    SIGNATURE,
    WHOLE,
    Exact,
)
from saf.signing.origin import envelope, is_signed, passed
from saf.transaction import enter

if TYPE_CHECKING:
    from saf.received import Received
    from saf.routing.resolved import Resolved
    from saf.transaction import Conn

OF_HOP = frozenset({HELLO, WHOLE, LINEAGE, SIGNATURE, ORIGIN, REDIRECTED})
"""Headers of one hop, which are not passed on."""

CONTINUE = f"""
WITH endpoint AS (
    INSERT INTO saf.conversation (handle, conversation_id, is_initiator, service, far_service,
        far_broker, contract, contract_version, group_id, expires_at, lineage)
    SELECT CAST(%(handle)s AS uuid), CAST(%(conversation_id)s AS uuid), true, service,
           CAST(%(to_service)s AS text), CAST(%(to_broker)s AS uuid), contract, contract_version,
           group_id, expires_at,
           (SELECT jsonb_build_array(jsonb_build_array(incarnation, 0)) FROM saf.broker
            WHERE incarnation > 1 AND CAST(%(derived)s AS boolean))
    FROM saf.conversation WHERE handle = CAST(%(before)s AS uuid)
    RETURNING *
), lifetime AS ({EXPIRE})
SELECT FROM endpoint
"""
JOIN = """
INSERT INTO saf.resolved_conversation (router, key, service, broker, handle)
SELECT far.service, CAST(near.conversation_id AS text), far.far_service, far.far_broker, far.handle
FROM saf.conversation near, saf.conversation far
WHERE (near.handle, far.handle) IN (
    (CAST(%(one)s AS uuid), CAST(%(other)s AS uuid)),
    (CAST(%(other)s AS uuid), CAST(%(one)s AS uuid)))
ON CONFLICT (key, router) DO UPDATE SET handle = excluded.handle
"""
PARTNER = """
SELECT handle FROM saf.resolved_conversation
WHERE router = CAST(%(router)s AS text) AND key = CAST(%(conversation_id)s AS text)
  AND handle IS NOT NULL
"""
SENT = "SELECT send_sequence FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid)"
PART = """
DELETE FROM saf.resolved_conversation
WHERE router = CAST(%(router)s AS text)
  AND key IN (CAST(%(one)s AS text), CAST(%(other)s AS text))
"""


def begin_partner(conn: Conn, dialog: Dialog, to: Resolved, *, signed: bool = False) -> Dialog:
    """Begin the dialog in which this one continues: from the same service to the resolved one.

    ``signed``: its id is derived from this dialog's, so that signatures can be verified there. If
    this broker was set back, an earlier end may have had the same id.
    """
    transaction = enter(conn)
    handle = uuid4()
    derived = passed(dialog.conversation_id, [dialog.service])
    transaction.execute(
        CONTINUE,
        {
            "handle": handle,
            "conversation_id": derived if signed else uuid4(),
            "derived": signed,
            "to_service": to.service,
            "to_broker": to.broker,
            "before": dialog.handle,
        },
    )
    transaction.execute(JOIN, {"one": dialog.handle, "other": handle})
    return open_dialog(conn, handle, signer=dialog.signer)


def partner(conn: Conn, dialog: Dialog) -> Dialog | None:
    """Return the end here that this one is joined with, if any."""
    params = {"router": dialog.service, "conversation_id": dialog.conversation_id}
    found = enter(conn).fetch(PARTNER, params)
    return open_dialog(conn, found[0][0], signer=dialog.signer) if found else None


def pass_on(
    conn: Conn, message: Received, dialog: Dialog, other: Dialog, **headers: object
) -> bool:
    """Send on the ``other`` end a message that has arrived on a dialog, with further headers.

    Return False if the other end has ended, and the message is dropped.
    """
    if message.message_type == TIMER:
        return True
    done = message.message_type in (END, ERROR)  # both ends have ended after an End or an Error
    sealed, fragment_bytes = _sealed(conn, message, dialog, other)
    with suppress(DialogEnded, DialogExpired):
        if message.message_type == END:
            other.end_as(conn, sealed)
        elif message.message_type == ERROR:
            code, text, original = _error(message)
            prefixed = f"router {dialog.service!r}: {text}"
            other.fail(enter(conn), code, prefixed, ending=True, original=original, headers=sealed)
        else:
            kept = sealed if sealed is not None else _kept(message)
            large = message.size > fragment_bytes
            body = message.open() if large else message.body
            other.say(
                conn,
                body,
                message_type=message.message_type,
                headers=Exact({**kept, **headers}),
                fragment_bytes=fragment_bytes,
                exactly=sealed is not None,
            )
            done = True
    if message.message_type in (END, ERROR):
        with suppress(DialogEnded):
            dialog.end(conn)
        keys = {"one": dialog.conversation_id, "other": other.conversation_id}
        enter(conn).execute(PART, {"router": dialog.service, **keys})
    return done


def _kept(message: Received) -> dict[str, Any]:
    """Return the headers of a message that are passed on."""
    return {name: v for name, v in message.exact_headers.items() if name not in OF_HOP}


def _sealed(
    conn: Conn, message: Received, dialog: Dialog, other: Dialog
) -> tuple[Exact | None, int]:
    """Return the headers with which a signature is passed on, and the size of a fragment.

    None if the message has no signature, or if it could not be verified there: the other dialog's
    id is not derived from this one's, or the message would have another number.
    """
    if not is_signed(message) or not _is_derived(dialog, other):
        return None, FRAGMENT_BYTES
    try:
        headers = message.exact_headers
    except UnreadableHeaders:
        return None, FRAGMENT_BYTES
    fragments, fragment_bytes = 1, max(message.size, 1)
    if isinstance(message, Assembled):
        fragments, fragment_bytes = message.fragments, message.fragment_bytes or FRAGMENT_BYTES
    ((sent,),) = enter(conn).fetch(SENT, {"handle": other.handle})
    keeps_number = message.message_type == ERROR or sent + fragments == message.sequence
    sealed = envelope(message, headers, dialog.service) if keeps_number else None
    if sealed is None or fragment_bytes > DEFAULT_MAX_BYTES:
        return None, FRAGMENT_BYTES
    return Exact({**_kept(message), ORIGIN: sealed}), fragment_bytes


def _is_derived(dialog: Dialog, other: Dialog) -> bool:
    first, second = (other, dialog) if dialog.is_initiator else (dialog, other)
    return passed(first.conversation_id, [dialog.service]) == second.conversation_id


def _error(message: Received) -> tuple[int, str, dict[str, Any]]:
    """Return the code and text of an Error, and its original form before it was passed on."""
    facts = Facts().with_error(message.body)
    code, text = facts.error_code or 0, facts.error_text or ""
    try:
        return code, text, dict(message.json()["original"])
    except (UnreadableBody, TypeError, KeyError, ValueError):
        return code, text, {"code": code, "text": text}
