"""A batch as bytes for a NATS server, written by Arrow, without Python code per message.

A header's value is a line of ASCII here. Other characters are encoded as CloudEvents encodes them
over HTTP: ``%`` and two digits for each byte of UTF-8. Most values stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import Mapped
from saf.destinations.nats.connection import VERSION_LINE, published
from saf.destinations.nats.subjects import subject
from saf.destinations.texts import TEXT
from saf.errors import Rejected

EVENTS = "ce-"
"""Prefix of CloudEvents attributes, as the binding for NATS defines it."""

BATCH, SEQUENCE, COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
THE_SERVERS = "nats-"
"""Prefix of header names that are commands to the server."""

LARGEST_HEAD = 65_535
LARGEST_LINE = 4_000
BYTES = pa.large_binary()
NAME = re.compile(r"[!-9;-~]+")
AS_IT_IS = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
ENCODED = r"[^\x20-\x7E]|%|^ | $"


def encoded(value: str) -> str:
    r"""Return a header's encoded value.

    >>> encoded("plain text"), encoded("100 %\n"), encoded(" ü")
    ('plain text', '100 %25%0A', '%20%C3%BC')
    """
    text = quote(value, safe=AS_IT_IS)
    inner = text.strip(" ")
    first, last = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
    return "%20" * first + inner + "%20" * (len(text) - last if inner else 0)


def blocks(where: str, what: Mapped) -> list[bytes]:
    """Return the senders' own headers, encoded, one text for each distinct set.

    Raises:
        Rejected: this protocol cannot carry a header's name, or the name is the server's.
    """
    texts = []
    for headers in what.own:
        for name in headers:
            if not NAME.fullmatch(name):
                raise Rejected(where, f"NATS cannot carry a header {name!r}")
            if name.lower().startswith(THE_SERVERS):
                raise Rejected(where, f"the sender has given a header {name!r}, a server's command")
        texts.append("".join(f"{name}: {encoded(value)}\r\n" for name, value in headers.items()))
    return [block.encode() for block in texts]


def check(where: str, what: Mapped, largest: int) -> None:
    """Raise if the server does not accept one of these messages.

    Raises:
        Rejected: its headers, its size or its subject exceed a limit.
    """
    heads = pc.binary_length(_heads(where, what, "x" * 64))
    size = pc.max(pc.add(heads, pc.binary_length(what.body))).as_py() or 0
    if (head := pc.max(heads).as_py() or 0) > LARGEST_HEAD:
        raise Rejected(where, f"its headers have {head:,} bytes, more than {LARGEST_HEAD:,}")
    if size > largest:
        raise Rejected(where, f"it has {size:,} bytes, more than its server takes ({largest:,})")
    for topic in what.topics:
        if len(subject(topic).encode()) > LARGEST_LINE:
            raise Rejected(where, f"its subject has more than {LARGEST_LINE:,} bytes")


def messages(where: str, what: Mapped, batch: str, reply: str) -> memoryview:
    """Return the messages of a batch; the first one has a reply subject."""
    heads = _heads(where, what, batch)
    sizes = pc.binary_length(heads)
    totals = pc.add(sizes, pc.binary_length(what.body))
    subjects = pa.array([subject(topic).encode() for topic in what.topics], BYTES)
    replies = pa.array([f" {reply}".encode(), *[b""] * (what.count - 1)], BYTES)
    space, end = pa.scalar(b" ", BYTES), pa.scalar(b"\r\n", BYTES)
    array = pc.binary_join_element_wise(
        pa.scalar(b"HPUB ", BYTES),
        subjects.take(pa.array(what.topic)),
        replies,
        space,
        _text(sizes),
        space,
        _text(totals),
        end,
        heads,
        what.body.cast(BYTES),
        end,
        pa.scalar(b"", BYTES),
    )
    offsets = np.frombuffer(array.buffers()[1], np.int64)
    first, last = offsets[array.offset], offsets[array.offset + len(array)]
    return memoryview(array.buffers()[2])[first:last]


def mark(
    under: str, text: str, headers: Mapping[str, object], *, batch: str, sequence: int, commit: str
) -> bytes:
    """Return a mark of a batch; ``commit``: the reply subject, if the mark ends the batch."""
    fields = {**headers, BATCH: batch, SEQUENCE: sequence} | ({COMMIT: 1} if commit else {})
    return published(under, text.encode(), fields, commit)


def _heads(destination: str, what: Mapped, batch: str) -> pa.Array:
    """Return the headers of each message, including its number in the batch."""
    constant = "".join(
        f"{name}: {encoded(values)}\r\n"
        for name, values in what.headers.items()
        if isinstance(values, str)
    )
    first = f"{VERSION_LINE.decode()}\r\n{BATCH}: {batch}\r\n{constant}{SEQUENCE}: "
    numbers = _text(pa.array(np.arange(1, what.count + 1)))
    end = pa.scalar(b"\r\n", BYTES)
    parts = [pa.scalar(first.encode(), BYTES), numbers, end]
    for name, values in what.headers.items():
        if not isinstance(values, str):
            start = pa.scalar(f"{name}: ".encode(), BYTES)
            column = _encoded(values).cast(BYTES)
            parts.append(pc.binary_join_element_wise(start, column, end, pa.scalar(b"", BYTES)))
    parts.append(pa.array(blocks(destination, what), BYTES).take(pa.array(what.which)))
    return pc.binary_join_element_wise(
        *parts, end, pa.scalar(b"", BYTES), null_handling="replace", null_replacement=b""
    )


def _encoded(values: pa.Array) -> pa.Array:
    """Return encoded values; Python handles only the values that need encoding."""
    if not pc.any(pc.match_substring_regex(values, ENCODED)).as_py():
        return values
    known = values.dictionary_encode()
    texts = [encoded(value) for value in known.dictionary.to_pylist()]
    return pa.array(texts, TEXT).take(known.indices)


def _text(numbers: pa.Array) -> pa.Array:
    return numbers.cast(TEXT).cast(BYTES)
