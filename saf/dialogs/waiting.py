"""Waiting for the next message of a dialog: a call that returns the answer.

    answer = dialog.wait(engine, "delivery", timeout=30)

The wait receives the conversation by `saf.receive(…, conversation=dialog)`, in a transaction of its
own, which has committed when the call returns. So the code after it handles the message at most
once: if the process ends before, the message is not handed out again. For exactly once, work in the
block of `saf.receive` instead. If the inbox notifies, the message wakes the wait; otherwise it
polls like any receiver.

Messages come in order. If another type is first than the one waited for, it stays first: it waits
for a receiver of its type, and `UnexpectedMessage` is raised. An End or an Error is received, and
then raised, because no answer follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from saf.database import fetch
from saf.dialogs.facts import Facts
from saf.dialogs.statements import END, ERROR, State
from saf.errors import DialogEnded, DialogFailed, DialogNotFound, UnexpectedMessage, UsageError
from saf.message import DEFAULT_MAX_BYTES
from saf.receiving.asynchronous import areceive, in_thread
from saf.receiving.receive import receive
from saf.typed.event import the_event

if TYPE_CHECKING:
    from uuid import UUID

    from saf.dialogs.dialog import Dialog
    from saf.received import Received
    from saf.receiving.delivery import Delivery
    from saf.receiving.link import AsyncEngine, Engine
    from saf.signing.signer import Key, RequireSigned

OPEN = (State.STARTED_OUTBOUND, State.STARTED_INBOUND, State.CONVERSING)

STATE = "SELECT state, error_code, error_text FROM saf.conversation WHERE handle = %(handle)s"


def wait(
    dialog: Dialog,
    engine: Engine,
    message_type: str | type | None,
    timeout: float,
    keys: Mapping[str, Key] | None,
    *,
    require_signed: RequireSigned,
) -> Received | None:
    """Wait for the next message; see `saf.dialogs.dialog.Dialog.wait`."""
    wanted = _name(message_type)
    # the first look finds out whether a message can still come
    for seconds in (0.0, timeout):
        with receive(
            engine, dialog.service, max_messages=1, wait_seconds=seconds, conversation=dialog,
            keys=keys, require_signed=keys is not None and require_signed,
        ) as delivery:  # fmt: skip
            found = _found(dialog.handle, wanted, delivery)
        if found is not None:
            return _result(found)
    return None


async def wait_async(
    dialog: Dialog,
    engine: AsyncEngine,
    message_type: str | type | None,
    timeout: float,
    keys: Mapping[str, Key] | None,
    *,
    require_signed: RequireSigned,
) -> Received | None:
    """Wait like `wait`, under asyncio."""
    wanted = _name(message_type)
    for seconds in (0.0, timeout):
        async with areceive(
            engine, dialog.service, max_messages=1, wait_seconds=seconds, conversation=dialog,
            keys=keys, require_signed=keys is not None and require_signed,
        ) as delivery:  # fmt: skip
            found = await in_thread(partial(_found, dialog.handle, wanted, delivery))
        if found is not None:
            return _result(found)
    return None


def _name(message_type: str | type | None) -> str | None:
    return the_event(message_type).name if isinstance(message_type, type) else message_type


def _found(
    handle: UUID, wanted: str | None, delivery: Delivery[Any]
) -> Received | Exception | None:
    """Return a delivery's message, the error to raise instead, or None if there is none yet."""
    for message in delivery:
        error: UsageError | None = None
        if message.message_type == ERROR:
            facts = Facts().with_error(message.body)
            return DialogFailed(handle, facts.error_code or 0, facts.error_text or "")
        if message.message_type == END:
            return DialogEnded(handle, State.DISCONNECTED_INBOUND, None)
        if wanted not in (None, message.message_type):
            error = UnexpectedMessage(handle, wanted or "", message.message_type)
        elif message.size > DEFAULT_MAX_BYTES:
            error = UsageError(
                f"the next message of conversation {handle} has {message.size:,} bytes, more than "
                "is put together in memory: receive it by saf.receive(…, conversation=…)"
            )
        if error is None:
            return message.in_memory()
        delivery.wait(message, str(error))
        return error
    return _over(handle, delivery)


def _over(handle: UUID, delivery: Delivery[Any]) -> Exception | None:
    """Return why no message will come any more; None if one may."""
    rows = fetch(delivery.raw, STATE, {"handle": handle})
    if not rows:
        return DialogNotFound(handle, delivery.raw.info.dbname)
    ((state, code, text),) = rows
    if state in OPEN:
        return None
    if code is not None:
        return DialogFailed(handle, code, text)
    return DialogEnded(handle, state, None)


def _result(found: Received | Exception) -> Received:
    if isinstance(found, Exception):
        raise found
    return found
