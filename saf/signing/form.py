"""The bytes that a signature covers: unambiguous, and the same at the sender and at the target.

The bytes are ``saf-signature-1``, a line feed, and a map of these facts of the message:

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
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from saf.message import CLAIMED_FROM, LINEAGE, SIGNATURE, VERIFIED_FROM, Number, no_number

VERSION = 1
"""Version of this form; a signature names the version of its form."""

BEGINNING = b"saf-signature-%d\n" % VERSION
"""No other program signs bytes with this prefix, even with the same key."""

NOT_COVERED = frozenset({SIGNATURE, VERIFIED_FROM, CLAIMED_FROM, LINEAGE})
"""Headers that forwarders and repairs write after the message was signed."""

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
