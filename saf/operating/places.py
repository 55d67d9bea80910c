"""Places: the brokers that a question concerns, by the names in saf.toml."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Event, Lock, Thread

from saf.config import Broker, Settings
from saf.errors import ConfigurationError, SafError, Unexpected
from saf.operating.fleets import Listing, ask, ask_all
from saf.telemetry.logger import Log

REFRESH_SECONDS = 60.0
"""Interval at which fleets list their brokers."""
AGAIN_SECONDS = 5.0
"""Interval for a fleet that has never answered."""
FIRST_SECONDS = 1.5
"""Maximum wait for a fleet that has not answered yet."""

log = Log("saf.places")


def chosen(settings: Settings, name: str | None) -> Mapping[str, Broker] | Listing:
    """Return the brokers that a command concerns, including those of fleets.

    A destination is included only if it is named.

    Raises:
        ConfigurationError: no broker has this name.
        Unavailable: the named fleet cannot list its brokers.
    """
    if name is None:
        found = ask_all(settings.fleets)
        return Listing(brokers=dict(settings.brokers) | found.brokers, problems=found.problems)
    if not _of_fleet(settings, name):
        return {name: _place(settings, name)}
    fleet = name.partition("/")[0]
    found = ask(fleet, settings.fleets[fleet])
    if name == fleet:
        return found
    if name not in found.brokers:
        raise ConfigurationError(f"--broker {name}: not in the fleet {fleet!r}")
    return {name: found.brokers[name]}


def everywhere(settings: Settings, name: str | None) -> Mapping[str, Broker] | Listing:
    """Return the brokers that may have ends of conversations: sources and destinations, or one.

    A broker that is both has the same name in both roles.
    """
    found = chosen(settings, name)
    if name is not None or not isinstance(found, Listing):
        return found
    return Listing(brokers={**_stores(settings), **found.brokers}, problems=found.problems)


def stores(settings: Settings, name: str | None) -> Mapping[str, Broker]:
    """Return the brokers where services live: destinations that are brokers, or the named one."""
    return _stores(settings) if name is None else {name: _place(settings, name)}


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


def _place(settings: Settings, name: str) -> Broker:
    places = {**_stores(settings), **settings.brokers}
    if name not in places and name in settings.destinations:
        kind = settings.destinations[name].kind
        raise ConfigurationError(
            f"--broker {name}: the destination {name!r} is of kind {kind!r}, and no broker"
        )
    if name not in places:
        names = ", ".join(settings.brokers)
        raise ConfigurationError(f"--broker {name}: no [brokers.{name}] in saf.toml, only {names}")
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
        if name is None:
            self._known: dict[str, Mapping[str, Broker]] = {
                "": {**_stores(settings), **settings.brokers}
            }
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
            return {name: one for part in self._known.values() for name, one in part.items()}

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
