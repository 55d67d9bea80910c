"""Groups: related conversations, which one receiver at a time has in hand.

Each dialog begins a group of its own, or joins that of another one (``related=``). A receiver holds
the groups of its messages until its transaction ends; others, in whatever shards, wait for it. So
what belongs to one piece of business is handled by one at a time, and may keep its state in the
group: any JSON value, which commits with the rest.
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

# As a receiver locks it, so that two who count up the state do it one after the other
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
    """The state of a dialog's group, which is locked until the transaction ends; at first None.

    Raises:
        DialogNotFound: it is not in this database any more.
    """
    transaction = enter(conn)
    found = transaction.fetch(STATE, {"handle": dialog.handle})
    if not found:
        raise _not_found(transaction, dialog.handle)
    return None if found[0][0] is None else json.loads(found[0][0])


def set_group_state(conn: Conn, dialog: Dialog, state: Any) -> None:
    """Set it to any JSON value; None forgets it.

    Raises:
        DialogNotFound: it is not in this database any more.
    """
    transaction = enter(conn)
    value = None if state is None else json.dumps(state)
    if not transaction.fetch(SET_STATE, {"handle": dialog.handle, "state": value}):
        raise _not_found(transaction, dialog.handle)


def move_dialog(conn: Conn, dialog: Dialog, related: Dialog | None) -> None:
    """Let a dialog belong to the group of another one, or, with None, to one of its own.

    It waits for who has either group in hand.

    Raises:
        DialogNotFound: one of them is not in this database any more.
    """
    transaction = enter(conn)
    params = {
        "handle": dialog.handle,
        "related": related and related.handle,
        "group_id": None if related else uuid4(),
    }
    for one in filter(None, (dialog, related)):
        if not transaction.fetch(EXISTS, {"handle": one.handle}):
            raise _not_found(transaction, one.handle)
    transaction.fetch(GROUPS, params)
    if related is None:
        transaction.execute(NEW_GROUP, params)
    transaction.fetch(MOVE_TO_GROUP, params)


def _not_found(transaction: Transaction, handle: UUID) -> DialogNotFound:
    ((database,),) = transaction.fetch("SELECT current_database()")
    return DialogNotFound(handle, str(database))
