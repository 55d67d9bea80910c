"""Events: messages as whole events of CloudEvents 1.0, in JSON ("structured mode").

    {"specversion":"1.0","id":"…","source":"urn:uuid:…","safservice":"billing","partitionkey":"A-1",
     "type":"paid","time":"2026-01-31T12:00:00.000001Z","datacontenttype":"application/json",
     "data":{"order":"A-1"}}

The attributes are texts, written by Arrow. The sender's ``content-type`` becomes the event's
``datacontenttype``. For JSON and text, ``data`` contains the body: JSON byte for byte, text
as a string. Any other body, and one that does not match its type, goes into ``data_base64``.

Python checks each body against its type. An event of 200 bytes costs about 2 µs more than headers;
0.8 µs of this is Python.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from saf.destinations.texts import BYTES, NONE, joined, quoted

MEDIA_TYPE = "application/cloudevents+json; charset=utf-8"
"""Content type of an event that is a message's body."""
CONTENT_TYPE = "content-type"


def events(
    attributes: Mapping[str, pa.Array | str],
    own: Sequence[Mapping[str, str]],
    which: npt.NDArray[np.int64],
    body: pa.Array,
) -> pa.Array:
    """Return each message as an event.

    Args:
        attributes: values by attribute name; null where a message lacks the attribute.
        own: the distinct sets of senders' own headers.
        which: for each message, the index of its set in ``own``.
        body: the bodies.
    """
    constants = {name: values for name, values in attributes.items() if isinstance(values, str)}
    parts = [pa.scalar(_json({"specversion": "1.0", **constants})[:-1], BYTES)]
    for name, values in attributes.items():
        if not isinstance(values, str):
            before = pa.scalar(f',"{name}":'.encode(), BYTES)
            parts.append(pc.binary_join_element_wise(before, quoted(values).cast(BYTES), NONE))
    types = [one.get(CONTENT_TYPE) for one in own]
    content_types = [b"" if one is None else b',"datacontenttype":' + _json(one) for one in types]
    parts.append(pa.array(content_types, BYTES).take(pa.array(which)))
    write = [_writer(one) for one in types]
    data = [write[index](one) for index, one in zip(which.tolist(), body.to_pylist(), strict=True)]
    return joined(*parts, pa.array(data, BYTES), pa.scalar(b"}", BYTES))


def carried(own: Mapping[str, str]) -> dict[str, str]:
    """Return a message's headers when its body is an event: the sender's, with the event's type."""
    return {**own, CONTENT_TYPE: MEDIA_TYPE}


def attributes_of(headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """Return the attributes of the event in a message's body; empty if the body is not an event."""
    if headers.get(CONTENT_TYPE) != MEDIA_TYPE:
        return {}
    try:
        event = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {name: str(value) for name, value in event.items()} if isinstance(event, dict) else {}


def _writer(content_type: str | None) -> Callable[[bytes], bytes]:
    """Return a function that writes bodies of a content type as a member of an event."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind.endswith(("/json", "+json")):
        return _as_it_is
    return _text if kind.startswith("text/") else _base64


def _as_it_is(body: bytes) -> bytes:
    r"""Return a JSON body as ``data``; as ``data_base64`` if it is not valid JSON.

    >>> _as_it_is(b'{"n": 1.50}'), _as_it_is(b"NaN")
    (b',"data":{"n": 1.50}', b',"data_base64":"TmFO"')
    """
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError:
        return _base64(body)
    return b',"data":' + body


def _text(body: bytes) -> bytes:
    r"""Return a text body as ``data``; as ``data_base64`` if it is not UTF-8.

    >>> _text(b'say "ah"'), _text(b"\xff")
    (b',"data":"say \\"ah\\""', b',"data_base64":"/w=="')
    """
    try:
        return b',"data":' + encode_basestring(body.decode()).encode()
    except UnicodeDecodeError:
        return _base64(body)


def _base64(body: bytes) -> bytes:
    return b',"data_base64":"%b"' % binascii.b2a_base64(body, newline=False)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
