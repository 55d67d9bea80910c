"""Signatures of Standard Webhooks: HMAC-SHA256 over id, time and body, by a shared secret.

    webhook-id          the message's id, the same with every attempt
    webhook-timestamp   when it was sent, in seconds since 1970
    webhook-signature   v1,BASE64, one for each secret, with spaces between them

A secret is ``whsec_`` and base64. While it is rotated, a sender signs with both, and a receiver
accepts either. See https://www.standardwebhooks.com.
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
"""How many bytes a secret has."""
TOLERANCE_SECONDS = 300.0
Body = bytes | bytearray | memoryview
ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
LENGTH = 44
"""How many characters a signature has: the base64 of 32 bytes."""
NOT_RIGHT = "no signature in it is right"


def key_of(secret: str) -> bytes:
    """The key that a secret stands for.

    Raises:
        UsageError: it is none. The error does not say the secret.
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
    """The headers that sign a body.

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
    """Return the id of a webhook whose signature is right; the same id stands for the same message.

    Args:
        headers: of the request; names are compared without case.
        body: exactly as it came.
        secrets: one or several, any of which may have signed.
        tolerance_seconds: how far the sender's clock may be from this one's.
        now: seconds since 1970; by default, by this machine's clock.

    Raises:
        NotVerified: it was not signed by any of the secrets, or not now.
        UsageError: a secret is none.
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
    """Return the id, the time and the signatures that headers state; the body may not be there yet.

    Raises:
        NotVerified: whatever the body is, this is no signature of now.
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
    said = [one.partition(",") for one in named[SIGNATURE].split()]
    given = [value for version, _, value in said if version == "v1" and len(value) == LENGTH]
    if not given:
        raise NotVerified(NOT_RIGHT)
    return message_id, timestamp, given


def _signature(message_id: str, timestamp: str, body: Body, key: bytes) -> bytes:
    signed = hmac.new(key, f"{message_id}.{timestamp}.".encode(errors="replace"), hashlib.sha256)
    signed.update(body)
    return signed.digest()
