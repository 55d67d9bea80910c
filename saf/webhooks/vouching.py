"""Vouching at the receiving end: a source vouches only for its own senders.

A forwarder adds a header for a checked sender, with its broker and service
(`saf.engine.vouching`). The broker is always the forwarder's own source. A partner is not trusted
beyond that: a header that names another broker is renamed, just as a forwarder renames a header
that a sender has made up.
"""

from __future__ import annotations

import json
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.errors import Rejected
from saf.message import CLAIMED_FROM, STRICT, VERIFIED_FROM
from saf.webhooks.event import members

ESCAPED = r"\u00"
"""Beginning of an escape, by which a character of the header's name may be hidden."""


def vouched_by(rows: pa.Table, source: UUID) -> pa.Table:
    """Return messages whose headers name no verifying broker other than ``source``.

    Raises:
        Rejected: headers may contain such a claim, and cannot be read.
    """
    headers = rows["headers"]
    mask = pc.or_(pc.match_substring(headers, VERIFIED_FROM), pc.match_substring(headers, ESCAPED))
    suspects = headers.filter(mask).unique().to_pylist()  # most messages of a source share them
    renamed = {text: other for text in suspects if (other := _own(text, source)) != text}
    if not renamed:
        return rows
    column = pa.array([renamed.get(text, text) for text in headers.to_pylist()], headers.type)
    return rows.set_column(rows.schema.get_field_index("headers"), "headers", column)


def _own(text: str, source: UUID) -> str:
    """Return headers in which only ``source`` vouches for the sender.


    >>> one = UUID(int=1)
    >>> _own('{"n": 1.50, "saf-verified\\u002dfrom": {"broker": "another"}}', one)
    '{"n": 1.50, "saf-claimed-from": {"broker": "another"}}'
    >>> _own('{"n": 1.50, "saf-verified-from": {"broker": "%s"}}' % one, one)
    '{"n": 1.50, "saf-verified-from": {"broker": "00000000-0000-0000-0000-000000000001"}}'
    """
    try:
        document = STRICT.decode(text)
        if not isinstance(document, dict) or VERIFIED_FROM not in document:
            return text
        match document[VERIFIED_FROM]:
            case {"broker": str(broker)} if broker == str(source):
                return text
        whole = members(text)
    except (ValueError, RecursionError):
        raise Rejected("the broker", "its headers cannot be read") from None
    named = {CLAIMED_FROM if name == VERIFIED_FROM else name: whole[name] for name in whole}
    return f"{{{', '.join(f'{json.dumps(name)}: {value}' for name, value in named.items())}}}"
