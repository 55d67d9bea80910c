r"""Headers that transforms return, normalized to the way PostgreSQL writes a jsonb.

Code that runs after a transform expects headers to be a JSON object on one line with unescaped
names: the lines of `jsonl`, and `saf.engine.vouching`, which searches the text for a name. A
transform may return any text, so each distinct text is decoded and encoded again; numbers keep
their digits, because a signature covers them.

>>> written('{"a" :\n 1.50, "\\u0073af": ["ü", null, true]}')
'{"a": 1.50, "saf": ["ü", null, true]}'
"""

from __future__ import annotations

from json.encoder import encode_basestring

import pyarrow as pa
import pyarrow.compute as pc

from saf.message import STRICT, as_json, check_headers


def as_written(headers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return headers as PostgreSQL writes them; null where it cannot store them."""
    if headers.null_count == len(headers):
        return headers
    texts = pc.unique(headers)
    values = pa.array([_written(text) for text in texts.to_pylist()], headers.type)
    return pa.chunked_array([values.take(pc.index_in(headers, texts).combine_chunks())])


def written(text: str) -> str:
    """Return headers, given as JSON text, as PostgreSQL writes them.

    Raises:
        ValueError: not a JSON object that PostgreSQL can store.
        RecursionError: nested too deeply.
    """
    found = STRICT.decode(text)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - as for invalid JSON
    result = as_json(found, _text)
    result.encode()  # raises for a lone surrogate
    check_headers(result)
    return result


def _written(text: str | None) -> str | None:
    try:
        return None if text is None else written(text)
    except (ValueError, RecursionError):
        return None


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("a jsonb holds no NUL")
    return encode_basestring(value)
