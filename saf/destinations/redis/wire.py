"""The command that stores a step, as bytes for the server, written by Arrow.

The client would write each value of each message separately, in Python. Here, a column becomes the
bytes of its values, ``$4`` and ``body`` with their line ends, and a message is these joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from saf.destinations.mapping import Mapped

BODY = "body"
"""Field of an entry that contains the message's body."""

EVENTS = "ce_"
"""Prefix of CloudEvents attributes: Redis has no binding, so this is Kafka's."""

BYTES = pa.large_binary()


def command(
    sha: str,
    keys: Sequence[str],
    expected: Mapping[str, str],
    moved: Mapping[str, str],
    what: Mapped | None,
) -> list[Any]:
    """Return the command for `saf.destinations.redis.script.STORE`, in parts.

    Args:
        sha: the script's name at the server.
        keys: the keys of the marks and of the set of streams, followed by those of the topics.
        expected: expected values of fields of marks.
        moved: new values of fields of marks.
        what: the messages, if any.
    """
    arguments = [len(expected), *_flat(expected), len(moved), *_flat(moved)]
    if what is None or not what.count:
        words = ["EVALSHA", sha, len(keys), *keys, *arguments, 0]
        return [b"*%d\r\n" % len(words) + _bulks(words)]
    shapes, shape, fields, values = _shaped(what)
    arguments.append(len(shapes))
    for one in shapes:
        arguments += [len(one), *(part for pair in one for part in pair)]
    words = ["EVALSHA", sha, len(keys), *keys, *arguments]
    count = len(words) + int((2 + fields)[shape].sum())
    array = pc.binary_join_element_wise(
        _words(len(what.topics)).take(pa.array(what.topic)),
        _words(len(shapes)).take(pa.array(shape)),
        *values,
        pa.scalar(b"", BYTES),
        null_handling="replace",
        null_replacement=b"",
    )
    return [b"*%d\r\n" % count + _bulks(words), _content(array)]


def _shaped(
    messages: Mapped,
) -> tuple[list[list[tuple[str, str]]], npt.NDArray[np.int64], npt.NDArray[np.int64], list[Any]]:
    """Return the shapes, each message's shape, values per shape, and the columns of values."""
    constant: list[tuple[str, str]] = []
    own: list[tuple[str, pa.Array]] = []
    for name, values in messages.headers.items():
        if isinstance(values, str):
            constant.append((name, f"={values}"))
        elif (one := _one(values)) is not None:
            constant.append((name, f"={one}"))
        else:
            own.append((name, values))
    forms: dict[tuple[str, ...], int] = {}
    form = np.array([forms.setdefault(tuple(one), len(forms)) for one in messages.own], np.int64)
    code = form[messages.which] if len(messages.which) else messages.which
    for _, values in own:
        code = code * 2 + np.asarray(values.is_valid(), np.int64)
    codes, shape = np.unique(code, return_inverse=True)
    forms_of_senders = [*forms]
    shapes, fields = [], []
    for one in codes.tolist():
        names = [name for place, (name, _) in enumerate(reversed(own)) if one >> place & 1][::-1]
        of_sender = forms_of_senders[one >> len(own)]
        each = [*of_sender, *names, BODY]
        shapes.append([*constant, *((name, "?") for name in each)])
        fields.append(len(each))
    values_of_senders = pa.array([_bulks(one.values()) for one in messages.own], BYTES)
    columns = [
        values_of_senders.take(pa.array(messages.which)),
        *(_bulk(values) for _, values in own),
    ]
    return shapes, shape, np.array(fields, np.int64), [*columns, _bulk(messages.body)]


def _one(values: pa.Array) -> str | None:
    """Return the value that all messages share; None if values differ or are missing."""
    if values.null_count or not len(values) or not pc.all(pc.equal(values, values[0])).as_py():
        return None
    return str(values[0].as_py())


def _flat(pairs: Mapping[str, str]) -> Iterable[str]:
    return (part for pair in pairs.items() for part in pair)


def _bulks(words: Iterable[object]) -> bytes:
    r"""Return words in the server's format.

    >>> _bulks(["grüezi", 7])
    b'$7\r\ngr\xc3\xbcezi\r\n$1\r\n7\r\n'
    """
    encoded = [str(word).encode() for word in words]
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


def _words(count: int) -> pa.Array:
    """Return the numbers from 1 to ``count`` in the server's format."""
    return pa.array([_bulks([number + 1]) for number in range(count)], BYTES)


def _bulk(values: pa.Array) -> pa.Array:
    """Return the values of a column in the server's format; null for null."""
    values = values.cast(BYTES)
    sizes = pc.binary_length(values).cast(pa.large_string()).cast(BYTES)
    end = pa.scalar(b"\r\n", BYTES)
    return pc.binary_join_element_wise(
        pa.scalar(b"$", BYTES), sizes, end, values, end, pa.scalar(b"", BYTES)
    )


def _content(array: pa.Array) -> memoryview:
    """Return the concatenated bytes of all values, without copying them."""
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    offsets = np.frombuffer(array.buffers()[1], np.int64)
    first, last = offsets[array.offset], offsets[array.offset + len(array)]
    return memoryview(array.buffers()[2])[first:last]
