"""Vouching: tell receivers what the source knows of a message's sender.

While a broker has rules for senders (`saf.broker.senders`), its server has checked the sender of
each message. The forwarder states this in a header, with the broker and the service. A header of
that name that a sender has made up is renamed, so that receivers can rely on the name. Messages on
a local route (`saf.routing.local`) bypass the forwarder: the function of its trigger does the same.

It works on whole columns of JSON text, as PostgreSQL writes it. If a name has two values, the last
one wins, in a jsonb and in Python; so the verified value is appended last.
"""

from __future__ import annotations

import json
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from saf.message import CLAIMED_FROM, VERIFIED_FROM

_VERIFIED, _CLAIMED = f'"{VERIFIED_FROM}":', f'"{CLAIMED_FROM}":'


def vouched(rows: pa.Table, source: UUID, since: int | None) -> pa.Table:
    """Return messages whose headers name the verified senders.

    Args:
        rows: with the columns of messages, and their ids in the outbox.
        source: the broker_id.
        since: senders of messages with greater ids were checked; None: no sender was.
    """
    checked = _checked(rows, since)
    headers = _renamed(rows["headers"], checked)
    if pc.any(checked).as_py():
        headers = _said(headers, rows["from_service"], checked, source)
    if headers is rows["headers"]:
        return rows
    return rows.set_column(rows.schema.get_field_index("headers"), "headers", headers)


def _checked(rows: pa.Table, since: int | None) -> pa.ChunkedArray:
    """Return for each message whether its sender was checked and its headers can tell so."""
    if since is None:
        return pa.chunked_array([pa.nulls(rows.num_rows, pa.bool_())])
    # a parked message has another number as its id
    ids = rows["log_id" if "log_id" in rows.column_names else "id"]
    mask = pc.and_(pc.greater(ids, since), pc.is_valid(rows["from_service"]))
    return pc.and_(mask, pc.fill_null(pc.starts_with(rows["headers"], "{"), True))


def _renamed(headers: pa.ChunkedArray, checked: pa.ChunkedArray) -> pa.ChunkedArray:
    forged = pc.match_substring(headers, _VERIFIED)
    if not pc.any(forged).as_py():
        return headers
    renamed = pc.replace_substring(headers, _VERIFIED, _CLAIMED)
    return pc.if_else(pc.fill_null(checked, False), headers, renamed)


def _said(
    headers: pa.ChunkedArray, services: pa.ChunkedArray, checked: pa.ChunkedArray, source: UUID
) -> pa.ChunkedArray:
    kind = headers.type
    known = pc.unique(services)
    entries = pa.array(
        [
            None
            if name is None
            else f"{_VERIFIED} {json.dumps({'broker': str(source), 'service': name})}}}"
            for name in known.to_pylist()
        ],
        kind,
    )
    given = pc.fill_null(headers, "{}")
    comma = pc.if_else(pc.equal(given, "{}"), pa.scalar("", kind), pa.scalar(", ", kind))
    whole = pc.binary_join_element_wise(
        pc.utf8_slice_codeunits(given, 0, -1),
        comma,
        entries.take(pc.index_in(services, known).combine_chunks()),
        pa.scalar("", kind),
    )
    return pc.if_else(checked, whole, headers)
