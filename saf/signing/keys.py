"""Keys that sign or verify. A key never shows its secret, however it is printed.

``hmac-sha256`` has one secret, which both sides know: every verifier can also sign. It needs only
Python. ``ed25519`` has a private key, which only the sender knows, and a public key for the
receivers; it needs ``saf-outbox[signing]``.

A secret is the base64 of 32 bytes or more (``openssl rand -base64 32``). A key for Ed25519 is PEM
(``openssl genpkey -algorithm ed25519``) or the base64 of its 32 bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

from saf.errors import MissingExtra, UsageError
from saf.message import MAX_NAME, fits

Algorithm = Literal["hmac-sha256", "ed25519"]

HMAC: Algorithm = "hmac-sha256"
KEY_BYTES = 32
"""Length of a key for Ed25519, and minimum length of a secret for HMAC, in bytes."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]
"""Returns whether a signature matches the signed bytes."""


class Key:
    """A key that verifies, with the services that its owner may send as.

    Args:
        algorithm: ``hmac-sha256`` or ``ed25519``.
        material: the secret for HMAC, or the public key for Ed25519.
        from_services: the services that the key's owner may send as; None: any. Set this where
            several senders have keys, because otherwise one key's owner may pose as another sender.

    Raises:
        UsageError: an unknown algorithm, or an invalid key.
        MissingExtra: Ed25519 needs a package that is not installed.
    """

    __slots__ = ("algorithm", "from_services", "verifies")

    def __init__(
        self,
        algorithm: Algorithm,
        material: str | bytes,
        *,
        from_services: Collection[str] | None = None,
    ) -> None:
        if isinstance(from_services, str):
            raise UsageError(f"from_services is {from_services!r}: expected several, as a list")
        self.algorithm = algorithm
        self.from_services = None if from_services is None else frozenset(from_services)
        self.verifies: Verify = _verifying(algorithm, material)

    def __repr__(self) -> str:
        services = None if self.from_services is None else sorted(self.from_services)
        return f"Key({self.algorithm!r}, '***', from_services={services})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a key is not pickled: it would be written wherever that goes")


def signing(algorithm: Algorithm, material: str | bytes) -> Sign:
    """Return a function that signs with a secret, or with a private key.

    Raises:
        UsageError: an unknown algorithm, or an invalid key.
        MissingExtra: Ed25519 needs a package that is not installed.
    """
    check_algorithm(algorithm)
    if algorithm == HMAC:
        secret = _secret(material)
        return lambda signed: _digest(secret, signed)  # a partial would show its secret
    private: Any = _ed25519(material, "private")
    sign: Sign = private.sign
    return sign


def _verifying(algorithm: Algorithm, material: str | bytes) -> Verify:
    check_algorithm(algorithm)
    if algorithm == HMAC:
        secret = _secret(material)
        return lambda signature, signed: _is_digest(secret, signature, signed)
    public: Any = _ed25519(material, "public")
    from cryptography.exceptions import InvalidSignature

    def verifies(signature: bytes, signed: bytes) -> bool:
        try:
            public.verify(signature, signed)
        except InvalidSignature:
            return False
        return True

    return verifies


def _digest(secret: bytes, signed: bytes) -> bytes:
    import hmac

    return hmac.digest(secret, signed, "sha256")


def _is_digest(secret: bytes, signature: bytes, signed: bytes) -> bool:
    """Return whether a signature is right, in constant time."""
    import hmac

    return hmac.compare_digest(signature, _digest(secret, signed))


def check_algorithm(algorithm: object) -> None:
    """Reject an unknown algorithm.

    Raises:
        UsageError: the algorithm is unknown.
    """
    if algorithm not in get_args(Algorithm):
        known = " and ".join(map(repr, get_args(Algorithm)))
        raise UsageError(f"algorithm {algorithm!r} is not known: there are {known}")


def check_key_id(key_id: object) -> str:
    """Return the name of a key, if it is valid.

    Raises:
        UsageError: the name is invalid.
    """
    if not isinstance(key_id, str) or not fits(key_id, MAX_NAME) or not key_id.isprintable():
        key_id = None
    if not key_id:
        raise UsageError(f"a key_id has 1 to {MAX_NAME} bytes of printable characters")
    return key_id


def _secret(material: str | bytes) -> bytes:
    secret = _bytes(material)
    if secret is None or len(secret) < KEY_BYTES:
        raise UsageError(
            f"a secret for {HMAC} is the base64 of {KEY_BYTES} bytes or more, and this is not: "
            f"`openssl rand -base64 {KEY_BYTES}` makes one"
        )
    return secret


def _bytes(material: str | bytes) -> bytes | None:
    """Return the bytes of a key that is given as base64, or as bytes; None if it is neither."""
    if isinstance(material, bytes):
        return material
    try:
        return base64.b64decode("".join(material.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _ed25519(material: str | bytes, half: Literal["private", "public"]) -> object:
    """Return a private or public key of the library, from PEM or from 32 bytes."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("signing", "a signature with Ed25519") from None
    kind = ed25519.Ed25519PrivateKey if half == "private" else ed25519.Ed25519PublicKey
    text = material.encode() if isinstance(material, str) else material
    key: object = None
    try:
        if text.lstrip().startswith(b"-----BEGIN"):
            if half == "private":
                key = serialization.load_pem_private_key(text, password=None)
            else:
                key = serialization.load_pem_public_key(text)
        elif (raw := _bytes(material)) is not None and half == "private":
            key = ed25519.Ed25519PrivateKey.from_private_bytes(raw)
        elif raw is not None:
            key = ed25519.Ed25519PublicKey.from_public_bytes(raw)
    except (ValueError, TypeError):  # the library's text may quote the key
        key = None
    if not isinstance(key, kind):
        raise UsageError(
            f"a {half} key for ed25519 is PEM without a password, or the base64 of {KEY_BYTES} "
            "bytes, and this is not: `openssl genpkey -algorithm ed25519` makes a private key, and "
            "`openssl pkey -pubout` its public one"
        )
    return key
