"""Places: the brokers that a question concerns, by the names in saf.toml, and members of fleets.

A fleet is sources that saf.toml does not name one by one:

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

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from threading import Event, Lock, Thread
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import class_row

from saf.config import Broker, Fleet, Settings, did_you_mean
from saf.database import Dsn, check_schema, fetch, unavailable_if_lost
from saf.errors import ConfigurationError, SafError, Unexpected
from saf.message import MAX_NAME, fits
from saf.telemetry.logger import Log

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
    others: Sequence[str] = ()
    """Stores that are left out, because only sources are asked for."""


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
            f"fleets.{name}.query returns {len(rows[0])} columns instead of two: name and dsn"
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
            origin = f"the query of fleet {name!r}" if fleet.query else fleet.dsn.origin
            dsn = Dsn(conninfo, fleet.dsn.bounds, origin)
            broker = kind(dsn=dsn, max_connections=fleet.max_connections)
            if listing.brokers.setdefault(full, broker) is not broker:
                raise ConfigurationError("its name is listed twice")  # noqa: TRY301
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
        raise ConfigurationError(f"its name needs 1 to {MAX_NAME} bytes of printable characters")
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


NONE: Mapping[str, Broker] = MappingProxyType({})

REFRESH_SECONDS = 60.0
"""Interval at which fleets list their brokers."""
AGAIN_SECONDS = 5.0
"""Interval for a fleet that has never answered."""
FIRST_SECONDS = 1.5
"""Maximum wait for a fleet that has not answered yet."""

log = Log("saf.places")


def chosen(
    settings: Settings, name: str | None, *, named_by: str = "--broker"
) -> Mapping[str, Broker] | Listing:
    """Return the brokers that a command concerns, including those of fleets.

    A destination is included only if it is named. ``named_by`` says in errors who names it.

    Raises:
        ConfigurationError: no broker has this name.
        Unavailable: the named fleet cannot list its brokers.
    """
    if name is None:
        found = ask_all(settings.fleets)
        sources = dict(settings.brokers) | found.brokers
        others = [name for name in _joined(_stores(settings), sources) if name not in sources]
        return Listing(brokers=sources, problems=found.problems, others=others)
    if not _of_fleet(settings, name):
        return {name: _place(settings, name, named_by)}
    fleet = name.partition("/")[0]
    found = ask(fleet, settings.fleets[fleet])
    if name == fleet:
        return found
    if name not in found.brokers:
        raise ConfigurationError(f"{named_by} {name}: not in the fleet {fleet!r}")
    return {name: found.brokers[name]}


def everywhere(settings: Settings, name: str | None) -> Mapping[str, Broker] | Listing:
    """Return all sources and stores, or the named broker or fleet.

    A database that is both appears once, by its name as a source; see `destinations_at`.
    """
    found = chosen(settings, name)
    if name is not None or not isinstance(found, Listing):
        return found
    brokers = _joined(_stores(settings), found.brokers)
    return Listing(brokers=brokers, problems=found.problems)


def stores(settings: Settings, name: str | None) -> Mapping[str, Broker]:
    """Return the brokers where services live: destinations that are brokers, or the named one."""
    return _joined(_stores(settings)) if name is None else {name: _place(settings, name)}


def destinations_at(settings: Settings, broker: Broker) -> list[str]:
    """Return the names under which a broker is a destination."""
    return [name for name, item in _stores(settings).items() if item.dsn.place == broker.dsn.place]


def store(settings: Settings, name: str | None) -> Mapping[str, Broker]:
    """Return the one broker where a service is to live.

    Raises:
        ConfigurationError: none is named, and several exist.
    """
    found = stores(settings, name)
    if not found:
        raise ConfigurationError("no destination of saf.toml is a broker, where services live")
    if len(found) > 1:
        raise ConfigurationError(f"which broker? Use --broker with one of {', '.join(found)}")
    return found


def is_source(settings: Settings, name: str) -> bool:
    """Return whether a broker's outbox is forwarded: it is in saf.toml, or in a fleet."""
    return name in settings.brokers or name.partition("/")[0] in settings.fleets


def _of_fleet(settings: Settings, name: str) -> bool:
    """Return whether a name belongs to a fleet, or to a broker of a fleet."""
    return name.partition("/")[0] in settings.fleets and name not in settings.destinations


def _stores(settings: Settings) -> dict[str, Broker]:
    """Return the destinations that are brokers."""
    return {
        name: Broker(dsn=dsn)
        for name, destination in settings.destinations.items()
        if (dsn := destination.broker())
    }


