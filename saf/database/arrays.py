"""Arrays as PostgreSQL reads them.

psycopg inspects each element of a list several times to find the elements' type. For the 64 shards
of a small batch, that takes longer than the query. A statement that states the type itself, in a
CAST, takes an array as text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache


def array(values: Iterable[Hashable]) -> str:
    r"""Write numbers, or other values as text, as an array; None is NULL.

    >>> print(array([7, None, -1]), array(["", 'a"b', "c\\d", "NULL"]))
    {7,NULL,-1} {"","a\"b","c\\d","NULL"}
    """
    return f"{{{','.join(map(_element, values))}}}"


@lru_cache(4096, typed=True)  # most batches have similar shards
def _element(value: Hashable) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
