"""The audit: operators' decisions about messages that were set aside or lost, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import fetch
from saf.database.queries import Page, number_at, page_of

# Numbers are assigned in the order of the commits, even with retries: the messages of a low number
# must not arrive after those of a higher one.
ONE_AT_A_TIME = "SELECT pg_advisory_xact_lock(hashtextextended('saf retry', 0))"
AUDITED = """
SELECT audit_id, audit_at, who, person, action, cardinality(message_ids) AS messages,
       message_ids[1:3] AS first_message_ids, why
FROM saf.audit WHERE %(before)s::bigint IS NULL OR audit_id < %(before)s
ORDER BY audit_id DESC LIMIT %(limit)s
"""
AUDIT = """
INSERT INTO saf.audit (action, message_ids, why, person, names)
VALUES (%(action)s, %(message_ids)s, %(why)s, %(person)s, %(names)s) RETURNING audit_id
"""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """An operator's decision about messages."""

    audit_id: int
    audit_at: datetime
    who: str
    """The login at the database."""
    person: str | None
    """The user that a program acted for, as the program knows the user; None: only ``who``."""
    action: str
    messages: int
    first_message_ids: list[UUID]
    """The first few ids; saf.audit has all."""
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict for JSON."""
        ids = [str(id_) for id_ in self.first_message_ids]
        return asdict(self) | {"audit_at": self.audit_at.isoformat(), "first_message_ids": ids}


def audit(
    connection: psycopg.Connection[Any],
    action: str,
    message_ids: Sequence[UUID],
    why: str,
    *,
    person: str | None = None,
    names: Sequence[str | None] | None = None,
) -> int:
    """Record a decision about messages; return its number, which rises.

    ``person`` is for a program that acts for several users by one login. The database cannot check
    it; ``who`` is always the login. ``names``: those of held messages, in the order of their ids.
    """
    params = {
        "action": action,
        "message_ids": list(message_ids),
        "why": why,
        "person": person,
        "names": None if names is None else list(names),
    }
    ((number,),) = fetch(connection, AUDIT, params)
    return int(number)


def audited(
    connection: psycopg.Connection[Any], limit: int | None = 100, before: int | None = None
) -> list[Audited]:
    """Return decisions about messages, latest first; ``before`` is an audit_id."""
    with psycopg.Cursor(connection, row_factory=class_row(Audited)) as cursor:
        return cursor.execute(AUDITED, {"limit": limit, "before": before}).fetchall()


def page(
    connection: psycopg.Connection[Any], limit: int, before: int | None = None
) -> Page[Audited]:
    """Return a page of `audited`."""
    return page_of(
        lambda most: audited(connection, most, before), limit, lambda entry: str(entry.audit_id)
    )


def place_at(place: str | None) -> int | None:
    """Parse a place returned by an earlier page, for the next call of `page`.

    Raises:
        UsageError: no page of the audit ends there.
    """
    return number_at(place, "the audit")
