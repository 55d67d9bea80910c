"""The options of a read: which broker, which log, how many partitions.

    broker        a name of saf.toml: of a broker, of a destination that is one, or FLEET/NAME
    config        the file; by default, $SAF_CONFIG or the saf.toml in Spark's folder
    dsn_from      instead of these two: the environment variable that holds the dsn
    log           outbox or inbox
    partitions    how many tasks read

Spark shows options to everybody. So a dsn is none of them: what is given here only says where it is
to be found, by the Python process on the driver's machine that plans a read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from saf.config import did_you_mean, load
from saf.database import Dsn
from saf.errors import ConfigurationError
from saf.fleets import ask
from saf.log.shards import MAX_SHARDS

NAMES = ("broker", "config", "dsn_from", "log", "partitions")
LOGS = ("outbox", "inbox")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a read was asked for; checked, but for what only saf.toml or the database knows."""

    log: Literal["outbox", "inbox"]
    broker: str | None = None
    config: str | None = None
    dsn_from: str | None = None
    partitions: int | None = None
    """None: as many as the session had slots when the format was registered."""

    @property
    def what(self) -> str:
        """The database, for people."""
        return f"broker {self.broker!r}" if self.broker else f"the broker of ${self.dsn_from}"

    def dsn(self) -> Dsn:
        """Find out where the database is.

        Raises:
            ConfigurationError: there is no such variable, or no such broker in saf.toml.
            Unavailable: a fleet does not say who belongs to it.
        """
        if self.broker is not None:
            return _configured(self.broker, Path(self.config) if self.config else None)
        name = cast("str", self.dsn_from)
        if name not in os.environ:
            raise ConfigurationError(
                f"dsn_from = {name!r}: this environment variable is not set where Spark's driver "
                "runs; set it before Spark starts"
            )
        return Dsn(os.environ[name])


def options_of(given: Mapping[str, str]) -> Options:
    """Check options as Spark hands them over.

    Raises:
        ConfigurationError: it names the option at fault. Values of unknown ones are not shown.
    """
    known = {name.lower(): value for name, value in given.items()}
    for name in known:
        if name not in NAMES:
            secret = (
                "; a dsn in an option would be shown by Spark: name the broker of a saf.toml"
                * ("dsn" in name or "url" in name or "password" in name)
            )
            raise ConfigurationError(
                f"there is no option {name!r} of the format saf{did_you_mean(name, NAMES)}, only "
                f"{', '.join(NAMES)}{secret}"
            )
    if ("broker" in known) == ("dsn_from" in known):
        raise ConfigurationError(
            "which broker? Give the format saf either the option broker, a name of saf.toml, or "
            "dsn_from, an environment variable with its dsn"
        )
    if "config" in known and "broker" not in known:
        raise ConfigurationError("the option config goes with broker, and not with dsn_from")
    log = known.get("log", "")
    if log not in LOGS:
        raise ConfigurationError(f"the option log is outbox or inbox, and not {log!r}")
    return Options(
        log=cast("Literal['outbox', 'inbox']", log),
        broker=known.get("broker"),
        config=known.get("config"),
        dsn_from=known.get("dsn_from"),
        partitions=_partitions(known.get("partitions")),
    )


def _partitions(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SHARDS:
        raise ConfigurationError(
            f"the option partitions is a number from 1 to {MAX_SHARDS}, and not {text!r}"
        )
    return int(text)


def _configured(name: str, config: Path | None) -> Dsn:
    settings = load(config)
    stores = {place: dsn for place, one in settings.destinations.items() if (dsn := one.broker())}
    places = {**stores, **{place: one.dsn for place, one in settings.brokers.items()}}
    if name in places:
        return places[name]
    fleet = name.partition("/")[0]
    if "/" in name and fleet in settings.fleets:
        members = ask(fleet, settings.fleets[fleet]).brokers
        if name in members:
            return members[name].dsn
        raise ConfigurationError(f"broker = {name!r}: there is none in the fleet {fleet!r}")
    if name in settings.destinations:
        kind = settings.destinations[name].kind
        raise ConfigurationError(
            f"broker = {name!r}: the destination {name!r} is of kind {kind!r}, and no broker"
        )
    raise ConfigurationError(
        f"broker = {name!r}: saf.toml has no such broker{did_you_mean(name, places)}, only "
        f"{', '.join(places)}"
    )
