"""Databases as the rest of the library uses them: where they are, and how long to wait for them.

This package contains all code that opens, bounds, keeps or retries a connection, with any driver,
and that reads long lists page by page. Queries belong to the packages that send them, and so do all
tables of the schema, with one exception: the schema's revision is checked here.
"""

from saf.database.bounds import CONNECT_TIMEOUT_SECONDS
from saf.database.dsn import Dsn, application_name, refuse_unescaped, without_driver
from saf.database.queries import (
    DURABLY,
    HAS_SCHEMA,
    LOST,
    REVISION,
    SCHEMA_REVISION,
    NoAnswer,
    array,
    check_schema,
    fetch,
    of_broker,
    records,
    require_revision,
    require_schema,
    the_row,
    unavailable_if_lost,
)
from saf.database.sqlstates import Meaning, meaning, reason_of, translated

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
    "application_name",
    "array",
    "check_schema",
    "fetch",
    "meaning",
    "of_broker",
    "reason_of",
    "records",
    "refuse_unescaped",
    "require_revision",
    "require_schema",
    "the_row",
    "translated",
    "unavailable_if_lost",
    "without_driver",
]
