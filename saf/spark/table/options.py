"""Options of the format ``saf``: which broker, which log, which messages, how many tasks.

A read has:

    broker        a name in saf.toml: of a broker, of a destination that is a broker, or FLEET/NAME.
                  A stream takes several, separated by commas, and whole fleets
    config        the file; by default, $SAF_CONFIG or the saf.toml in Spark's folder
    dsn_from      instead of these two: the environment variable that holds the dsn
    log           outbox or inbox
    partitions    number of reading tasks

A batch read may also have:

    archive       a folder or a table of `saf purge --archive`: read messages that left the log, too

A stream also has:

    subscription          its name at the brokers
    start                 beginning or now: where a new subscription starts reading
    maxRowsPerTrigger     maximum number of messages in a micro-batch
    maxBytesPerTrigger    maximum size of their bodies, in bytes

A write goes into an outbox, and may have:

    txnAppId, txnVersion  the application and its version: a version is sent only once. A stream
                          has only txnAppId: a name that no other checkpoint has used

Spark shows options to everyone. So a dsn is not an option: the options only name the place where
the Python process that plans a read, on the driver's machine, finds the dsn. For the same reason,
errors do not repeat the value of an unknown option.

`options_of` checks options as far as possible without saf.toml and the database. An unknown option,
or one that belongs to another operation, is an error; none is ignored. `configured` finds the
brokers that an option names, in saf.toml and its fleets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from saf.config import Broker, did_you_mean, load
from saf.database import Dsn
from saf.destinations.kinds import table_at
from saf.errors import ConfigurationError
from saf.log.offset import NO_LIMIT, Limit
from saf.log.shards import MAX_SHARDS
from saf.log.stream import Start
from saf.message import MAX_NAME, fits
from saf.operating.places import ask
from saf.telemetry.logger import Log

OF_STREAMS = ("subscription", "start", "maxRowsPerTrigger", "maxBytesPerTrigger")
OF_SINKS = ("txnAppId", "txnVersion")
OF_READS = ("archive",)
NAMES = ("broker", "config", "dsn_from", "log", "partitions", *OF_READS, *OF_STREAMS, *OF_SINKS)
LOGS = ("outbox", "inbox")
CHECKPOINT = "checkpointlocation"
"""An option of Spark itself, which Spark passes to writers of streams."""

NO_LIMITS = Limit()

NO_TABLE = (
    "Spark's catalog does not pass a table's options on when the table is read. Say "
    "CREATE TEMPORARY VIEW … USING saf OPTIONS (…)"
)
"""Advice after CREATE TABLE … USING saf, or saveAsTable."""

log = Log("saf.stream")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a read or a write, as `options_of` has checked them."""

    log: Literal["outbox", "inbox"]
    broker: str | None = None
    config: str | None = None
    dsn_from: str | None = None
    partitions: int | None = None
    """None: as many as the session had slots when the format was registered."""
    archive: str | None = None
    subscription: str | None = None
    start: Start = "beginning"
    limit: Limit = NO_LIMITS
    """Maximum size of a micro-batch."""
    application: str | None = None
    version: int | None = None
    given: tuple[str, ...] = ()
    """The names of all options that the user gave."""

    @property
    def names(self) -> list[str]:
        """The named brokers and fleets; empty if an environment variable has the dsn."""
        return [name.strip() for name in (self.broker or "").split(",") if name.strip()]

    @property
    def several(self) -> bool:
        """True if the read may cover several brokers: several names, or a whole fleet."""
        return len(self.names) > 1 or any(
            "/" not in name and name in load(self._config(), delivers=False).fleets
            for name in self.names
        )

    @property
    def what(self) -> str:
        """The database, for error messages."""
        return f"broker {self.broker!r}" if self.broker else f"the broker of ${self.dsn_from}"

    def dsn(self) -> Dsn:
        """Return the dsn of a batch read's database.

        Raises:
            ConfigurationError: the variable is not set, or saf.toml has no such broker.
            Unavailable: a fleet cannot list its members.
        """
        if self.broker is None:
            return self._given()
        (name,) = self.names
        return configured(name, self._config())[name].dsn

    def brokers(self) -> dict[str, Broker]:
        """Return the brokers of a stream, by the names that users know.

        Raises the same errors as `dsn`.
        """
        if self.broker is None:
            return {f"${self.dsn_from}": Broker(dsn=self._given())}
        found: dict[str, Broker] = {}
        for name in self.names:
            found |= configured(name, self._config(), fleets=True)
        return found

    def _config(self) -> Path | None:
        return Path(self.config) if self.config else None

    def _given(self) -> Dsn:
        name = cast("str", self.dsn_from)
        if name not in os.environ:
            raise ConfigurationError(
                f"dsn_from = {name!r}: this environment variable is not set where Spark's driver "
                "runs; set it before Spark starts"
            )
        return Dsn(os.environ[name], origin=f"the environment variable {name}")


