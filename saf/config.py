"""saf.toml: which brokers to forward from, where to, and how.

    [brokers.shop]                       # a source; the table's name is for humans
    dsn = "postgresql://saf_forwarder@db1/shop?password=${SHOP_PASSWORD}"

    [destinations.mom]                   # of the kind "postgresql"; see `saf.destinations.kinds`
    dsn = "postgresql://saf_forwarder@mom/mom?password=${MOM_PASSWORD}"

    [[routes]]                           # at every source; rows of saf.route add to them
    service = "billing"
    destination = "mom"

    [forwarder]
    default_destination = "mom"

    [endpoints.billing]                  # where `saf dispatch` sends what services have received
    url = "https://billing.example.com/hooks"

    [sources.payments]                   # a topic of another broker, read into an inbox
    kind = "redis"                       # see `saf.sources.kinds`
    server = "redis://redis.example.com:6379/0"
    topic = "payments"
    service = "billing"

Fleets list many similar sources; see `saf.operating.places`:

    [fleets.tenants]                     # brokers tenants/tenant_1, tenants/tenant_2, …
    dsn = "postgresql://saf_forwarder@db2/postgres?password=${TENANTS_PASSWORD}"
    databases = "tenant_*"

Applications that sign or verify read one table only: see `saf.signing.settings`.

``${NAME}`` is replaced by the environment variable, so that secrets stay out of the file. In a dsn,
the variable is the literal value of one parameter: no character of a password is special, and
nothing is percent-encoded. At the beginning of a dsn, the variable is part of the dsn's text.
Environment variables also override single settings: ``SAF_FORWARDER__CHUNK_ROWS=10000``.
Unknown names are rejected; the error suggests the nearest known name.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import psycopg
import pydantic
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from saf.database import Dsn, refuse_unescaped, without_driver
from saf.database.bounds import Bounds
from saf.destinations.kinds import DEFAULT, AnyDestination, settings_of, table_at
from saf.destinations.settings import (
    Connections,
    DestinationSettings,
    DsnField,
    Quality,
    Written,
    within,
)
from saf.errors import ConfigurationError, MissingExtra, UsageError
from saf.message import DEFAULT_MAX_BYTES, MAX_NAME, fits
from saf.receiving.dispatch.settings import Endpoint, Network
from saf.routing.matching import Route as Leads
from saf.routing.matching import Router as Stands
from saf.routing.routers import check as check_router
from saf.routing.routes import Configured, ConfiguredRouter, Declared
from saf.signing.settings import Signing, VerifyingKey
from saf.signing.signer import Signer
from saf.signing.verifier import Keys
from saf.sources.kinds import AnySource
from saf.sources.kinds import settings_of as source_of
from saf.sources.settings import SourceSettings

DEFAULT_FILE = Path("saf.toml")
ENCODING = "utf-8-sig"
"""The encoding of TOML files in any locale: UTF-8, with or without a byte order mark."""
DAY = 86400
LONGEST = 100
"""Length, in characters, at which an error cuts a wrong value."""
TOKEN_LENGTH = 16
"""Minimum length of a token, so that nobody guesses it."""
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
TRACE_ID = "{trace_id}"
"""Placeholder for a trace id in a URL."""
REDACTED = ("authorization", "cookie", "*token*", "*secret*", "*password*", "*api*key*")
LONGEST_BOUND = 1e6
"""Largest bound, in seconds; the server's timeouts end at 24 days."""


def _printable(name: str) -> str:
    if not name or not fits(name, MAX_NAME) or not name.isprintable():
        raise ValueError(f"a name has 1 to {MAX_NAME} bytes of printable characters")
    return name


def _archive(place: str) -> str:
    table_at(place)
    return place


Seconds = Annotated[float, within(0.01, 366 * DAY)]
Age = Annotated[float, within(0, 100 * 366 * DAY)]
Lease = Annotated[float, within(1, DAY)]
SourceConnections = Annotated[int, within(4, 100_000)]
Rows = Annotated[int, within(1, 10_000_000)]
Bytes = Annotated[int, within(1024, 1 << 30)]
Attempts = Annotated[int, within(1, 1000)]
Rejections = Annotated[int, within(1, 1_000_000_000)]

