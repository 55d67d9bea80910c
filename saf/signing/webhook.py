"""Standard Webhooks signatures: HMAC-SHA256 over id, time and body, with a shared secret.

    webhook-id          the message's id, the same in every attempt
    webhook-timestamp   time of sending, in seconds since 1970
    webhook-signature   v1,BASE64, one for each secret, separated by spaces

A secret is ``whsec_`` and base64. During a rotation, a sender signs with both secrets, and a
receiver accepts either. See https://www.standardwebhooks.com.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping

from saf.errors import NotVerified, UsageError

PREFIX = "whsec_"
SHORTEST, LONGEST = 24, 64
"""Shortest and longest secret, in bytes."""
TOLERANCE_SECONDS = 300.0
Body = bytes | bytearray | memoryview
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
LENGTH = 44
"""Length of a signature: the base64 of 32 bytes."""
NOT_RIGHT = "no signature in it is right"


def key_of(secret: str) -> bytes:
    """Return the key that a secret encodes.

    Raises:
        UsageError: the secret is invalid. The error does not contain it.
    """
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not SHORTEST <= len(key) <= LONGEST:
        raise UsageError(
            f"a webhook's secret is {PREFIX} and the base64 of {SHORTEST} to {LONGEST} bytes"
        )
    return key


def sign(message_id: str, timestamp: int, body: Body, keys: Iterable[bytes]) -> dict[str, str]:
    """Return the headers that sign a body.

    >>> key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    >>> body = b'{"test": 2432232314}'
    >>> sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [key])["webhook-signature"]
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    signatures = (_signature(message_id, str(timestamp), body, key) for key in keys)
    return {
        ID: message_id,
        TIMESTAMP: str(timestamp),
        SIGNATURE: " ".join(f"v1,{base64.b64encode(one).decode()}" for one in signatures),
    }


def verify(
    headers: Mapping[str, str],
    body: Body,
    secrets: str | Iterable[str],
    *,
    tolerance_seconds: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> str:
    """Return the id of a webhook with a valid signature; the same id means the same message.

    Args:
        headers: the request's headers; names are compared without case.
        body: the body, exactly as received.
        secrets: one or several secrets; any may have signed.
        tolerance_seconds: largest difference between the sender's clock and this one.
        now: seconds since 1970. Default: this machine's clock.

    Raises:
        NotVerified: none of the secrets has signed the request, or the time is out of range.
        UsageError: a secret is invalid.
    """
    keys = [key_of(one) for one in ([secrets] if isinstance(secrets, str) else secrets)]
    if not keys:
        raise UsageError("without a secret, nothing can be verified")
    message_id, timestamp, given = stated(headers, tolerance_seconds=tolerance_seconds, now=now)
    for key in keys:
        right = base64.b64encode(_signature(message_id, timestamp, body, key))
        for one in given:
            # compared as bytes, because a header may hold any character
            if hmac.compare_digest(right, one.encode(errors="replace")):
                return message_id
    raise NotVerified(NOT_RIGHT)


def stated(
    headers: Mapping[str, str],
    *,
    tolerance_seconds: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> tuple[str, str, list[str]]:
    """Return id, time and signatures from the headers, before the body is received.

    Raises:
        NotVerified: the headers cannot be valid now, whatever the body is.
    """
    named = {name.lower(): value for name, value in headers.items()}
    missing = [name for name in (ID, TIMESTAMP, SIGNATURE) if not named.get(name)]
    if missing:
        raise NotVerified(f"missing header {', '.join(missing)}")
    message_id, timestamp = named[ID], named[TIMESTAMP]
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):  # noqa: PLR2004 - the year 33658
        raise NotVerified(f"{TIMESTAMP} is not a number of seconds")
    difference = (time.time() if now is None else now) - int(timestamp)
    if abs(difference) > tolerance_seconds:
        raise NotVerified(
            f"it was signed {abs(difference):.0f} s {'ago' if difference > 0 else 'from now'}, and "
            f"no more than {tolerance_seconds:g} s are allowed"
        )
    parts = [one.partition(",") for one in named[SIGNATURE].split()]
    given = [value for version, _, value in parts if version == "v1" and len(value) == LENGTH]
    if not given:
        raise NotVerified(NOT_RIGHT)
    return message_id, timestamp, given


def _signature(message_id: str, timestamp: str, body: Body, key: bytes) -> bytes:
    signed = hmac.new(key, f"{message_id}.{timestamp}.".encode(errors="replace"), hashlib.sha256)
    signed.update(body)
    return signed.digest()
