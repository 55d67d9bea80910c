"""Origins: the first sender's signature travels inside the messages of routing services.

A routing service sends a message on as a new one, with an id and, in a dialog, a conversation of
its own. So the first signature no longer matches. It travels in the header ``saf-origin``, with
everything that it covers and that the new message does not have (`Envelope`). A receiver rebuilds
the bytes that were signed from the envelope and the message, and verifies them with its own keys.
So it need not trust the routing services, which can only choose who gets a message.

What stops a routing service, or anybody who has its messages, from using an envelope elsewhere:

- *Its body, key, type and headers* are those of the message, not of the envelope. Exceptions are
  the headers that each pair of ends sets itself (`REPLACED`) and the text of an Error, which is
  compared with the original text and the routers' names.
- *Its place* is derived. The id of a message that is sent on, or of the dialog that it is sent on
  in, is computed from the first one and the routers' names (`passed`). So an envelope fits one
  message, or one dialog, and there only the number that its sender has given it.
- *Its routers*: the receiver must name them all (`Keys.redirected_from`), also the later routers of
  a chain.

A large body travels in fragments of the same size, each with a signature of its own hop. The
envelope is on the last one. The first sender has signed the hash of the whole body with it, and
the receiver compares that hash with the body that it assembles (`saf.dialogs.arrival`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID, uuid5

from saf.message import (
    FRAGMENT,
    HELLO,
    HOPS,
    MAX_HOPS,
    ORIGIN,
    RESERVED_TYPE,
    SIGNATURE,
    WHOLE,
    Number,
)
from saf.received import Received
from saf.setaside.isolation import MAX_ERROR, kept, said
from saf.signing.signer import covered, microseconds, sha256

T = TypeVar("T")

ERROR = f"{RESERVED_TYPE}error"

REPLACED = frozenset({HELLO, WHOLE, HOPS})
"""Headers that each hop sets itself. The envelope has those of the first message."""

LONGEST_ERROR = 64 * 1024
"""Longest body of an Error that an envelope holds, in bytes."""

APART_SECONDS = 3600
"""Most that clocks may differ: each routing service computes the lifetime by its own clock."""

INTEGER = re.compile(r"-?\d{1,20}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def passed(id_: UUID, routers: Iterable[str]) -> UUID:
    """Return the id of a message, or a dialog, after these routers have passed it on, in order.

    >>> passed(UUID(int=7), ["departures"])
    UUID('9f75ec82-78f9-525c-aafd-af561a165a22')
    """
    for router in routers:
        id_ = uuid5(id_, router)
    return id_


def is_signed(message: Received) -> bool:
    """Return whether a message may have a signature to pass on; False is certain."""
    return message.may_say(SIGNATURE) or message.may_say(ORIGIN)


def envelope(message: Received, headers: Mapping[str, Any], router: str) -> dict[str, Any] | None:
    """Return the header `ORIGIN` for a message that a router passes on; None if it has no origin.

    Args:
        message: the message as the router has received it.
        headers: its headers, with each number as it was written.
        router: the router's name.
    """
    if ORIGIN in headers:
        before = headers[ORIGIN]
        routers = before.get("by") if isinstance(before, dict) else None
        return {**before, "by": [*routers, router]} if isinstance(routers, list) else None
    signature = headers.get(SIGNATURE)
    if not isinstance(signature, dict):
        return None
    sealed: dict[str, Any] = {
        "signature": signature,
        "message_id": str(message.message_id),
        "by": [router],
    }
    if message.from_service is not None:
        sealed["from_service"] = message.from_service
    if message.to_broker is not None:
        sealed["to_broker"] = str(message.to_broker)
    if replaced := {name: headers[name] for name in sorted(REPLACED) if name in headers}:
        sealed["headers"] = replaced
    if message.from_initiator is None:
        if message.deliver_at is not None:
            sealed["deliver_at"] = microseconds(message.deliver_at)
        return sealed
    sealed |= {"conversation_id": str(message.conversation_id), "sequence": message.sequence}
    if message.message_type == ERROR:
        if message.size > LONGEST_ERROR or b"\0" in message.body:
            return None
        sealed["error"] = message.body.decode(errors="replace")
    return sealed


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What the first signature covers and a passed-on message does not have, as it has arrived.

    Nothing in it is true before the signature is verified.
    """

    signature: Mapping[str, Any]
    message_id: UUID
    routers: tuple[str, ...]
    from_service: str | None
    to_broker: UUID | None
    conversation_id: UUID | None
    sequence: str | None
    deliver_at: str | None
    headers: Mapping[str, Any]
    error: str | None
    """Body of an Error, before routers have changed its text."""

    @classmethod
    def read(cls, header: object) -> Envelope | None:
        """Read the header `ORIGIN`, with each number as a `Number`; None if it is not one."""
        known = dict(header) if isinstance(header, dict) else {}
        try:
            found = cls(
                signature=_of(dict, known.pop("signature", None)),
                message_id=_id(known.pop("message_id", None)),
                routers=tuple(map(_text, _of(list, known.pop("by", None)))),
                from_service=_maybe(_text, known.pop("from_service", None)),
                to_broker=_maybe(_id, known.pop("to_broker", None)),
                conversation_id=_maybe(_id, known.pop("conversation_id", None)),
                sequence=_maybe(_integer, known.pop("sequence", None)),
                deliver_at=_maybe(_integer, known.pop("deliver_at", None)),
                headers=_of(dict, known.pop("headers", {})),
                error=_maybe(_text, known.pop("error", None)),
            )
        except (TypeError, ValueError):
            return None
        fits = 0 < len(found.routers) <= MAX_HOPS and REPLACED.issuperset(found.headers)
        return found if fits and not known else None

    @property
    def whole(self) -> str | None:
        """Hash of a body that was sent in fragments; None if its sender has not signed one."""
        extent = self.headers.get(WHOLE)
        found = extent.get("sha256") if isinstance(extent, dict) else None
        return found if isinstance(found, str) and SHA256.fullmatch(found) else None

    def misplaced(self, message: Received, headers: Mapping[str, Any]) -> str | None:
        """Return why the envelope belongs to another message; None if it fits. Pure."""
        if message.from_initiator is None:
            return self._misplaced_outside(message)
        if self.conversation_id is None or message.conversation_id is None or self.sequence is None:
            return "it is of a message outside of dialogs"
        ends = self.conversation_id, message.conversation_id
        first, last = ends if message.from_initiator else ends[::-1]
        routers = self.routers if message.from_initiator else self.routers[::-1]
        if passed(first, routers) != last:
            return "it is of another dialog"
        if message.message_type != ERROR and self.sequence != str(message.sequence):
            return f"it is of message {self.sequence}, and this is message {message.sequence}"
        if message.from_service != self.routers[-1] or message.key != str(message.conversation_id):
            return "its router has not sent it"
        return self._differs(message, headers)

    def _misplaced_outside(self, message: Received) -> str | None:
        if self.conversation_id is not None or self.sequence is not None:
            return "it is of a dialog"
        if passed(self.message_id, self.routers) != message.message_id:
            return "it is of another message"
        if message.from_service != self.from_service:
            return "its sender is another one"
        return None

    def _differs(self, message: Received, headers: Mapping[str, Any]) -> str | None:
        """Return what the dialog of a message has that its sender has not begun it with."""
        if message.message_type == ERROR:
            return self._other_error(message)
        if not same_extent(self.headers.get(WHOLE), headers.get(WHOLE)):
            return "its body was cut in another way"
        if not same_beginning(self.headers.get(HELLO), headers.get(HELLO)):
            return "its dialog has another contract, or a longer lifetime"
        return None

    def _other_error(self, message: Received) -> str | None:
        try:
            arrived = json.loads(message.body)
        except (ValueError, RecursionError):
            return "its Error cannot be read"
        if self.error is None or arrived != error_passed_on(self.error, self.routers):
            return "its Error is another one"
        return None

    def facts(self, message: Received, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts that the first signature covers, with this message's contents."""
        own = {n: value for n, value in covered(headers).items() if n not in REPLACED | {ORIGIN}}
        of_dialog = message.from_initiator is not None
        conversation_id = self.conversation_id if of_dialog else message.conversation_id
        return {
            "message_id": str(self.message_id),
            "from_service": self.from_service,
            "to_broker": self.to_broker and str(self.to_broker),
            "key": str(self.conversation_id) if of_dialog else message.key,
            "message_type": message.message_type,
            "conversation_id": conversation_id and str(conversation_id),
            "from_initiator": message.from_initiator,
            "sequence": Number(self.sequence) if of_dialog else message.sequence,
            "deliver_at": None if self.deliver_at is None else Number(self.deliver_at),
            "headers": {**own, **self.headers},
            "body": self._body(message),
        }

    def _body(self, message: Received) -> str:
        """Return the hash of the body that was signed; of a large one, of its last fragment."""
        if message.message_type == ERROR and self.error is not None:
            return sha256(self.error.encode(errors="replace"))
        return sha256(message.body)


def is_last_fragment(message: Received, headers: Mapping[str, Any]) -> bool:
    """Return whether a dialog's message is the last of the fragments of its body."""
    return WHOLE in headers and _has_body(message)


def is_fragment(message: Received, headers: Mapping[str, Any]) -> bool:
    """Return whether a dialog's message is a fragment of a body, and not the last one."""
    return FRAGMENT in headers and _has_body(message)


def _has_body(message: Received) -> bool:
    """Return whether a message is an application's, on a dialog: only then it has fragments."""
    of_saf = (message.message_type or "").startswith(RESERVED_TYPE)
    return message.from_initiator is not None and message.sequence is not None and not of_saf


def error_passed_on(body: str, routers: Iterable[str]) -> dict[str, Any] | None:
    """Return an Error as routers pass it on, one after the other; None if it is not one.

    >>> error_passed_on('{"code": 17, "text": "sold out"}', ["departures"])["text"]
    "router 'departures': sold out"
    """
    try:
        document = json.loads(body)
        code, text = int(document["code"]), kept(str(document["text"]))[:MAX_ERROR]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    original = document.get("original")
    if not isinstance(original, dict):
        original = {"code": code, "text": text}
    for router in routers:
        text = said(f"router {router!r}: {kept(text)[:MAX_ERROR]}")
    return {"code": code, "text": text, "original": original}


def same_extent(first: object, now: object) -> bool:
    """Return whether a body is cut as it was at first: into as many fragments, of as many bytes."""
    if first is None or now is None:
        return first is now
    if not isinstance(first, dict) or not isinstance(now, dict):
        return False
    return all(first.get(name) == now.get(name) for name in ("fragments", "bytes"))


def same_beginning(first: object, now: object) -> bool:
    """Return whether a dialog has the contract of the first, and about its lifetime at most."""
    if first is None or now is None:
        return first is now
    if not isinstance(first, dict) or not isinstance(now, dict):
        return False
    if any(first.get(name) != now.get(name) for name in ("contract", "version")):
        return False
    longest, lifetime = first.get("lifetime_seconds"), now.get("lifetime_seconds")
    if longest is None:
        return lifetime is None
    both = isinstance(longest, Number) and isinstance(lifetime, Number)
    return both and Decimal(str(lifetime)) <= Decimal(str(longest)) + APART_SECONDS


def _of(kind: type[T], value: object) -> T:
    """Return a value that has a type; raise a TypeError if it has another one."""
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


def _text(value: object) -> str:
    if isinstance(value, Number):
        raise TypeError(value)
    return _of(str, value)


def _id(value: object) -> UUID:
    return UUID(_text(value))


def _integer(value: object) -> str:
    if not INTEGER.fullmatch(_of(Number, value)):
        raise ValueError(value)
    return str(value)


def _maybe(read: Callable[[object], T], value: object) -> T | None:
    return None if value is None else read(value)
