"""Passing on: messages that arrive on one of two joined dialogs are sent on the other.

A message is passed on in the transaction in which it arrives. Both ends here belong to one group,
so that one receiver at a time has both in hand, whichever way a message comes. They have the same
contract, and their lifetimes end at the same time.

``saf.resolved_conversation`` maps each of the two conversations to the other's end here, so both
directions use the same look-up. An End or an Error ends both ends here, and the row that joins them
is deleted. Messages from one side after the other has ended are dropped, as they would be at that
end; `pass_on` returns False, so that the caller can count them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from saf.dialogs.dialog import FRAGMENT_BYTES, Dialog, open_dialog
from saf.dialogs.facts import Facts
from saf.dialogs.statements import END, ERROR, EXPIRE, HELLO, TIMER
from saf.errors import DialogEnded, DialogExpired, UnreadableBody
from saf.message import LINEAGE, SIGNATURE, WHOLE, Exact
from saf.transaction import enter

if TYPE_CHECKING:
    from saf.received import Received
    from saf.routing.resolved import Resolved
    from saf.transaction import Conn

CONTINUE = f"""
WITH endpoint AS (
    INSERT INTO saf.conversation (handle, conversation_id, is_initiator, service, far_service,
        far_broker, contract, contract_version, group_id, expires_at)
    SELECT CAST(%(handle)s AS uuid), CAST(%(conversation_id)s AS uuid), true, service,
           CAST(%(to_service)s AS text), CAST(%(to_broker)s AS uuid), contract, contract_version,
           group_id, expires_at
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
PART = """
DELETE FROM saf.resolved_conversation
WHERE router = CAST(%(router)s AS text)
  AND key IN (CAST(%(one)s AS text), CAST(%(other)s AS text))
"""


def begin_partner(conn: Conn, dialog: Dialog, to: Resolved) -> Dialog:
    """Begin the dialog in which this one continues: from the same service to the resolved one."""
    transaction = enter(conn)
    handle = uuid4()
    transaction.execute(
        CONTINUE,
        {
            "handle": handle,
            "conversation_id": uuid4(),
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
    passed = message.message_type in (END, ERROR)  # both ends have ended after an End or an Error
    with suppress(DialogEnded, DialogExpired):
        if message.message_type == END:
            other.end(conn)
        elif message.message_type == ERROR:
            code, text, original = _error(message)
            prefixed = f"router {dialog.service!r}: {text}"
            other.fail(enter(conn), code, prefixed, ending=True, original=original)
        else:
            own = (HELLO, WHOLE, LINEAGE, SIGNATURE)
            kept = {n: value for n, value in message.exact_headers.items() if n not in own}
            large = message.size > FRAGMENT_BYTES
            body = message.open() if large else message.body
            all_headers = Exact({**kept, **headers})
            other.say(conn, body, message_type=message.message_type, headers=all_headers)
            passed = True
    if message.message_type in (END, ERROR):
        with suppress(DialogEnded):
            dialog.end(conn)
        keys = {"one": dialog.conversation_id, "other": other.conversation_id}
        enter(conn).execute(PART, {"router": dialog.service, **keys})
    return passed


def _error(message: Received) -> tuple[int, str, dict[str, Any]]:
    """Return the code and text of an Error, and its original form before it was passed on."""
    facts = Facts().with_error(message.body)
    code, text = facts.error_code or 0, facts.error_text or ""
    try:
        return code, text, dict(message.json()["original"])
    except (UnreadableBody, TypeError, KeyError, ValueError):
        return code, text, {"code": code, "text": text}
