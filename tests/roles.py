"""Who a connection is, and what the server forbids it."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from saf.database import Dsn
from tests.pipeline import connect


def as_user(dsn: Dsn, role: str) -> Dsn:
    """The same database, as another role."""
    return Dsn(make_conninfo(dsn.conninfo, user=role))


def denied(dsn: Dsn, statement: str | sql.Composed) -> bool:
    """Whether the server forbids a statement; what it does otherwise is rolled back."""
    with connect(dsn) as connection:
        return forbidden(connection, statement)


def forbidden(connection: psycopg.Connection[Any], statement: str | sql.Composed) -> bool:
    """The same, for a connection that goes on."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege:  # SQLSTATE 42501
        return True
    except psycopg.Error:
        return False  # allowed, though it cannot be
    return False
