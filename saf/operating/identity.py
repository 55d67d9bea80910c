"""A broker's identity: the broker_id, which routes may name, and the place of the broker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.errors import RowsGone

IDENTITY = """
SELECT broker_id, name, shards, incarnation, created_at::date::text AS since,
       current_database() AS database, (SELECT version_num FROM saf.alembic_version) AS schema,
       current_setting('server_version') AS postgresql
FROM saf.broker
"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A broker's identity."""

    broker_id: UUID
    name: str
    """The broker's name at its creation; saf.toml may use another name."""
    shards: int
    incarnation: int
    """Raised by each repair after a set-back; 1 without any."""
    since: str
    """The day of its creation."""
    database: str
    schema: str
    """The revision of its schema."""
    postgresql: str
    """The server's version."""

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return asdict(self) | {"broker_id": str(self.broker_id)}


def identity(connection: psycopg.Connection[Any]) -> Identity:
    """Return a broker's identity. Reads only."""
    with psycopg.Cursor(connection, row_factory=class_row(Identity)) as cursor:
        found = cursor.execute(IDENTITY).fetchone()
    if found is None:
        raise RowsGone(connection.info.dbname, ["saf.broker has no row"])
    return found