Name = Annotated[str, AfterValidator(_printable)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


T = TypeVar("T", bound=_Table)
S = TypeVar("S")


class Broker(_Table):
    """A database whose outbox is forwarded."""

    dsn: DsnField
    """Connection string."""
    max_connections: SourceConnections | None = None
    """Most connections that one run opens to the broker. Default: forwarder.max_connections."""


class Fleet(_Table):
    """A set of databases whose outboxes are forwarded; see `saf.operating.places`."""

    dsn: DsnField
    """Connection string of the database that lists the members."""
    databases: str | None = Field(default=None, min_length=1)
    """Pattern (``*``, ``?``, ``[abc]``) for the names of databases on this server."""
    query: str | None = Field(default=None, min_length=1)
    """Query that returns two columns, name and dsn; an alternative to the pattern."""
    refresh_seconds: Seconds = 60.0
    """With --loop: how often to list the members again, in seconds."""
    max_connections: SourceConnections | None = None
    """Most connections that one run opens to each of the brokers."""

    @pydantic.model_validator(mode="after")
    def _one_way_to_list(self) -> Fleet:
        if (self.databases is None) == (self.query is None):
            raise ValueError("a fleet has either databases = or query =")
        return self


class Route(_Table):
    """Route of messages to a destination; see `saf.routing.matching`."""

    service: Name | None = None
    """Service that messages are addressed to. Default: any."""
    broker: UUID | None = None
    """broker_id that messages are addressed to. Default: any."""
    destination: str
    """Name of a table [destinations.NAME]."""
    quality: Quality | None = None
    """Quality of service. Default: the destination's."""
    expires_at: pydantic.AwareDatetime | None = None
    """Time from which the route is ignored. Default: never."""
    comment: str | None = None
    """Free text for operators."""

    def as_configured(self) -> Configured:
        """Return this route as `saf.routing.routes` describes it."""
        route = Leads(
            service=self.service,
            broker=str(self.broker) if self.broker else None,
            destination=self.destination,
            quality=self.quality,
        )
        return Configured(
            route=route, origin="saf.toml", expires_at=self.expires_at, comment=self.comment
        )


class Topic(_Table):
    """A service whose messages go to every destination that a route leads to."""

    comment: str | None = None
    """Free text for operators."""


class Router(_Table):
    """A service that stands for others; see `saf.routing.routers`."""

    kind: Literal["sql", "arrow", "python", "function"]
    """Kind of classifier: Spark SQL, a function of a batch, a function of one message, or a
    function of the broker's database."""
    expression: str
    """The classifier: Spark SQL, ``module:function`` or ``schema.function``."""
    once_per: Literal["message", "key"] = "message"
    """Unit that is classified once: a message or a key. A conversation always is."""
    mode: Literal["redirect", "forward"] = "redirect"
    """Redirect: both ends then speak directly; or forward through a routing service."""
    comment: str | None = None
    """Free text for operators."""

    def as_configured(self, service: str) -> ConfiguredRouter:
        """Return this router as `saf.routing.routes` describes it."""
        router = Stands(
            service=service, kind=self.kind, expression=self.expression, once_per=self.once_per
        )
        return ConfiguredRouter(
            router=router, origin="saf.toml", mode=self.mode, comment=self.comment
        )


class Transform(_Table):
    """Function that changes a service's messages before they are sent; see docs/transforms.md."""

    service: Name
    """Service that the messages are addressed to; may be a router."""
    function: str
    """The function, ``module:function``: takes and returns a DataFrame of messages."""
    deterministic: bool = True
    """True if equal messages always give equal results. Results of a non-deterministic function are
    written at the source before they are sent."""
    comment: str | None = None
    """Free text for operators."""

    @pydantic.field_validator("function")
    @classmethod
    def _is_named(cls, function: str) -> str:
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise ValueError(f"{function!r} is not module:function")
        return function


P = TypeVar("P", Broker, Fleet)


class Forwarder(_Table):
    """Settings of the forwarder."""

    default_destination: str | None = None
    """Destination of messages that no route matches."""
    chunk_rows: Rows = 50_000
    """Messages per transaction at a destination."""
    chunk_bytes: Bytes = 32 * 1024 * 1024
    """Bytes per transaction at a destination, give or take one Arrow batch."""
    max_bytes: Bytes = DEFAULT_MAX_BYTES
    """Messages with a larger body become dead letters."""
    lease_seconds: Lease = 30.0
    """Time for which a forwarder that hangs keeps its shards, in seconds."""
    interval_seconds: Seconds = 1.0
    """With --loop: the longest pause after an idle cycle or a problem, in seconds."""
    turn_seconds: Seconds = 2.0
    """Minimum time for a deep backlog before it yields to another waiting one, in seconds."""
    max_connections: SourceConnections | None = None
    """Most connections that one run opens to a source. Default: as many as its tasks need."""
    max_sessions: Connections = 200
    """Sources that one run stays connected to. With more sources, it connects to them in turn."""
    attempts: Attempts = 3
    """Attempts per chunk at an unavailable destination, before the run gives up on it."""
    max_rejected: Rejections = 10
    """Consecutive rejected messages after which a destination gets no more, until an operator runs
    `saf parked retry-now`."""
    use_spark: Literal["auto", "always"] = "auto"
    """Use Spark for all work, or only for large amounts."""
    master: str = "local[*]"
    """Spark's master. The --master of spark-submit takes precedence."""
    tasks: Connections | None = None
    """Parallel tasks. Default: the number of Spark's cores."""
    spark: dict[str, str] = Field(default_factory=dict)
    """Further Spark settings by their full names."""


class Purge(_Table):
    """Deletion of a log's old messages, one slot at a time; see `saf.log.ring`."""

    retention_seconds: Age = 7.0 * DAY
    """Minimum time that a message is kept, forwarded or not, in seconds."""
    rotate_after_seconds: Seconds = float(DAY)
    """Age of a slot's oldest message at which the log moves to the next slot, in seconds."""
    archive: Annotated[str, AfterValidator(_archive)] | None = None
    """Archive for the messages of a slot before they are deleted: a folder of Parquet files, or a
    table such as `delta:/srv/lake/archive`."""


class Dispatch(_Table):
    """Settings for endpoints that are stored in brokers; see `saf.receiving.dispatch.stored`."""

    networks: tuple[Network, ...] = ()
    """Networks, besides the public internet, where such an endpoint may be."""


def _is_host(text: str) -> str:
    """such as `saf.example.com`"""
    if not HOST.fullmatch(text):
        raise ValueError(f"a host such as saf.example.com, without scheme and port: {text!r}")
    return text.lower()


Host = Annotated[str, AfterValidator(_is_host)]


class Ui(_Table):
    """Settings of `saf ui`, the dashboard; see docs/ui.md."""

    token: SecretStr | None = None
    """Token that grants viewing everything; as `${NAME}`."""
    operate_token: SecretStr | None = None
    """Token that also grants operating; as `${NAME}`."""
    user_header: str | None = Field(default=None, min_length=1)
    """Header in which a reverse proxy names the logged-in user."""
    proxies: tuple[Network, ...] = ("127.0.0.0/8", "::1/128")
    """Networks of the reverse proxies whose headers are trusted."""
    hosts: tuple[Host, ...] = ()
    """With `user_header`: host names accepted in requests from browsers or the proxy, besides
    localhost and IP addresses."""
    operators: tuple[str, ...] = ()
    """Users of the reverse proxy who may also operate; "*" for all."""
    session_seconds: Seconds = 8 * 3600.0
    """Lifetime of a login by token, in seconds."""
    bodies: bool = False
    """Show the bodies of messages."""
    redact_headers: tuple[str, ...] = REDACTED
    """Patterns (``*``, ``?``) for the names of headers whose values are hidden."""
    redact_paths: tuple[str, ...] = ()
    """JSON paths, such as `$.card.number` or `$..password`, of values to hide in JSON bodies."""
    trace_url: str | None = None
    """URL of a trace, with the placeholder `{trace_id}`. Messages that have a trace link to it."""

    @pydantic.field_validator("token", "operate_token")
    @classmethod
    def _is_long(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < TOKEN_LENGTH:
            raise ValueError(
                f"a token has at least {TOKEN_LENGTH} characters: openssl rand -hex 24"
            )
        return token

    @pydantic.field_validator("trace_url")
    @classmethod
    def _is_of_a_trace(cls, url: str | None) -> str | None:
        if url is not None and not (
            url.startswith(("https://", "http://")) and url.count(TRACE_ID) == 1
        ):
            raise ValueError(f"an http(s) address must contain {TRACE_ID} once: {url!r} does not")
        return url


class Waits(_Table):
    """Bounds on how long saf waits; see `saf.database.bounds`."""

    network_seconds: float = Field(default=Bounds.network_seconds, ge=1, le=LONGEST_BOUND)
    lock_seconds: float = Field(default=Bounds.lock_seconds, gt=0, le=LONGEST_BOUND)
    statement_seconds: float = Field(default=Bounds.statement_seconds, gt=0, le=LONGEST_BOUND)
    chunk_seconds: float = Field(default=Bounds.chunk_seconds, gt=0, le=LONGEST_BOUND)
    long_seconds: float = Field(default=Bounds.long_seconds, gt=0, le=LONGEST_BOUND)


class _Sources(BaseSettings):
    """Base of settings that read the environment and a file, in this order."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment take precedence over the file."""
        return env_settings, init_settings


class Settings(_Sources):
    """All tables of saf.toml."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="SAF_", env_nested_delimiter="__"
    )

    bounds: Waits = Waits()
    brokers: dict[Name, Broker] = Field(default_factory=dict)
    fleets: dict[Name, Fleet] = Field(default_factory=dict)
    destinations: dict[Name, AnyDestination] = Field(default_factory=dict)
    sources: dict[Name, AnySource] = Field(default_factory=dict)
    routes: tuple[Route, ...] = ()
    topics: dict[Name, Topic] = Field(default_factory=dict)
    routers: dict[Name, Router] = Field(default_factory=dict)
    transforms: tuple[Transform, ...] = ()
    forwarder: Forwarder = Forwarder()
    purge: Purge = Purge()
    endpoints: dict[Name, Endpoint] = Field(default_factory=dict)
    dispatch: Dispatch = Dispatch()
    ui: Ui = Ui()
    signing: Signing = Signing()

    @pydantic.field_validator("routes", mode="before")
    @classmethod
    def _are_not_local(cls, given: object) -> object:
        for item in given if isinstance(given, list) else ():
            if isinstance(item, dict) and "local" in item:
                raise ValueError(
                    "a local route is a row of its broker, because senders do not read saf.toml: "
                    "saf route add DESTINATION --service NAME --local, or saf apply"
                )
        return given

    @pydantic.field_validator("brokers", "fleets")
    @classmethod
    def _are_bounded(cls, places: dict[str, P], info: pydantic.ValidationInfo) -> dict[str, P]:
        bounds = _bounds(info)
        return {
            name: place.model_copy(update={"dsn": replace(place.dsn, bounds=bounds)})
            for name, place in places.items()
        }

    @pydantic.field_validator("destinations")
    @classmethod
    def _are_bounded_too(
        cls, destinations: dict[str, DestinationSettings], info: pydantic.ValidationInfo
    ) -> dict[str, DestinationSettings]:
        return {name: settings.bounded(_bounds(info)) for name, settings in destinations.items()}

    @pydantic.field_validator("sources")
    @classmethod
    def _are_bounded_three(
        cls, sources: dict[str, SourceSettings], info: pydantic.ValidationInfo
    ) -> dict[str, SourceSettings]:
        return {name: settings.bounded(_bounds(info)) for name, settings in sources.items()}

    @pydantic.model_validator(mode="after")
    def _has_sources_with_names_of_their_own(self) -> Settings:
        if not self.brokers and not self.fleets and not self.sources:
            raise ValueError(
                "no [brokers.NAME], no [fleets.NAME] and no [sources.NAME]: nothing to forward"
            )
        for name in self.fleets:
            if "/" in name:
                raise ValueError(f"fleets.{name}: a fleet's name must not contain '/'")
        for name in self.brokers:
            if name.partition("/")[0] in self.fleets and "/" in name:
                raise ValueError(f"brokers.{name}: names like this belong to the fleet")
        return self

    @pydantic.model_validator(mode="after")
    def _destinations_exist(self) -> Settings:
        named = {"forwarder.default_destination": self.forwarder.default_destination}
        for number, route in enumerate(self.routes):
            named[f"routes.{number}.destination"] = route.destination
        for setting, name in named.items():
            if name is not None and name not in self.destinations:
                raise ValueError(
                    f"{setting} is {name!r}, but [destinations.{name}] is missing"
                    f"{did_you_mean(name, self.destinations)}"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _qualities_can_be(self) -> Settings:
        for number, route in enumerate(self.routes):
            try:
                self.destinations[route.destination].check_quality(route.quality)
            except ValueError as error:
                raise ValueError(f"routes.{number}.quality: {error}") from None
        return self

    @pydantic.model_validator(mode="after")
    def _each_route_is_said_once(self) -> Settings:
        seen: dict[object, int] = {}
        for number, route in enumerate(self.routes):
            named = (route.service, route.broker, route.destination)
            if named in seen:
                raise ValueError(f"routes.{number} is the same route as routes.{seen[named]}")
            seen[named] = number
        return self

    @pydantic.model_validator(mode="after")
    def _routers_can_be(self) -> Settings:
        for name, router in self.routers.items():
            if name in self.topics:
                raise ValueError(f"routers.{name} is a topic too: it may resolve to one only")
            try:
                check_router(router.as_configured(name))
            except UsageError as error:
                raise ValueError(f"routers.{name}: {error}") from None
        return self

    @pydantic.model_validator(mode="after")
    def _a_service_has_one_transform(self) -> Settings:
        seen: dict[str, int] = {}
        for number, transform in enumerate(self.transforms):
            if transform.service in seen:
                raise ValueError(
                    f"transforms.{number} is for {transform.service!r}, as is "
                    f"transforms.{seen[transform.service]}: a service has one transform"
                )
            seen[transform.service] = number
        return self

    @pydantic.model_validator(mode="after")
    def _endpoints_and_sources_have_an_inbox(self) -> Settings:
        for name, endpoint in self.endpoints.items():
            question = "whose inbox has its messages?"
            self._must_have_an_inbox(f"endpoints.{name}", "broker", endpoint.broker, question)
        for name, source in self.sources.items():
            question = "which inbox stores its messages?"
            self._must_have_an_inbox(f"sources.{name}", "into", source.into, question)
        return self

    def _must_have_an_inbox(self, table: str, key: str, named: str | None, question: str) -> None:
        """Raise a ValueError unless a destination with an inbox is named, or is the only one."""
        brokers = [name for name, place in self.destinations.items() if place.broker() is not None]
        if named is None and len(brokers) != 1:
            raise ValueError(
                f"{table}: {question} Set {key} = "
                f"{' or '.join(map(repr, brokers)) or 'a destination that is a broker'}"
            )
        if named is not None and named not in brokers:
            raise ValueError(
                f"{table}.{key} is {named!r}, which is not a destination with an inbox"
                f"{did_you_mean(named, brokers)}"
            )

    def inbox_for(self, source: str) -> tuple[str, Dsn]:
        """Return the destination whose inbox stores the messages of a source, and its database."""
        return self._inbox(self.sources[source].into)

    def inbox_of(self, endpoint: Endpoint) -> Dsn:
        """Return the database whose inbox has the messages of an endpoint."""
        return self._inbox(endpoint.broker)[1]

    def _inbox(self, named: str | None) -> tuple[str, Dsn]:
        """Return the destination with an inbox that is named, or the only one, and its database."""
        return next(
            (name, dsn)
            for name, place in self.destinations.items()
            if named in (None, name) and (dsn := place.broker()) is not None
        )

    @property
    def declared(self) -> Declared:
        """Routes, topics and routers of the file, which apply to every source broker."""
        return Declared(
            routes=tuple(route.as_configured() for route in self.routes),
            topics=frozenset(self.topics),
            routers=tuple(router.as_configured(name) for name, router in self.routers.items()),
        )


class _OnlySigning(_Sources):
    """Only the table [signing]."""

    model_config = SettingsConfigDict(
        extra="ignore", frozen=True, env_prefix="SAF_", env_nested_delimiter="__"
    )

    signing: Signing = Signing()


def _bounds(info: pydantic.ValidationInfo) -> Bounds:
    return Bounds(**info.data.get("bounds", Waits()).model_dump())


def load(path: Path | None = None, *, delivers: bool = True) -> Settings:
    """Read and check a saf.toml. Default: $SAF_CONFIG, or saf.toml in the current folder.

    ``delivers``: require a destination. Callers that only read logs, or send, need none.

    Raises:
        ConfigurationError: names the file, the setting and the value at fault.
    """
    return _anew(lambda: _read(_file(path), delivers=delivers))


def load_signer(path: Path | None = None) -> Signer:
    """Return the signer that ``[signing]`` of a saf.toml describes; no other table is needed.

    Raises:
        ConfigurationError: names the file, the setting and the value at fault, but no secret.
        MissingExtra: Ed25519 needs a package that is not installed.
    """
    ignored = {"keys", "redirected_from"}
    return _anew(lambda: _read_signing(_file(path), Signing.signer, ignored))


def load_keys(path: Path | None = None) -> Keys:
    """Read the keys of ``[signing.keys.NAME]`` of a saf.toml; no other table is needed.

    Raises:
        ConfigurationError: names the file, the setting and the value at fault, but no secret.
        MissingExtra: Ed25519 needs a package that is not installed.
    """
    ignored = {"key_id", "algorithm", "secret", "secret_file"}
    return _anew(lambda: _read_signing(_file(path), Signing.known, ignored))


def _file(path: Path | None) -> Path:
    return path or Path(os.environ.get("SAF_CONFIG") or DEFAULT_FILE)


def _anew(read: Callable[[], S]) -> S:
    """Call ``read``; raise its errors again without the frames below.

    Variables in those frames hold passwords, and some tools log them.
    """
    try:
        return read()
    except MissingExtra as error:
        raise MissingExtra(error.extra, error.purpose) from None
    except ConfigurationError as error:
        raise ConfigurationError(str(error)) from None


def with_options(table: T, **options: object) -> T:
    """Return a copy of settings with command-line options applied; None means not given.

    Raises:
        ConfigurationError: names the setting and the value at fault.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return type(table)(**{**dict(table), **given})
    except pydantic.ValidationError as error:
        name = type(table).__name__.lower()
        problems = [f"{name}.{_explain(problem)}" for problem in error.errors()]
        raise ConfigurationError("; ".join(problems)) from None


def _tables(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding=ENCODING)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}. Use --config FILE or set SAF_CONFIG"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from None


def _read(path: Path, *, delivers: bool) -> Settings:
    tables = _tables(path)
    # readers of the whole file do not sign, so the secrets of [signing] may be missing
    signing = {name: tables[name] for name in ("signing",) if name in tables}
    rest = {name: table for name, table in tables.items() if name not in signing}
    if delivers and not tables.get("destinations"):
        raise ConfigurationError(
            f"{path}: [destinations.NAME] is missing: messages need a destination"
        )
    return _checked(path, tables, lambda: Settings(**_expand(rest, ()), **signing))


def _read_signing(path: Path, make: Callable[[Signing], S], ignored: Collection[str]) -> S:
    """Make an object from [signing], ignoring the settings in ``others``."""
    tables = _tables(path)
    table = tables.get("signing", {})
    if isinstance(table, dict):
        table = {name: value for name, value in table.items() if name not in ignored}
    location = ("signing",)
    only = _checked(path, tables, lambda: _OnlySigning(signing=_expand(table, location)))
    try:
        return make(only.signing)
    except MissingExtra:
        raise
    except UsageError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _checked(path: Path, tables: Mapping[str, Any], make: Callable[[], S]) -> S:
    """Call ``make``; if it fails, raise an error that names the setting at fault."""
    try:
        return make()
    except pydantic.ValidationError as error:
        problems = [_explain(problem, tables) for problem in error.errors()]
        raise ConfigurationError(f"{path}: " + "; ".join(problems)) from None
    except SettingsError as error:
        # about an environment variable; only the error's cause contains the value
        raise ConfigurationError(f"{path}: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


VARIABLE = r"\$\{(\w+)\}"


def _expand(value: Any, location: tuple[str, ...]) -> Any:
    """Return ``value`` with every ``${NAME}`` replaced from the environment."""
    if isinstance(value, dict):
        return {key: _expand(item, (*location, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, location) for item in value]
    if not isinstance(value, str):
        return value

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise ConfigurationError(
                f"{'.'.join(location)} needs the environment variable {name}, which is not set"
            )
        return os.environ[name]

    def replaced(text: str) -> str:
        return re.sub(VARIABLE, replacement, text)

    return _dsn(value, replaced) if location[-1] == "dsn" else replaced(value)


def _dsn(value: str, replaced: Callable[[str], str]) -> str:
    """Return a dsn with its variables replaced, in a text that remembers where it can be fixed."""
    variables = re.findall(VARIABLE, value)
    names = f"the environment variable{'s' * (len(variables) > 1)} {', '.join(variables)}"
    if value.startswith("${"):
        return Written(replaced(value), names)
    value = without_driver(value)
    refuse_unescaped(value)
    try:
        parts = conninfo_to_dict(value)
    except (psycopg.ProgrammingError, ValueError):  # e.g. a password's % is not UTF-8
        return value  # rejected later as a dsn, without values from the environment
    conninfo = make_conninfo("", **{name: replaced(str(part)) for name, part in parts.items()})
    return Written(conninfo, "the dsn in saf.toml" + f" or {names}" * bool(variables))


def _explain(problem: Any, tables: Mapping[str, Any] = MappingProxyType({})) -> str:
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        *table, name = location
        known = [item for item in _known(table, tables) if item != name]  # a variable set the kind
        return f"unknown setting {'.'.join(location)}{did_you_mean(name, known)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"].startswith(("int", "float", "literal", "bool")) and location[-1] != "dsn":
        message += f", and not {problem['input']!r}"[:LONGEST]
    return f"{'.'.join(location)}: {message}" if location else message


def _known(table: list[str], tables: Mapping[str, Any]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "bounds": Waits,
        "brokers": Broker,
        "fleets": Fleet,
        "routes": Route,
        "topics": Topic,
        "routers": Router,
        "transforms": Transform,
        "forwarder": Forwarder,
        "purge": Purge,
        "endpoints": Endpoint,
        "dispatch": Dispatch,
        "ui": Ui,
        "signing": Signing,
    }
    if table[:2] == ["signing", "keys"]:
        return list(VerifyingKey.model_fields)
    if table[:1] == ["destinations"]:
        kind = tables.get("destinations", {}).get(table[1], {}).get("kind", DEFAULT)
        return list(settings_of(kind).model_fields)
    if table[:1] == ["sources"]:
        return list(source_of(tables.get("sources", {}).get(table[1], {})["kind"]).model_fields)
    return list((models[table[0]] if table else Settings).model_fields)


def table_named(tables: Mapping[str, S], title: str, name: str, option: str = "") -> S:
    """Return the settings of a table ``[title.name]`` of saf.toml.

    Raises:
        ConfigurationError: no table has this name; the error begins with ``option``, if given.
    """
    if name not in tables:
        raise ConfigurationError(
            f"{option and f'{option}: '}no [{title}.{name}] in saf.toml"
            f"{did_you_mean(name, tables)}, only {', '.join(tables) or 'none'}"
        )
    return tables[name]


def did_you_mean(name: str, known: Any) -> str:
    """Suggest the nearest known name in words; return an empty text if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
