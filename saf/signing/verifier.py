"""The verifier: finds the key that signed a received message, or the reason to refuse it.

A message is refused if

    `UNSIGNED`      it is not signed, and must be
    `UNKNOWN_KEY`   its key is not known here, and it must be signed; or the key's owner may not
                    speak for its ``from_service``
    `ALTERED`       its signature does not match: the message was altered, redirected to another
                    service, or sent to another broker

The key determines the algorithm of a signature, never the message. Nothing in a message is trusted
before its signature is verified.

A routing service passes messages on with a signature of its own, if any. The first sender's travels
inside (`saf.signing.origin`) and is verified as well, if the receiver names the routers in
`Keys.redirected_from`. A receiver may require that signature instead of the routing service's.

Two values may have changed since the message was signed:

- *The service.* A router redirects messages. They are accepted if the service that they were sent
  to is among `Keys.redirected_from`.
- *``expires_at``*, which `saf dead retry` removes, because an operator finds the message still
  useful. Without it, a message is accepted until the time that was signed; later, only if it was
  retried here.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from saf.errors import UsageError
from saf.message import (
    ALTERED,
    MAX_NAME,
    ORIGIN,
    SIGNATURE,
    UNKNOWN_KEY,
    UNSIGNED,
    Number,
)
from saf.received import Origin, Received
from saf.signing.origin import Envelope, is_fragment, is_last_fragment
from saf.signing.signer import (
    VERSION,
    Key,
    NotSignable,
    RequireSigned,
    check_key_id,
    covered,
    microseconds,
    read_headers,
    sha256,
    signed_bytes,
)

MOMENT = re.compile(r"-?\d{1,20}")


class Keys(Mapping[str, Key]):
    """Keys that a receiver knows, by their names. Several may be valid at a time.

    Args:
        keys: the keys by their key_id.
        redirected_from: routers whose messages are accepted, too: services that a message may have
            been sent to before a router redirected it here.

    Raises:
        UsageError: keys are missing, or a value is not a `Key`.
    """

    def __init__(self, keys: Mapping[str, Key], *, redirected_from: Collection[str] = ()) -> None:
        if isinstance(redirected_from, str):
            raise UsageError(f"redirected_from is {redirected_from!r}: expected several, as a list")
        self._keys = {check_key_id(key_id): key for key_id, key in keys.items()}
        self.redirected_from = frozenset(redirected_from)
        if not self._keys:
            raise UsageError("no key: name the keys that senders sign with")
        for key_id, key in self._keys.items():
            if not isinstance(key, Key):
                raise UsageError(
                    f"key {key_id!r} is a {type(key).__name__}: expected saf.Key(algorithm, …)"
                )

    def __getitem__(self, key_id: str) -> Key:
        return self._keys[key_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"Keys({self._keys!r}, redirected_from={sorted(self.redirected_from)})"


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Messages that a receiver accepts.

    Raises:
        UsageError: messages must be signed, and no keys are given.
    """

    keys: Keys
    required: bool
    """True if unsigned messages are refused."""
    of_origin: bool = False
    """True if messages are refused that their first senders have not signed."""

    @classmethod
    def of(cls, keys: Mapping[str, Key] | None, *, required: RequireSigned) -> Trust | None:
        """Return the trust that a receiver's arguments define; None: accept messages unverified."""
        if required not in (True, False, "origin"):
            raise UsageError(
                f"require_signed is {required!r}: expected True, False, or 'origin' for messages "
                "that their first senders have signed"
            )
        if keys is None and required:
            raise UsageError(
                "require_signed needs the keys that senders sign with: keys={'shop': saf.Key(…)}, "
                "or keys=saf.config.load_keys() for those of saf.toml"
            )
        if keys is None:
            return None
        known = keys if isinstance(keys, Keys) else Keys(keys)
        of_origin = required == "origin"
        if of_origin and not known.redirected_from:
            raise UsageError(
                "require_signed='origin' needs the routers that pass messages on: "
                "keys=saf.Keys(…, redirected_from=['departures']), or redirected_from in [signing]"
            )
        return cls(keys=known, required=bool(required), of_origin=of_origin)


class Refusal(NamedTuple):
    """Reason why a message is not handed out."""

    reason: str
    error: str


NO_ORIGIN = Refusal(
    reason=UNSIGNED, error="a router has passed it on without the signature of its sender"
)