def _joined(
    stores: Mapping[str, Broker], sources: Mapping[str, Broker] = NONE
) -> dict[str, Broker]:
    """Return stores and sources; a store whose database has another name here is left out.

    >>> at = {name: Broker(dsn=Dsn(f"dbname={name}")) for name in ("shop", "mom")}
    >>> [*_joined({"a": at["mom"], "b": at["shop"], "c": at["mom"]}, {"shop": at["shop"]})]
    ['a', 'shop']
    """
    seen = {broker.dsn.place for broker in sources.values()}
    others: dict[str, Broker] = {}
    for name, broker in stores.items():
        if name not in sources and broker.dsn.place not in seen:
            seen.add(broker.dsn.place)
            others[name] = broker
    return {**others, **sources}


def _place(settings: Settings, name: str, named_by: str = "--broker") -> Broker:
    places = {**_stores(settings), **settings.brokers}
    if name not in places and name in settings.destinations:
        kind = settings.destinations[name].kind
        raise ConfigurationError(
            f"{named_by} {name}: the destination {name!r} of kind {kind!r} is not a broker"
        )
    if name not in places:
        raise ConfigurationError(
            f"{named_by} {name}: no [brokers.{name}] and no [destinations.{name}] in saf.toml"
            f"{did_you_mean(name, places)}, only {', '.join(places)}"
        )
    return places[name]


class Places:
    """The brokers of saf.toml for long-lived processes, which wait for fleets only at first.

    A separate thread lists each fleet's brokers from time to time. If a fleet does not answer, the
    other fleets are not affected, and its own brokers stay as last known.

    Args:
        settings: Brokers, destinations and fleets.
        name: The only broker or fleet to include, if any.
        first_seconds: One-time maximum wait for fleets; None: until each has answered or failed.

    Raises:
        ConfigurationError: no broker or fleet has this name.
    """

    def __init__(
        self, settings: Settings, name: str | None, *, first_seconds: float | None = FIRST_SECONDS
    ) -> None:
        self._settings = settings
        self._first_seconds = first_seconds
        self._began: float | None = None
        self._named = name is not None
        self._stores = _stores(settings) if name is None else {}
        if name is None:
            self._known: dict[str, Mapping[str, Broker]] = {"": settings.brokers}
            fleets = [*settings.fleets]
        elif _of_fleet(settings, name):
            self._known, fleets = {}, [name]
        else:
            self._known, fleets = {"": {name: _place(settings, name)}}, []
        self._fleets = {name: _Asked() for name in fleets}
        self._lock = Lock()

    def __call__(self) -> Mapping[str, Broker]:
        """Return the brokers as last known, and list fleets again if it is time.

        Raises:
            SafError: ``name`` is a fleet, or one of its brokers, and the fleet has never answered.
        """
        self._ask()
        for name, asked in self._fleets.items():
            asked.once.wait(self._left())
            if self._named and name not in self._known and asked.error is not None:
                raise asked.error
        with self._lock:
            known = {name: one for part in self._known.values() for name, one in part.items()}
        return _joined(self._stores, known)

    def _left(self) -> float | None:
        """Return the remaining time to wait for fleets that have never answered."""
        if self._first_seconds is None or self._began is None:
            return self._first_seconds
        return max(0.0, self._began + self._first_seconds - time.monotonic())

    def _ask(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._began = now if self._began is None else self._began
            for name, asked in self._fleets.items():
                wait = REFRESH_SECONDS if name in self._known else AGAIN_SECONDS
                if not asked.now and now - asked.at > wait:
                    asked.now, asked.at = True, now
                    Thread(
                        target=self._list, args=[name, asked], name="saf-fleet", daemon=True
                    ).start()

    def _list(self, name: str, asked: _Asked) -> None:
        """List one fleet's brokers; raise nothing."""
        try:
            found = chosen(self._settings, name)
            problems = found.problems if isinstance(found, Listing) else []
            brokers = found.brokers if isinstance(found, Listing) else found
            with self._lock:
                kept = self._known.get(name, {}) if problems else {}
                self._known[name] = {**kept, **brokers}
            asked.error = None
            for _, problem in problems:
                log.warning("fleet_not_listed", fleet=name, error=str(problem))
        except Exception as error:
            before = asked.error
            asked.error = error if isinstance(error, SafError) else Unexpected(name, error)
            if str(asked.error) != str(before):
                log.warning("fleet_not_listed", fleet=name, error=str(asked.error))
        finally:
            asked.now = False
            asked.once.set()


@dataclass(kw_only=True)
class _Asked:
    """The result of listing a fleet's brokers."""

    at: float = float("-inf")
    """Time of the last query."""
    now: bool = False
    """True while the query is running."""
    once: Event = field(default_factory=Event)
    """Set once the fleet has answered, or failed."""
    error: SafError | None = None
    """The last error; None after a success."""