def options_of(given: Mapping[str, str]) -> Options:
    """Check options as Spark passes them.

    Raises:
        ConfigurationError: the error names the option. It hides values of unknown options.
    """
    if any(name.startswith("option.") or name == "provider" for name in given):
        raise ConfigurationError(f"the format saf makes no table: {NO_TABLE}")
    spelled = {name.lower(): name for name in NAMES}
    known = {spelled.get(name.lower(), name): value for name, value in given.items()}
    for name in known:
        if name not in NAMES:
            secret = (
                "; a dsn in an option would be shown by Spark: name the broker of a saf.toml"
                * any(word in name.lower() for word in ("dsn", "url", "password"))
            )
            raise ConfigurationError(
                f"unknown option {name!r} of the format saf{did_you_mean(name, NAMES)}, only "
                f"{', '.join(NAMES)}{secret}"
            )
    if ("broker" in known) == ("dsn_from" in known):
        raise ConfigurationError(
            "which broker? Give the format saf either the option broker, a name of saf.toml, or "
            "dsn_from, an environment variable with its dsn"
            + f". If this is a table: {NO_TABLE}"
            * (not {"broker", "dsn_from"} & {*known})
        )
    if "broker" in known and not known["broker"].strip(" ,"):
        raise ConfigurationError(
            f"the option broker names nobody ({known['broker']!r}): give it a name of saf.toml"
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
        partitions=_number("partitions", known, 1, MAX_SHARDS),
        archive=_archive(known.get("archive")),
        subscription=known.get("subscription"),
        start=_start(known.get("start", "beginning")),
        limit=Limit(
            rows=_number("maxRowsPerTrigger", known, 1) or NO_LIMIT,
            bytes=_number("maxBytesPerTrigger", known, 1) or NO_LIMIT,
        ),
        application=known.get("txnAppId"),
        version=_number("txnVersion", known, 0),
        given=tuple(known),
    )


def _number(name: str, known: Mapping[str, str], least: int, most: int = NO_LIMIT) -> int | None:
    """Return the number that an option gives; None without it."""
    text = known.get(name)
    if text is not None and not (text.isdecimal() and least <= int(text) <= most):
        to = "on" if most == NO_LIMIT else f"to {most}"
        raise ConfigurationError(
            f"the option {name} is a number from {least} {to}, and not {text!r}"
        )
    return None if text is None else int(text)


def _archive(text: str | None) -> str | None:
    if text is not None:
        try:
            table_at(text)
        except ValueError as error:
            raise ConfigurationError(f"the option archive: {error}") from None
    return text


def _start(text: str) -> Start:
    if text not in ("beginning", "now"):
        raise ConfigurationError(f"the option start is beginning or now, and not {text!r}")
    return cast("Start", text)


def refuse_for_batch(options: Options) -> None:
    """Check that a batch read has no options of a stream or of a write.

    Raises:
        ConfigurationError: it has such an option, or several brokers.
    """
    refuse(options, OF_STREAMS, "streams: spark.readStream")
    refuse(options, OF_SINKS, "sending: df.write")
    if len(options.names) > 1:
        raise ConfigurationError(
            f"broker = {options.broker!r}: only a stream reads several brokers; make the union of "
            "a DataFrame of each"
        )


def refuse_for_stream(options: Options) -> None:
    """Check that a stream has no options that it does not support.

    Raises:
        ConfigurationError: it has such an option.
    """
    refuse(options, OF_SINKS, "sending: df.write")
    refuse(options, OF_READS, "batch reads: spark.read")


def for_sink(given: Mapping[str, str], *, stream: bool) -> Options:
    """Check the options of a write; the log is the outbox by default.

    Raises:
        ConfigurationError: the error names the option.
    """
    own = {name: value for name, value in given.items() if name.lower() != CHECKPOINT}
    has_log = any(name.lower() == "log" for name in own)
    options = options_of(own if has_log else {**own, "log": "outbox"})
    refuse(options, OF_STREAMS, "streams that are read: spark.readStream")
    refuse(options, OF_READS, "batch reads: spark.read")
    refuse(options, ("partitions",), "reads; repartition() sent rows")
    if options.log != "outbox":
        raise ConfigurationError(
            "log = 'inbox': sent messages go into an outbox, and a forwarder delivers them"
        )
    if len(options.names) > 1:
        raise ConfigurationError(
            f"broker = {options.broker!r}: messages go into one outbox; write once for each broker"
        )
    if stream and options.version is not None:
        raise ConfigurationError(
            "the option txnVersion is one of df.write: the version of a stream is its epoch"
        )
    if not stream and (options.application is None) != (options.version is None):
        raise ConfigurationError("the options txnAppId and txnVersion go together")
    if options.application is not None and not (
        fits(options.application, MAX_NAME) and options.application.isprintable()
    ):
        raise ConfigurationError(f"txnAppId has 1 to {MAX_NAME} bytes of printable characters")
    return options


def refuse(options: Options, names: Iterable[str], whose: str) -> None:
    """Reject options that belong to another operation.

    Raises:
        ConfigurationError: one of these options was given.
    """
    for name in names:
        if name in options.given:
            raise ConfigurationError(f"the option {name} is only for {whose}: omit it")


def subscription_of(options: Options) -> str:
    """Return the name of a stream's subscription.

    Raises:
        ConfigurationError: the name is missing or invalid.
    """
    name = options.subscription
    if not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise ConfigurationError(
            "a stream has the option subscription, a name of its own: under it, brokers keep what "
            "the stream has not committed, and `saf status` shows how far it is"
            + (f"; {name!r} is not one" if name else "")
        )
    return name


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
