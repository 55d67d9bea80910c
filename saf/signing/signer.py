"""The signer: signs messages before they are written, so that a send stays a single INSERT.

The signature is in the header ``saf-signature``, with the key's name, the service that the message
was sent to, and ``expires_at`` if set, because the last two may have changed when the message
arrives. The signature covers them (`saf.signing.form`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from saf.errors import InvalidMessage, MissingExtra, UsageError
from saf.message import SIGNATURE, Row, check_headers
from saf.signing.form import (
    VERSION,
    NotSignable,
    covered,
    microseconds,
    read_headers,
    sha256,
    signed_bytes,
)
from saf.signing.keys import Algorithm, check_key_id, signing

NO_DIALOG: dict[str, Any] = {"conversation_id": None, "from_initiator": None, "sequence": None}
"""Facts of a message that belongs to no conversation."""


class Signer:
    """Signs messages with one key.

    Args:
        key_id: name of the key; receivers know it by this name.
        algorithm: ``hmac-sha256`` or ``ed25519``.
        material: the secret for HMAC, or the private key for Ed25519.

    Raises:
        UsageError: an unknown algorithm, or an invalid key.
        MissingExtra: Ed25519 needs a package that is not installed.
    """

    __slots__ = ("_sign", "algorithm", "key_id")

    def __init__(self, key_id: str, algorithm: Algorithm, material: str | bytes) -> None:
        self.key_id = check_key_id(key_id)
        self.algorithm = algorithm
        try:
            self._sign = signing(algorithm, material)
        except MissingExtra:
            raise
        except UsageError as error:
            raise UsageError(f"key {key_id!r}: {error}") from None

    def sign(self, row: Row, **facts: object) -> Row:
        """Return a message with its signature in the headers.

        Args:
            row: the message as the INSERT stores it.
            facts: further facts of a message that belongs to a conversation.

        Raises:
            InvalidMessage: the headers cannot be signed, or become too large.
        """
        try:
            headers = covered(read_headers(row.headers))
            signed = signed_bytes(
                row_facts(row, self.key_id, headers, sha256(row.body)) | NO_DIALOG | facts
            )
        except NotSignable as error:
            raise InvalidMessage("headers", str(error)) from None
        signature: dict[str, Any] = {
            "version": VERSION,
            "key": self.key_id,
            "to": row.to_service,
            "value": base64.b64encode(self._sign(signed)).decode(),
        }
        if row.expires_at is not None:
            signature["expires_at"] = microseconds(row.expires_at)
        # PostgreSQL keeps the last of two equal names
        comma = "" if row.headers == "{}" else ", "
        text = f'{row.headers[:-1]}{comma}"{SIGNATURE}": {json.dumps(signature)}}}'
        check_headers(text)
        return row._replace(headers=text)

    def __repr__(self) -> str:
        return f"Signer({self.key_id!r}, {self.algorithm!r}, '***')"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a signer is not pickled: its key would be written wherever that goes")


def row_facts(
    row: Row, key_id: str, headers: Mapping[str, Any], body_sha256: str
) -> dict[str, Any]:
    """Return the facts of a sent message, without those of a conversation."""
    return {
        "key_id": key_id,
        "message_id": str(row.message_id),
        "from_service": row.from_service,
        "to_service": row.to_service,
        "to_broker": row.to_broker and str(row.to_broker),
        "key": row.key,
        "message_type": row.message_type,
        "deliver_at": microseconds(row.deliver_at),
        "expires_at": microseconds(row.expires_at),
        "headers": headers,
        "body": body_sha256,
    }
