"""Fleets: sources that saf.toml does not name one by one.

    [fleets.tenants]                              [fleets.shops]
    dsn = "postgresql://saf_forwarder@db2/postgres"         dsn = "postgresql://saf_forwarder@control/tenancy"
    databases = "tenant_*"                        query = "SELECT name, dsn FROM shops WHERE live"

*By pattern*: databases on the server at ``dsn`` whose names match and that have the schema saf.
saf connects to each by ``dsn`` with the database's name. *By query*: one row per database,
with its name and its own dsn. That dsn is used unchanged: it inherits no password, and no variables
are replaced. The query runs in a read-only transaction.

Each member is a broker named FLEET/NAME. A row that is not a broker is reported as a problem, and
the others continue. The problem names the row only by its number, because a password may be
anywhere in the row. A forwarder lists the members again every ``refresh_seconds``: it starts to
forward new brokers and leaves alone those that are gone. If the listing fails, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import psycopg
from psycopg.conninfo import make_conninfo

from saf.broker.fleet_members import Memory
from saf.config import Broker, Fleet, Settings
from saf.database import Dsn, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, SafError
from saf.message import MAX_NAME, fits

DATABASES = """
SELECT datname, datallowconn FROM pg_catalog.pg_database WHERE NOT datistemplate ORDER BY datname
"""

COLUMNS = 2
OF_THE_QUERY = "42"
"""SQLSTATE class whose messages are about the query, and never quote data that it has read."""


class Candidate(Broker):
    """A database whose name matches the pattern. Only a connection tells whether it is a broker."""


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


def memory(settings: Settings) -> Memory | None:
    """Return the store's memory of fleet members; None if no destination is a broker."""
    first = settings.forwarder.default_destination
    for name in sorted(settings.destinations, key=lambda one: one != first):
        if dsn := settings.destinations[name].broker():
            return Memory(dsn)
    return None


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
