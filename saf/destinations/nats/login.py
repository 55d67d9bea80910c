"""Logins: a client's credentials for a NATS server that requires them.

A server that supports nkeys sends a nonce, which the client signs with Ed25519. A seed is base 32:
two bytes for its type, 32 bytes of the key, and a checksum of two bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saf.destinations.queues import client_needed, unusable

if TYPE_CHECKING:
    from saf.destinations.nats import Nats

SEED = re.compile(r"\bS[A-Z2-7]{57}\b")
JWT = re.compile(r"-----BEGIN NATS USER JWT-----\s*(\S+)\s*-")
USER = 20 << 3
"""First byte of a user's public key, which makes its text begin with U."""


def said(name: str, settings: Nats, nonce: str) -> dict[str, Any]:
    """Return the part of CONNECT that is the login.

    Raises:
        Refused: a file cannot be read, or contains no key.
    """
    if settings.username is not None:
        secret = settings.password.get_secret_value() if settings.password else ""
        return {"user": settings.username, "pass": secret}
    if settings.token is not None:
        return {"auth_token": settings.token.get_secret_value()}
    file = settings.nkey_file or settings.creds_file
    if file is None:
        return {}
    destination = f"destination {name!r}"
    text = _text(destination, file)
    seed = SEED.search(text)
    if seed is None:
        raise unusable(destination, f"{file} has no seed of an nkey", "name a file that has one")
    public, signature = _signed(name, seed[0], nonce)
    if settings.nkey_file is not None:
        return {"nkey": public, "sig": signature}
    jwt = JWT.search(text)
    if jwt is None:
        raise unusable(destination, f"{file} has no JWT of a user", "name a file of credentials")
    return {"jwt": jwt[1], "sig": signature}


def _text(destination: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(
            destination, f"{file} cannot be read ({error})", "make it readable"
        ) from None


def _signed(name: str, seed: str, nonce: str) -> tuple[str, str]:
    """Return the public key, and the signature of a nonce, as texts."""
    with client_needed(name, "nats"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.from_private_bytes(base64.b32decode(seed + "======")[2:34])
    public = bytes([USER]) + key.public_key().public_bytes_raw()
    public += binascii.crc_hqx(public, 0).to_bytes(2, "little")
    signature = base64.urlsafe_b64encode(key.sign(nonce.encode())).rstrip(b"=")
    return base64.b32encode(public).rstrip(b"=").decode(), signature.decode()
