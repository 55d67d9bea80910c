"""Places: the brokers that a question is for, by the names in saf.toml."""

from __future__ import annotations

import time
from collections.abc import Mapping

from saf.config import Broker, Settings
from saf.errors import ConfigurationError
from saf.fleets import Listing, ask, ask_all
from saf.logger import Log

REFRESH_SECONDS = 60.0
"""How often fleets are asked who belongs to them."""

log = Log("saf.places")


def chosen(settings: Settings, name: str | None) -> Mapping[str, Broker] | Listing:
    """Return the brokers that a command is for, with those of fleets.

    A destination is among them only if it is named.

    Raises:
        ConfigurationError: there is none of that name.
        Unavailable: a fleet that is named does not say who belongs to it.
    """
    if name is None:
        found = ask_all(settings.fleets)
        return Listing(brokers=dict(settings.brokers) | found.brokers, problems=found.problems)
    fleet = name.partition("/")[0]
    if fleet not in settings.fleets or name in settings.destinations:
        return {name: _place(settings, name)}
    found = ask(fleet, settings.fleets[fleet])
    if name == fleet:
        return found
    if name not in found.brokers:
        raise ConfigurationError(f"--broker {name}: there is none in the fleet {fleet!r}")
    return {name: found.brokers[name]}


def everywhere(settings: Settings, name: str | None) -> Mapping[str, Broker] | Listing:
    """Return the brokers that may have ends of conversations: sources and destinations, or one.

    A broker that is both has the same name as both.
    """
    found = chosen(settings, name)
    if name is not None or not isinstance(found, Listing):
        return found
    return Listing(brokers={**_stores(settings), **found.brokers}, problems=found.problems)


def stores(settings: Settings, name: str | None) -> Mapping[str, Broker]:
    """Return the brokers that services live at: destinations that are brokers, or the named one."""
    return _stores(settings) if name is None else {name: _place(settings, name)}


def store(settings: Settings, name: str | None) -> Mapping[str, Broker]:
    """Return the one broker that a service is to live at.

    Raises:
        ConfigurationError: none is named, and there are several.
    """
    found = stores(settings, name)
    if not found:
        raise ConfigurationError("no destination of saf.toml is a broker, where services live")
    if len(found) > 1:
        raise ConfigurationError(f"which broker? Say --broker, one of {', '.join(found)}")
    return found


def _stores(settings: Settings) -> dict[str, Broker]:
    """Return the destinations that are brokers."""
    return {
        name: Broker(dsn=dsn)
        for name, one in settings.destinations.items()
        if (dsn := one.broker())
    }


def _place(settings: Settings, name: str) -> Broker:
    places = {**_stores(settings), **settings.brokers}
    if name not in places and name in settings.destinations:
        kind = settings.destinations[name].kind
        raise ConfigurationError(
            f"--broker {name}: the destination {name!r} is of kind {kind!r}, and no broker"
        )
    if name not in places:
        there = ", ".join(settings.brokers)
        raise ConfigurationError(f"--broker {name}: there is no [brokers.{name}], only {there}")
    return places[name]


class Places:
    """The brokers of saf.toml, for who stays; fleets are asked again from time to time."""

    def __init__(self, settings: Settings, name: str | None) -> None:
        self._settings = settings
        self._name = name
        self._known: Mapping[str, Broker] = {}
        self._asked_at = float("-inf")

    def __call__(self) -> Mapping[str, Broker]:
        """Return the brokers as they were known at most `REFRESH_SECONDS` ago."""
        if time.monotonic() - self._asked_at > REFRESH_SECONDS:
            found = everywhere(self._settings, self._name)
            if isinstance(found, Listing):
                for fleet, error in found.problems:
                    log.warning("fleet_not_listed", fleet=fleet, error=str(error))
                gone = {fleet for fleet, _ in found.problems}
                kept = {n: b for n, b in self._known.items() if n.partition("/")[0] in gone}
                self._known = {**kept, **found.brokers}
            else:
                self._known = found
            self._asked_at = time.monotonic()
        return self._known
