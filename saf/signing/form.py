"""What a signature covers, as bytes: the same at the sender and at the target, and unambiguous.

The bytes are ``saf-signature-1``, a line feed, and a map of these facts of the message:

    key_id                               the key that signs, by its name
    message_id, from_service, to_service, to_broker, key, message_type
    conversation_id, from_initiator, sequence
    deliver_at, expires_at               in microseconds since 1970-01-01T00:00:00Z
    headers                              all but `NOT_COVERED`
    body                                 its SHA-256, in lower-case hexadecimal

Each value is written with its kind and its length before it, so two different messages never have
the same bytes (as in DSSE's pre-authentication encoding):

    n  t  f           null, true, false
    s4:text           a text: the number of its bytes in UTF-8, and these
    d3:1.0            a number: the same, with the number as PostgreSQL writes it in a jsonb
    l2:… …            a list: how many values it has, and these
    m1:s4:name…       a map: how many members it has; of each the name and the value, in the order
                      of the bytes of the names

PostgreSQL stores headers as jsonb, which keeps neither the order of names, nor spaces, nor the last
but one of two equal names, and writes ``1e3`` as ``1000``. So a signature covers what a target
reads of them, down to the digits of a number (``1.0`` is not ``1``).

What saf says of a message on its way is not covered, and neither is what only the server knows:
``created_at``, and of a dialog's message ``deliver_at``, which tells its receiver when to look
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from saf.message import CLAIMED_FROM, LINEAGE, SIGNATURE, VERIFIED_FROM, Number, no_number

VERSION = 1
"""The number of this form; a signature says which form it has."""

BEGINNING = b"saf-signature-%d\n" % VERSION
"""No other program signs bytes that begin like this, even with the same key."""

NOT_COVERED = frozenset({SIGNATURE, VERIFIED_FROM, CLAIMED_FROM, LINEAGE})
"""The headers that are written after the message was signed: by forwarders and repairs."""

DEEPEST = 100
"""How deeply the headers of a signed message may be nested."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class NotSignable(ValueError):
    """A message has headers that no signature can cover; the text says why."""


def signed_bytes(facts: Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed for some facts.

    >>> signed_bytes({"key": "A-1", "headers": {"b": [True, None], "a": Number("1.0")}})
    b'saf-signature-1\\nm2:s7:headersm2:s1:ad3:1.0s1:bl2:tns3:keys3:A-1'

    Raises:
        NotSignable: a value is nested too deeply.
    """
    written = [BEGINNING]
    _write(facts, written, -1)
    return b"".join(written)


def read_headers(text: str | None) -> dict[str, Any]:
    """Return headers as they are signed, given as JSON text; with those that are not covered.

    >>> read_headers('{"a": 1e3, "b": -0.0, "c": 1.50, "a": 1e-3}')
    {'a': '0.001', 'b': '0.0', 'c': '1.50'}

    Raises:
        NotSignable: they are no JSON object, or Python cannot read them.
    """
    if text is None:
        return {}
    try:
        said = json.loads(text, parse_int=number, parse_float=number, parse_constant=no_number)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise NotSignable(f"the headers cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise NotSignable("the headers are not a JSON object")
    return said


def covered(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a message's headers that a signature covers."""
    return {name: value for name, value in headers.items() if name not in NOT_COVERED}


def number(text: str) -> Number:
    """A number as PostgreSQL writes it in a jsonb: without an exponent, and zero without a sign.

    >>> number("1e+16"), number("1.50e1"), number("-0.0"), number("-1.5E-7")
    ('10000000000000000', '15.0', '0.0', '-0.00000015')
    """
    value = Decimal(text)
    return Number(format(value if value else value.copy_abs(), "f"))


def microseconds(moment: datetime | None) -> int | None:
    """A moment as a signature covers it.

    >>> microseconds(datetime(2026, 1, 2, tzinfo=UTC))
    1767312000000000
    """
    return None if moment is None else (moment - EPOCH) // timedelta(microseconds=1)


def sha256(body: bytes) -> str:
    """The hash of a body, as a signature covers it.

    >>> sha256(b"")[:16]
    'e3b0c44298fc1c14'
    """
    import hashlib  # it loads OpenSSL, which few who import saf need

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
        for one in value:
            _write(one, written, depth + 1)
    else:
        members = sorted((name.encode(), one) for name, one in value.items())
        written.append(b"m%d:" % len(members))
        for name, one in members:
            written.append(b"s%d:%s" % (len(name), name))
            _write(one, written, depth + 1)
