"""Fleet members that forwarders have met, remembered at a store so that a missing one is noticed.

A fleet lists the databases that exist now. A database that was dropped or renamed, or that allows
no connections, is simply not listed, and nobody forwards its remaining messages. So a forwarder
writes each member that it has met into ``saf.fleet_member`` of one store of its saf.toml: the
default destination, or else the first destination that is a broker. A member that was met and is
not listed is missing until it is listed again or an operator forgets it. A member that is listed
under another name, as its broker_id shows, is not missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from saf.database import Dsn, check_schema, unavailable_if_lost

T = TypeVar("T")

KNOWN = """
SELECT fleet, name, broker_id, missing_since::text FROM saf.fleet_member
WHERE fleet = ANY (%(fleets)s) ORDER BY fleet, name
"""
# Nothing is written for a member that has not changed
MEET = """
INSERT INTO saf.fleet_member AS m (fleet, name, broker_id)
SELECT * FROM unnest(%(fleets)s::text[], %(names)s::text[], %(broker_ids)s::uuid[])
ON CONFLICT (fleet, name) DO UPDATE
SET broker_id = coalesce(excluded.broker_id, m.broker_id), missing_since = NULL
WHERE m.missing_since IS NOT NULL OR m.broker_id IS DISTINCT FROM
      coalesce(excluded.broker_id, m.broker_id)
"""
NOTE_MISSING = """
UPDATE saf.fleet_member SET missing_since = CASE WHEN name = ANY (%(names)s) THEN now() END
WHERE fleet = %(fleet)s AND (missing_since IS NULL) = (name = ANY (%(names)s))
"""
FORGET = "DELETE FROM saf.fleet_member WHERE fleet = %(fleet)s AND name = %(name)s"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a fleet that a forwarder has met."""

    fleet: str
    name: str
    """FLEET/NAME, as in commands."""
    broker_id: UUID | None = None
    missing_since: str | None = None


class Memory:
    """The members that a store remembers.

    Methods connect, and raise the errors of connecting.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn

    def known(self, fleets: Collection[str]) -> list[Member]:
        """Return the members of fleets that forwarders have met."""

        def known(connection: psycopg.Connection[Any]) -> list[Member]:
            with psycopg.Cursor(connection, row_factory=class_row(Member)) as cursor:
                return cursor.execute(KNOWN, {"fleets": list(fleets)}).fetchall()

        members: list[Member] = self._visit(known)
        return members

    def meet(self, members: Collection[Member]) -> None:
        """Remember members that were met."""
        params = {
            "fleets": [member.fleet for member in members],
            "names": [member.name for member in members],
            "broker_ids": [member.broker_id for member in members],
        }
        self._visit(lambda connection: connection.execute(MEET, params))

    def note_missing(self, fleet: str, names: Collection[str]) -> None:
        """Note which members of a fleet are missing now, and that the others are not."""
        params = {"fleet": fleet, "names": list(names)}
        self._visit(lambda connection: connection.execute(NOTE_MISSING, params))

    def forget(self, fleet: str, name: str) -> bool:
        """Forget a member; return whether it was known."""
        params = {"fleet": fleet, "name": name}
        return bool(self._visit(lambda connection: connection.execute(FORGET, params).rowcount))

    def _visit(self, action: Callable[[psycopg.Connection[Any]], T]) -> T:
        with (
            unavailable_if_lost("the store that remembers the members of fleets"),
            self._dsn.connect(role="fleet", autocommit=True) as connection,
        ):
            check_schema(connection)
            return action(connection)


def missing(known: Iterable[Member], listed: Collection[str]) -> list[Member]:
    """Return the known members that are not listed, under their name or another one.

    >>> one = UUID(int=1)
    >>> known = [Member(fleet="f", name=f"f/{name}", broker_id=id_)
    ...          for name, id_ in (("a", one), ("b", None), ("now", one))]
    >>> [member.name for member in missing(known, ["f/now"])]
    ['f/b']
    """
    known = list(known)
    here = {member.broker_id for member in known if member.name in listed} - {None}
    return [
        member for member in known if member.name not in listed and member.broker_id not in here
    ]
