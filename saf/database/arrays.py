"""Arrays as PostgreSQL reads them.

psycopg looks at each element of a list several times, to find out which type they have. For the 64
shards of a small batch, that takes longer than the query. A statement that says the type itself, in
a CAST, takes an array as text.
"""

from __future__ import annotations

from collections.abc import Iterable


def array(values: Iterable[object]) -> str:
    r"""Write numbers, or anything as text, as an array; None is NULL.

    >>> print(array([7, None, -1]), array(["", 'a"b', "c\\d", "NULL"]))
    {7,NULL,-1} {"","a\"b","c\\d","NULL"}
    """
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
