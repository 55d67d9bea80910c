"""Arrays that pass from one database to another as they are, in PostgreSQL's binary form.

A session of `passing` loads and dumps arrays of the columns of messages as `Array`. So whole
columns pass through a process that looks at no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import adapt, pq
from psycopg.abc import AdaptContext

from saf.columns import IN_TABLES

# Statements of such a session are planned once, whatever the tables contain at that time
PLANS = """
SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off;
SET enable_mergejoin = off; SET plan_cache_mode = force_generic_plan
"""


@dataclass(frozen=True)
class Array:
    """An array as a database sends it, in its binary form."""

    oid: int
    data: bytes


class _Load(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: adapt.Buffer) -> Array:
        return Array(self.oid, bytes(data))


class _Dump(adapt.Dumper):
    format = pq.Format.BINARY

    def __init__(self, cls: type, context: AdaptContext | None = None, oid: int = 0) -> None:
        super().__init__(cls, context)
        self.oid = oid

    def get_key(self, obj: Array, format: adapt.PyFormat) -> Any:  # noqa: A002, ARG002 - psycopg
        return self.cls, obj.oid

    def upgrade(self, obj: Array, format: adapt.PyFormat) -> _Dump:  # noqa: A002, ARG002 - as above
        return _Dump(self.cls, None, obj.oid)

    def dump(self, obj: Array) -> bytes:
        return obj.data


def passing(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """Let a session pass arrays on, and plan each statement once; return its connection."""
    connection.execute(PLANS)
    connection.prepare_threshold = 0
    for kind in {*IN_TABLES.values()}:
        connection.adapters.register_loader(connection.adapters.types[kind].array_oid, _Load)
    connection.adapters.register_dumper(Array, _Dump)
    return connection
