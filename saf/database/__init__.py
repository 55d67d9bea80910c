"""Databases as the rest of the library meets them: where they are, how long they are waited for.

Here belongs whatever opens, bounds, keeps or repeats a connection, with any driver, and how what is
long is read a page at a time. What is asked over a connection belongs to the room that asks, and so
does any table of the schema. The one exception is the schema's revision.
"""

from saf.database.arrays import array
from saf.database.asking import (
    DURABLY,
    LOST,
    NoAnswer,
    fetch,
    of_broker,
    the_row,
    unavailable_if_lost,
)
from saf.database.bounds import CONNECT_TIMEOUT_SECONDS
from saf.database.dsn import Dsn, refuse_unescaped, without_driver
from saf.database.revision import (
    HAS_SCHEMA,
    REVISION,
    SCHEMA_REVISION,
    check_schema,
    require_revision,
    require_schema,
)
from saf.database.sqlstates import Meaning, meaning, translated

__all__ = [
    "CONNECT_TIMEOUT_SECONDS",
    "DURABLY",
    "HAS_SCHEMA",
    "LOST",
    "REVISION",
    "SCHEMA_REVISION",
    "Dsn",
    "Meaning",
    "NoAnswer",
    "array",
    "check_schema",
    "fetch",
    "meaning",
    "of_broker",
    "refuse_unescaped",
    "require_revision",
    "require_schema",
    "the_row",
    "translated",
    "unavailable_if_lost",
    "without_driver",
]