class _Refused(Exception):
    def __init__(self, reason: str, error: str) -> None:
        self.refusal = Refusal(reason=reason, error=error)


class _Unproven(_Refused):
    """The sender of a message is unknown: a reason to refuse it only if it must be signed."""


class Verifier:
    """Verifies the messages that one broker, given by its broker_id, has received."""

    def __init__(self, *, trust: Trust, broker: UUID) -> None:
        self.trust = trust
        self.broker = broker

    def __call__(
        self, message: Received, body_sha256: str | None = None, *, assembles: bool = True
    ) -> str | Refusal | None:
        """Return the key that has signed a message; None if the message may be handed out unsigned.

        Notes the first sender of a message that a routing service has passed on.

        Args:
            message: the message as received.
            body_sha256: the hash of its body, if the body is not in memory.
            assembles: the receiver puts the fragments of large bodies together.
        """
        signed_by, origin = None, None
        unproven: Refusal | None = None
        lacks_origin: Refusal | None = None
        try:
            headers = _headers(message)
            # the fragments of a body have one origin together
            part = assembles and is_fragment(message, headers)
            if ORIGIN in headers and not part:
                try:
                    origin = self._origin(message, headers, assembles=assembles)
                except _Unproven as problem:
                    lacks_origin = problem.refusal
            elif message.from_service in self.trust.keys.redirected_from and not part:
                lacks_origin = NO_ORIGIN
            try:
                signed_by = self._signed_by(message, headers, body_sha256, origin)
            except _Unproven as problem:
                unproven = problem.refusal
        except _Refused as refused:
            return refused.refusal
        if self.trust.of_origin and (lacks_origin or origin):
            return lacks_origin or signed_by
        return unproven if self.trust.required and unproven else signed_by

    def _signed_by(
        self,
        message: Received,
        headers: Mapping[str, Any],
        body_sha256: str | None,
        origin: Origin | None,
    ) -> str:
        signature = _signature(headers.get(SIGNATURE))
        key_id, to = signature["key"], signature["to"]
        key = self._key(key_id)
        # who passes a message on outside of a dialog leaves its sender's name on it
        speakers = {message.from_service, *(origin.routers[-1:] if origin else ())}
        if key.from_services is not None and key.from_services.isdisjoint(speakers):
            problem = f"key {key_id!r} may not speak for {_service(message.from_service)}"
            raise _Refused(UNKNOWN_KEY, problem)
        self._check_address(message, to)
        _check_expiry(message, signature)
        facts = {
            **_facts(message),
            "key_id": key_id,
            "to_service": to,
            "expires_at": signature.get("expires_at"),
            "headers": covered(headers),
            "body": body_sha256 or sha256(message.body),
        }
        if not _verifies(key, signature["value"], facts, redirected=to != message.service):
            problem = f"it is not what key {key_id!r} has signed: altered, or signed by others"
            raise _Refused(ALTERED, problem)
        return str(key_id)

    def _origin(self, message: Received, headers: Mapping[str, Any], *, assembles: bool) -> Origin:
        """Return the first sender of a message that was passed on; note it in the message."""
        sealed = Envelope.read(headers[ORIGIN])
        if sealed is None:
            raise _Refused(ALTERED, f"its {ORIGIN} is not one")
        signature = _signature(sealed.signature)
        key_id, to = signature["key"], signature["to"]
        key = self._key(key_id)
        for router in (to, *sealed.routers):
            if router not in self.trust.keys.redirected_from:
                raise _Unproven(
                    ALTERED,
                    f"it was passed on by router {_service(router)}: if that may pass messages on, "
                    "add it to redirected_from",
                )
        if key.from_services is not None and sealed.from_service not in key.from_services:
            who = _service(sealed.from_service)
            raise _Refused(UNKNOWN_KEY, f"key {key_id!r} may not speak for {who}")
        if message.to_broker is not None and message.to_broker != self.broker:
            raise _Refused(ALTERED, f"it was sent on to broker {message.to_broker}")
        _check_expiry(message, signature)
        problem = sealed.misplaced(message, headers)
        facts = {
            **sealed.facts(message, headers),
            "key_id": key_id,
            "to_service": to,
            "expires_at": signature.get("expires_at"),
        }
        redirected = to != sealed.routers[0]
        if problem is None and not _verifies(key, signature["value"], facts, redirected=redirected):
            problem = "altered, or signed by others"
        if problem is not None:
            raise _Refused(ALTERED, f"it is not what key {key_id!r} has signed first: {problem}")
        body = None
        if is_last_fragment(message, headers):
            body = sealed.whole
            if body is None or not assembles:
                raise _Unproven(UNSIGNED, "its sender has not signed its large body as a whole")
        origin = Origin(
            signed_by=str(key_id),
            service=sealed.from_service,
            message_id=sealed.message_id,
            conversation_id=sealed.conversation_id or message.conversation_id,
            routers=sealed.routers,
        )
        message.comes_from(origin, body)
        return origin

    def _key(self, key_id: str) -> Key:
        key = self.trust.keys.get(key_id)
        if key is None:
            raise _Unproven(UNKNOWN_KEY, f"it is signed by key {_short(key_id)}, not known here")
        return key

    def _check_address(self, message: Received, to: str) -> None:
        """Reject a message that was sent to another broker or service."""
        if message.to_broker not in (None, self.broker):
            raise _Refused(
                ALTERED, f"it was sent to broker {message.to_broker}, and this is {self.broker}"
            )
        if to != message.service and to not in self.trust.keys.redirected_from:
            raise _Refused(
                ALTERED,
                f"it was sent to {_service(to)}, and redirected to {_service(message.service)}: if "
                "a router may do so, add it to redirected_from",
            )


