"""Fleets: sources that saf.toml does not name one by one.

    [fleets.tenants]
    dsn = "postgresql://saf_forwarder@db2/postgres"
    databases = "tenant_*"

    [fleets.shops]
    dsn = "postgresql://saf_forwarder@control/tenancy"
    query = "SELECT name, dsn FROM shops WHERE live"

*By pattern*: databases on the server at ``dsn`` whose names match and that have the schema saf.
saf connects to each by ``dsn`` with the database's name. *By query*: one row per database,
with its name and its own dsn. That dsn is used unchanged: it inherits no password, and no variables
are replaced. The query runs in a read-only transaction.

Each member is a broker named FLEET/NAME. A row that is not a broker is reported as a problem, and
the others continue. The problem names the row only by its number, because a password may be
anywhere in the row. A forwarder lists the members again every ``refresh_seconds``: it starts to
forward new brokers and leaves alone those that are gone. If the listing fails, nothing changes.

A fleet lists the databases that exist now. A database that was dropped or renamed, or that allows
no connections, is simply not listed, and no process forwards its remaining messages. So a
forwarder remembers each member that it has met, in ``saf.fleet_member`` of one store of its
saf.toml (`memory`): the default destination, or else the first destination that is a broker. A
member that was met and is not listed is *missing* until it is listed again or an operator forgets
it. A member that is listed under another name, as its broker_id shows, is not missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import class_row

from saf.config import Broker, Fleet, Settings
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, SafError
from saf.message import MAX_NAME, fits

T = TypeVar("T")

COLUMNS = 2
"""Columns of a fleet's query: name and dsn."""
OF_THE_QUERY = "42"
"""SQLSTATE class whose messages are about the query, and never quote data that was read."""

DATABASES = """
SELECT datname, datallowconn FROM pg_catalog.pg_database WHERE NOT datistemplate ORDER BY datname
"""

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


class Candidate(Broker):
    """A database whose name matches the pattern. Only a connection shows whether it is a broker."""


@dataclass(kw_only=True)
class Listing:
    """Brokers of fleets by name, and problems with other rows."""

    brokers: dict[str, Broker] = field(default_factory=dict)
    problems: list[tuple[str, SafError]] = field(default_factory=list)
    """Problems, each with the name of its fleet."""
    closed: set[str] = field(default_factory=set)
    """Members whose databases allow no connections."""
    unlisted: set[str] = field(default_factory=set)
    """Fleets that could not be listed."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a fleet that a forwarder has met."""

    fleet: str
    name: str
    """FLEET/NAME, as in commands."""
    broker_id: UUID | None = None
    missing_since: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the member for JSON."""
        return {
            "member": self.name,
            "fleet": self.fleet,
            "broker_id": self.broker_id and str(self.broker_id),
            "missing_since": self.missing_since,
        }


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


def ask_all(fleets: Mapping[str, Fleet]) -> Listing:
    """List the current members of all fleets; report a fleet that cannot be listed as a problem."""
    found = Listing()
    for name, fleet in fleets.items():
        try:
            listing = ask(name, fleet)
        except SafError as error:
            found.problems.append((name, error))
            found.unlisted.add(name)
        else:
            found.brokers |= listing.brokers
            found.problems += listing.problems
            found.closed |= listing.closed
    return found


def ask(name: str, fleet: Fleet) -> Listing:
    """List the current members of a fleet. Connects, and only reads.

    Raises:
        Unavailable, ConfigurationError: the members cannot be listed.
    """
    with (
        unavailable_if_lost(f"fleet {name!r}"),
        fleet.dsn.connect(role="fleet", autocommit=True) as connection,
        connection.transaction(),
    ):
        connection.execute("SET TRANSACTION READ ONLY")
        if fleet.databases is not None:
            databases = fetch(connection, DATABASES)
            connectable = [database for database, is_open in databases if is_open]
            listing = _listing(name, fleet, _matching(fleet, connectable), Candidate)
            listing.closed = {
                f"{name}/{database}" for database, is_open in databases if not is_open
            }
            return listing
        return _listing(name, fleet, _queried(name, fleet, connection), Broker)


def _matching(fleet: Fleet, databases: Iterable[str]) -> list[tuple[object, ...]]:
    return [
        (database, make_conninfo(fleet.dsn.conninfo, dbname=database))
        for database in databases
        if fnmatchcase(database, fleet.databases or "")
    ]


def _queried(
    name: str, fleet: Fleet, connection: psycopg.Connection[tuple[object, ...]]
) -> list[tuple[object, ...]]:
    assert fleet.query is not None  # noqa: S101 - one of the two is set
    try:
        rows = fetch(connection, fleet.query.encode())
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        text = error.diag.message_primary if (error.sqlstate or "").startswith(OF_THE_QUERY) else ""
        reason = text or f"{type(error).__name__}, SQLSTATE {error.sqlstate}"
        raise ConfigurationError(f"fleets.{name}.query fails: {reason}") from None
    if rows and len(rows[0]) != COLUMNS:
        raise ConfigurationError(
            f"fleets.{name}.query gives {len(rows[0])} columns, and not two: name and dsn"
        )
    return rows


def _listing(
    name: str, fleet: Fleet, rows: Iterable[tuple[object, ...]], kind: type[Broker]
) -> Listing:
    listing = Listing()
    for number, (place, conninfo) in enumerate(rows, 1):
        try:
            full = f"{name}/{_name(place)}"
            if not isinstance(conninfo, str):
                raise ConfigurationError("its dsn is not text")  # noqa: TRY301
            dsn = Dsn(conninfo, fleet.dsn.bounds)
            broker = kind(dsn=dsn, max_connections=fleet.max_connections)
            if listing.brokers.setdefault(full, broker) is not broker:
                raise ConfigurationError("its name is listed before")  # noqa: TRY301
        except ConfigurationError as error:
            problem = ConfigurationError(f"fleet {name!r}, row {number}: {error}")
            listing.problems.append((name, problem))
    return listing


def _name(place: object) -> str:
    if (
        not isinstance(place, str)
        or not place
        or not fits(place, MAX_NAME)
        or not place.isprintable()
    ):
        raise ConfigurationError(f"its name has not 1 to {MAX_NAME} bytes of printable characters")
    return place


def memory(settings: Settings) -> Memory | None:
    """Return the memory of fleet members at a store; None if no destination is a broker."""
    first = settings.forwarder.default_destination
    for name in sorted(settings.destinations, key=lambda one: one != first):
        if dsn := settings.destinations[name].broker():
            return Memory(dsn)
    return None


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
