"""What a broker says of itself: the broker_id that routes by broker name, and where it is."""

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
    """Who a broker is."""

    broker_id: UUID
    name: str
    """That it was given when it was made; saf.toml may call it otherwise."""
    shards: int
    incarnation: int
    """Rises when it is repaired after it was set back; 1 if it never was."""
    since: str
    """The day when it was made."""
    database: str
    schema: str
    """The revision of its schema."""
    postgresql: str
    """The server's version."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as a dict for JSON."""
        return asdict(self) | {"broker_id": str(self.broker_id)}


def identity(connection: psycopg.Connection[Any]) -> Identity:
    """Return who a broker is. Only reads."""
    with psycopg.Cursor(connection, row_factory=class_row(Identity)) as cursor:
        found = cursor.execute(IDENTITY).fetchone()
    if found is None:
        raise RowsGone(connection.info.dbname, ["saf.broker has no row"])
    return found
