"""Keys, the bytes that a signature covers, and the signer.

*Keys.* ``hmac-sha256`` has one secret, which both sides know: every verifier can also sign. It
needs only Python. ``ed25519`` has a private key, which only the sender knows, and a public key for
the receivers; it needs ``saf-outbox[signing]``. A secret is the base64 of 32 bytes or more
(``openssl rand -base64 32``). A key for Ed25519 is PEM (``openssl genpkey -algorithm ed25519``) or
the base64 of its 32 bytes. A key never shows its secret, however it is printed.

*The signed bytes* are unambiguous, and the same at the sender and at the target:
``saf-signature-1``, a line feed, and a map of these facts of the message:

    key_id                               the name of the signing key
    message_id, from_service, to_service, to_broker, key, message_type
    conversation_id, from_initiator, sequence
    deliver_at, expires_at               in microseconds since 1970-01-01T00:00:00Z
    headers                              all but `NOT_COVERED`
    body                                 its SHA-256, in lower-case hexadecimal

Each value is preceded by its kind and its length, so two different messages never have the same
bytes (as in DSSE's pre-authentication encoding):

    n  t  f           null, true, false
    s4:text           a text: its length in bytes of UTF-8, then these bytes
    d3:1.0            a number: like a text, with the digits as PostgreSQL writes them in a jsonb
    l2:… …            a list: the number of its values, then the values
    m1:s4:name…       a map: the number of its members, then the name and the value of each, sorted
                      by the bytes of the names

PostgreSQL stores headers as jsonb. That keeps neither the order of names nor spaces, keeps only the
last of two equal names, and writes ``1e3`` as ``1000``. So a signature covers the headers as a
target reads them, down to the digits of a number (``1.0`` is not ``1``).

Headers that saf adds on the way are not covered, and neither are values that only the server knows:
``created_at``, and ``deliver_at`` of a dialog's messages, the time of its receiver's next check.

*The signer* signs messages before they are written, so that a send stays a single INSERT. The
signature is in the header ``saf-signature``, with the key's name, the service that the message was
sent to, and ``expires_at`` if set, because the last two may have changed when the message arrives.
The signature covers them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, get_args

from saf.errors import InvalidMessage, MissingExtra, UsageError
from saf.message import (
    CLAIMED_FROM,
    LINEAGE,
    MAX_NAME,
    REDIRECTED,
    SIGNATURE,
    VERIFIED_FROM,
    Number,
    Row,
    check_headers,
    fits,
    no_number,
)

Algorithm = Literal["hmac-sha256", "ed25519"]

RequireSigned = bool | Literal["origin"]
"""Messages that a receiver takes: with a known signature, or with one of their first senders."""

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


VERSION = 1
"""Version of this form; a signature names the version of its form."""

BEGINNING = b"saf-signature-%d\n" % VERSION
"""No other program signs bytes with this prefix, even with the same key."""

NOT_COVERED = frozenset({SIGNATURE, VERIFIED_FROM, CLAIMED_FROM, LINEAGE, REDIRECTED})
"""Headers that forwarders, repairs and routing services write after the message was signed."""

DEEPEST = 100
"""Deepest nesting of the headers of a signed message."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class NotSignable(ValueError):
    """No signature can cover a message's headers; the text gives the reason."""


def signed_bytes(facts: Mapping[str, Any]) -> bytes:
    """Return the signed bytes of some facts.

    >>> signed_bytes({"key": "A-1", "headers": {"b": [True, None], "a": Number("1.0")}})
    b'saf-signature-1\\nm2:s7:headersm2:s1:ad3:1.0s1:bl2:tns3:keys3:A-1'

    Raises:
        NotSignable: a value is nested too deeply.
    """
    written = [BEGINNING]
    _write(facts, written, -1)
    return b"".join(written)


def read_headers(text: str | None) -> dict[str, Any]:
    """Return headers, given as JSON text, in their signed form, including headers not covered.

    >>> read_headers('{"a": 1e3, "b": -0.0, "c": 1.50, "a": 1e-3}')
    {'a': '0.001', 'b': '0.0', 'c': '1.50'}

    Raises:
        NotSignable: the headers are not a JSON object, or Python cannot read them.
    """
    if text is None:
        return {}
    try:
        document = json.loads(text, parse_int=number, parse_float=number, parse_constant=no_number)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise NotSignable(f"the headers cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise NotSignable("the headers are not a JSON object")
    return document


def covered(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers of a message that a signature covers."""
    return {name: value for name, value in headers.items() if name not in NOT_COVERED}


def number(text: str) -> Number:
    """Return a number as PostgreSQL writes it in a jsonb: no exponent, no sign of zero.

    >>> number("1e+16"), number("1.50e1"), number("-0.0"), number("-1.5E-7")
    ('10000000000000000', '15.0', '0.0', '-0.00000015')
    """
    value = Decimal(text)
    return Number(format(value if value else value.copy_abs(), "f"))


def microseconds(moment: datetime | None) -> int | None:
    """Return a time as a signature covers it.

    >>> microseconds(datetime(2026, 1, 2, tzinfo=UTC))
    1767312000000000
    """
    return None if moment is None else (moment - EPOCH) // timedelta(microseconds=1)


def sha256(body: bytes) -> str:
    """Return the hash of a body, as a signature covers it.

    >>> sha256(b"")[:16]
    'e3b0c44298fc1c14'
    """
    import hashlib  # loads OpenSSL, which most importers of saf do not need

    return hashlib.sha256(body).hexdigest()


def _write(value: Any, written: list[bytes], depth: int) -> None:
    if depth > DEEPEST:
        raise NotSignable(f"the headers are nested more than {DEEPEST} levels deep")
    if value is None:
        written.append(b"n")
    elif isinstance(value, bool):
        written.append(b"t" if value else b"f")
    elif isinstance(value, str):
        text = value.encode()
        kind = b"d" if isinstance(value, Number) else b"s"
        written.append(b"%s%d:%s" % (kind, len(text), text))
    elif isinstance(value, int):
        _write(Number(value), written, depth)
    elif isinstance(value, list):
        written.append(b"l%d:" % len(value))
        for item in value:
            _write(item, written, depth + 1)
    else:
        members = sorted((name.encode(), item) for name, item in value.items())
        written.append(b"m%d:" % len(members))
        for name, item in members:
            written.append(b"s%d:%s" % (len(name), name))
            _write(item, written, depth + 1)


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
