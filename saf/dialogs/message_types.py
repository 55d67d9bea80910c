"""Message types of a broker; `saf.dialogs.contracts` creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import class_row

TYPES = "SELECT name, version, validation, schema FROM saf.message_type ORDER BY name, version"


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A version of a message type, as stored."""

    name: str
    version: int
    validation: str
    schema: Mapping[str, Any] | None


def message_types(connection: psycopg.Connection[Any]) -> list[Defined]:
    """Return all message types of a broker, by name and version."""
    with psycopg.Cursor(connection, row_factory=class_row(Defined)) as cursor:
        return cursor.execute(TYPES).fetchall()
