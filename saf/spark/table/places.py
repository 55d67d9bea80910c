"""Where to find the brokers that an option names: from saf.toml and its fleets."""

from __future__ import annotations

from pathlib import Path

from saf.config import Broker, did_you_mean, load
from saf.errors import ConfigurationError
from saf.fleets import ask
from saf.logger import Log

log = Log("saf.stream")


def configured(name: str, config: Path | None, *, fleets: bool = False) -> dict[str, Broker]:
    """Return the broker with a name in saf.toml; with ``fleets``, all brokers of a whole fleet.

    Raises:
        ConfigurationError: no broker has this name.
        Unavailable: a fleet cannot list its members.
    """
    settings = load(config, delivers=False)
    stores = {
        place: Broker(dsn=dsn)
        for place, destination in settings.destinations.items()
        if (dsn := destination.broker())
    }
    places = {**stores, **settings.brokers}
    if name in places:
        return {name: places[name]}
    fleet = name.partition("/")[0]
    if fleet in settings.fleets and (fleets or "/" in name):
        listing = ask(fleet, settings.fleets[fleet])
        members = listing.brokers
        if name == fleet:
            for where, error in listing.problems:
                log.warning("broker_not_listed", fleet=where, error=str(error))
            return dict(members)
        if name in members:
            return {name: members[name]}
        raise ConfigurationError(f"broker = {name!r}: not in the fleet {fleet!r}")
    if name in settings.destinations:
        kind = settings.destinations[name].kind
        raise ConfigurationError(
            f"broker = {name!r}: the destination {name!r} is of kind {kind!r}, and no broker"
        )
    raise ConfigurationError(
        f"broker = {name!r}: saf.toml has no such broker{did_you_mean(name, places)}, only "
        f"{', '.join(places)}"
    )
