"""Messages of a batch, as the client sends them: headers that NATS can carry.

A header's value is a line of ASCII here. Other characters are encoded as CloudEvents encodes them
over HTTP: ``%`` and two digits for each byte of UTF-8. Most values stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import repeat
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import Mapped
from saf.destinations.nats.connection import Message
from saf.destinations.nats.subjects import subject
from saf.destinations.texts import TEXT
from saf.errors import Rejected

EVENTS = "ce-"
"""Prefix of CloudEvents attributes, as the binding for NATS defines it."""

BATCH, SEQUENCE, COMMIT = "Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit"
THE_SERVERS = "nats-"
"""Prefix of header names that are commands to the server."""

LARGEST_HEAD = 65_535
LARGEST_LINE = 4_000
FRAME = len("NATS/1.0\r\n\r\n") + len(f"{BATCH}: {'x' * 32}\r\n{SEQUENCE}: 1000\r\n")
"""Size of a message's headers without saf's and the sender's, in bytes."""
AROUND = len(": \r\n")
"""Size of a header without its name and value, in bytes."""
NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Names of headers that the client sends."""
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


def check(where: str, what: Mapped, largest: int) -> None:
    """Raise if the server does not accept one of these messages.

    Raises:
        Rejected: a header's name, the headers, the size or the subject exceed a limit.
    """
    for name in {name for headers in what.own for name in headers}:
        if not NAME.fullmatch(name):
            raise Rejected(where, f"NATS cannot carry a header {name!r}")
        if name.lower().startswith(THE_SERVERS):
            raise Rejected(where, f"the sender has given a header {name!r}, a server's command")
    own = [sum(map(_size, headers, headers.values())) for headers in _own(what)]
    heads = FRAME + np.array(own, np.int64)[what.which]
    for name, values in what.headers.items():
        if isinstance(values, str):
            heads += _size(name, encoded(values))
        else:
            sizes = pc.add(pc.binary_length(_encoded(values)), _size(name, ""))
            heads += np.asarray(pc.fill_null(sizes, 0))
    if (head := int(heads.max())) > LARGEST_HEAD:
        raise Rejected(where, f"its headers have {head:,} bytes, more than {LARGEST_HEAD:,}")
    if (size := int((heads + np.asarray(pc.binary_length(what.body))).max())) > largest:
        raise Rejected(where, f"it has {size:,} bytes, more than its server takes ({largest:,})")
    for topic in what.topics:
        if len(subject(topic).encode()) > LARGEST_LINE:
            raise Rejected(where, f"its subject has more than {LARGEST_LINE:,} bytes")


def messages(what: Mapped, batch: str, reply: str) -> Iterator[Message]:
    """Yield the messages of a batch; the first one has a reply subject."""
    constant, names, columns = {BATCH: batch}, [], []
    for name, values in what.headers.items():
        if isinstance(values, str):
            constant[name] = encoded(values)
        else:
            names.append(name)
            columns.append(_encoded(values).to_pylist())
    topics, own = [subject(topic) for topic in what.topics], _own(what)
    rows = zip(
        zip(*columns, strict=True) if columns else repeat(()),
        what.topic.tolist(), what.which.tolist(), what.body.to_pylist(),
        strict=False,
    )  # fmt: skip
    for number, (values, topic, which, body) in enumerate(rows, start=1):
        pairs = zip(names, values, strict=True)
        said = {name: value for name, value in pairs if value is not None}
        headers = {**constant, SEQUENCE: str(number), **said, **own[which]}
        yield Message(topics[topic], body, headers, reply)
        reply = ""


def texts(headers: Mapping[str, object]) -> dict[str, str]:
    """Return headers with their values as texts."""
    return {name: str(value) for name, value in headers.items()}


def _own(what: Mapped) -> list[dict[str, str]]:
    """Return the distinct sets of senders' own headers, encoded."""
    return [{name: encoded(value) for name, value in one.items()} for one in what.own]


def _size(name: str, value: str) -> int:
    return len(name) + len(value) + AROUND


def _encoded(values: pa.Array) -> pa.Array:
    """Return encoded values; Python handles only the values that need encoding."""
    if not pc.any(pc.match_substring_regex(values, ENCODED)).as_py():
        return values
    known = values.dictionary_encode()
    texts = [encoded(value) for value in known.dictionary.to_pylist()]
    return pa.array(texts, TEXT).take(known.indices)
