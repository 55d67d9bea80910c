"""Keys for tests, and what signs and verifies with them."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import saf
from saf.signing.signer import Algorithm

HMAC: Algorithm = "hmac-sha256"
ED25519: Algorithm = "ed25519"

SECRET = base64.b64encode(bytes(range(32))).decode()
_PAIR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PRIVATE = _PAIR.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
)
PUBLIC = _PAIR.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


def signer(algorithm: Algorithm = HMAC, key_id: str = "shop-1") -> saf.Signer:
    return saf.Signer(key_id, algorithm, SECRET if algorithm == HMAC else PRIVATE)


def hmac_key(**options: list[str]) -> saf.Key:
    return saf.Key(HMAC, SECRET, from_services=options.get("from_services"))


def key(algorithm: Algorithm = HMAC) -> saf.Key:
    return saf.Key(algorithm, SECRET if algorithm == HMAC else PUBLIC)