def _headers(message: Received) -> dict[str, Any]:
    if not (message.may_say(SIGNATURE) or message.may_say(ORIGIN)):
        return {}
    try:
        return read_headers(message.headers_text)
    except NotSignable as error:
        raise _Refused(ALTERED, str(error)) from None


def _signature(signature: Any) -> dict[str, Any]:
    """Return the parts of a signature."""
    match signature:
        case None:
            raise _Unproven(UNSIGNED, "it is not signed")
        # a Number is also a str
        case {"version": Number(), "key": str(key), "to": str(to), "value": str(value)} if not any(
            isinstance(part, Number) for part in (key, to, value)
        ):
            if signature["version"] != str(VERSION):
                known = f"only version {VERSION} is known"
                raise _Refused(ALTERED, f"its {SIGNATURE} has another version: {known}")
            return dict(signature)
        case _:
            raise _Refused(ALTERED, f"its {SIGNATURE} is not one")


def _facts(message: Received) -> dict[str, Any]:
    """Return the covered facts of a message as it has arrived, without headers and body."""
    return {
        "message_id": str(message.message_id),
        "from_service": message.from_service,
        "to_broker": message.to_broker and str(message.to_broker),
        "key": message.key,
        "message_type": message.message_type,
        "conversation_id": message.conversation_id and str(message.conversation_id),
        "from_initiator": message.from_initiator,
        "sequence": message.sequence,
        # in a dialog's message, deliver_at belongs to the receiver
        "deliver_at": None
        if message.from_initiator is not None
        else microseconds(message.deliver_at),
    }


def _check_expiry(message: Received, signature: Mapping[str, Any]) -> None:
    """Reject a message whose expires_at is not the signed one."""
    signed, now = signature.get("expires_at"), time.time_ns() // 1000
    if signed is not None and not (isinstance(signed, Number) and MOMENT.fullmatch(signed)):
        raise _Refused(ALTERED, f"its {SIGNATURE} is not one")
    if message.expires_at is None and signed is not None:
        # retried by an operator: here, or on its way
        if message.parked_id is None and int(signed) < now:
            raise _Refused(ALTERED, "its expires_at was removed after it had passed")
        return
    expires_at = microseconds(message.expires_at)
    if signed != (None if expires_at is None else str(expires_at)):
        raise _Refused(ALTERED, "its expires_at was altered")


def _verifies(key: Key, value: str, facts: dict[str, Any], *, redirected: bool) -> bool:
    try:
        signature = base64.b64decode(value, validate=True)
        if key.verifies(signature, signed_bytes(facts)):
            return True
        # a router may have added the broker
        sent = {**facts, "to_broker": None}
        return redirected and key.verifies(signature, signed_bytes(sent))
    except (NotSignable, binascii.Error, ValueError):
        return False


def _service(name: str | None) -> str:
    return "nobody" if name is None else f"service {_short(name)}"


def _short(name: str) -> str:
    """Quote a name for errors: a stranger may have made it as long as the headers can be."""
    return repr(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…")
