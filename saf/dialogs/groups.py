"""Groups: related conversations, which one receiver at a time has in hand.

Each dialog begins a group of its own, or joins the group of another dialog (``related=``). A
receiver holds the groups of its messages until its transaction ends; receivers of any other shards
wait for it. So one receiver at a time handles one piece of business. It may keep the state of the
business in the group: any JSON value, which commits with the rest.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from saf.dialogs.dialog import Dialog
from saf.errors import DialogNotFound
from saf.transaction import Transaction, enter

if TYPE_CHECKING:
    from saf.transaction import Conn

# Locks the group's row as a receiver does, so that concurrent changes of the state happen in turn
STATE = """
SELECT CAST(state AS text) FROM saf.conversation_group
WHERE group_id = (SELECT group_id FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid))
FOR NO KEY UPDATE
"""
SET_STATE = """
UPDATE saf.conversation_group SET state = CAST(%(state)s AS jsonb)
WHERE group_id = (SELECT group_id FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid))
RETURNING group_id
"""
NEW_GROUP = "INSERT INTO saf.conversation_group (group_id) VALUES (CAST(%(group_id)s AS uuid))"
GROUPS = """
SELECT group_id FROM saf.conversation_group WHERE group_id IN (
    SELECT group_id FROM saf.conversation
    WHERE handle IN (CAST(%(handle)s AS uuid), CAST(%(related)s AS uuid)))
ORDER BY group_id FOR NO KEY UPDATE
"""
MOVE_TO_GROUP = """
UPDATE saf.conversation SET group_id = coalesce(
    CAST(%(group_id)s AS uuid),
    (SELECT group_id FROM saf.conversation WHERE handle = CAST(%(related)s AS uuid)))
WHERE handle = CAST(%(handle)s AS uuid) RETURNING handle
"""
EXISTS = "SELECT handle FROM saf.conversation WHERE handle = CAST(%(handle)s AS uuid)"


def group_state(conn: Conn, dialog: Dialog) -> Any:
    """Return the state of a dialog's group, None at first; lock it until the transaction ends.

    Raises:
        DialogNotFound: the dialog is no longer in this database.
    """
    transaction = enter(conn)
    found = transaction.fetch(STATE, {"handle": dialog.handle})
    if not found:
        raise _not_found(transaction, dialog.handle)
    return None if found[0][0] is None else json.loads(found[0][0])


def set_group_state(conn: Conn, dialog: Dialog, state: Any) -> None:
    """Set the state of a dialog's group to any JSON value; None removes the state.

    Raises:
        DialogNotFound: the dialog is no longer in this database.
    """
    transaction = enter(conn)
    value = None if state is None else json.dumps(state)
    if not transaction.fetch(SET_STATE, {"handle": dialog.handle, "state": value}):
        raise _not_found(transaction, dialog.handle)


def move_dialog(conn: Conn, dialog: Dialog, related: Dialog | None) -> None:
    """Move a dialog to the group of ``related``; with None, to a new group of its own.

    This waits for a receiver that has either group in hand.

    Raises:
        DialogNotFound: one of the dialogs is no longer in this database.
    """
    transaction = enter(conn)
    params = {
        "handle": dialog.handle,
        "related": related and related.handle,
        "group_id": None if related else uuid4(),
    }
    for member in filter(None, (dialog, related)):
        if not transaction.fetch(EXISTS, {"handle": member.handle}):
            raise _not_found(transaction, member.handle)
    transaction.fetch(GROUPS, params)
    if related is None:
        transaction.execute(NEW_GROUP, params)
    transaction.fetch(MOVE_TO_GROUP, params)


def _not_found(transaction: Transaction, handle: UUID) -> DialogNotFound:
    ((database,),) = transaction.fetch("SELECT current_database()")
    return DialogNotFound(handle, str(database))
