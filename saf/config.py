"""saf.toml: which brokers to forward from, where to, and how.

    [brokers.shop]                       # a source; the table's name is for people
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

Many sources of a kind need not be written down; see `saf.fleets`:

    [fleets.tenants]                     # brokers tenants/tenant_1, tenants/tenant_2, …
    dsn = "postgresql://saf_forwarder@db2/postgres?password=${TENANTS_PASSWORD}"
    databases = "tenant_*"

An application that signs, or verifies, reads one table of it: see `saf.signing.settings`.

``${NAME}`` is replaced by the environment variable, so that secrets stay out of the file. In a dsn,
it stands for the value of one parameter and is taken as it is: no character of a password has a
special meaning, and none is percent-encoded. Only at the beginning of a dsn is it a part of the
text. Environment variables also override single settings: ``SAF_FORWARDER__CHUNK_ROWS=10000``.
Unknown names are refused; the error names the nearest known one.
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
from saf.destinations.archives import table_at
from saf.destinations.kinds import DEFAULT, AnyDestination, settings_of
from saf.destinations.settings import Connections, DestinationSettings, DsnField, Quality, within
from saf.dispatch.settings import Endpoint, Network
from saf.errors import ConfigurationError, MissingExtra, UsageError
from saf.message import DEFAULT_MAX_BYTES, MAX_NAME, fits
from saf.routing.matching import Route as Leads
from saf.routing.matching import Router as Stands
from saf.routing.routers import check as check_router
from saf.routing.routes import Configured, ConfiguredRouter, Declared
from saf.signing.settings import Signing, VerifyingKey
from saf.signing.signer import Signer
from saf.signing.verifier import Keys

DEFAULT_FILE = Path("saf.toml")
ENCODING = "utf-8-sig"
"""The encoding of TOML files in any locale: UTF-8, with or without a byte order mark."""
DAY = 86400
LONGEST = 100
"""How many characters of a wrong value an error quotes."""
TOKEN_LENGTH = 16
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""How many characters a token has at least: nobody guesses it."""
TRACE_ID = "{trace_id}"
"""What stands for the id of a trace in an address."""
REDACTED = ("authorization", "cookie", "*token*", "*secret*", "*password*", "*api*key*")
LONGEST_BOUND = 1e6
"""The values of a bound, in seconds; the server's timeouts end at 24 days."""


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
    """Where it is."""
    max_connections: SourceConnections | None = None
    """The most connections that one run opens to it; by default, forwarder.max_connections."""


class Fleet(_Table):
    """Any number of databases whose outboxes are forwarded; see `saf.fleets`."""

    dsn: DsnField
    """Where to ask for the list of databases."""
    databases: str | None = Field(default=None, min_length=1)
    """A pattern (``*``, ``?``, ``[abc]``) for the names of databases on this server."""
    query: str | None = Field(default=None, min_length=1)
    """A query for two columns, name and dsn; instead of a pattern."""
    refresh_seconds: Seconds = 60.0
    """With --loop: how often to ask, in seconds."""
    max_connections: SourceConnections | None = None
    """For each of the brokers: the most connections that one run opens to it."""

    @pydantic.model_validator(mode="after")
    def _one_way_to_list(self) -> Fleet:
        if (self.databases is None) == (self.query is None):
            raise ValueError("a fleet has either databases = or query =")
        return self


class Route(_Table):
    """Which messages go where; see `saf.routing.matching`."""

    service: Name | None = None
    """The service that messages are for; by default, any."""
    broker: UUID | None = None
    """The broker_id that messages are addressed to; by default, any."""
    destination: str
    """Where they go: the name of a table [destinations.NAME]."""
    quality: Quality | None = None
    """The quality of service; by default, the destination's."""
    expires_at: pydantic.AwareDatetime | None = None
    """From then on the route does not count; by default, it always does."""
    comment: str | None = None
    """For people."""

    def as_configured(self) -> Configured:
        """This route as `saf.routing.routes` describes it."""
        leads = Leads(
            service=self.service,
            broker=str(self.broker) if self.broker else None,
            destination=self.destination,
            quality=self.quality,
        )
        return Configured(
            route=leads, origin="saf.toml", expires_at=self.expires_at, comment=self.comment
        )


class Topic(_Table):
    """A service whose messages go to every destination that a route leads to."""

    comment: str | None = None
    """For people."""


class Router(_Table):
    """A service that stands for others; see `saf.routing.routers`."""

    kind: Literal["sql", "arrow", "python"]
    """What the classifier is: Spark SQL, a function of a batch, or a function of one message."""
    expression: str
    """The classifier: Spark SQL, or ``module:function``."""
    once_per: Literal["message", "key"] = "message"
    """What is classified once: a message or a key; a conversation always is."""
    mode: Literal["redirect", "forward"] = "redirect"
    """Whether it redirects at the source, or forwards by a routing service."""
    comment: str | None = None
    """For people."""

    def as_configured(self, service: str) -> ConfiguredRouter:
        """This router as `saf.routing.routes` describes it."""
        router = Stands(
            service=service, kind=self.kind, expression=self.expression, once_per=self.once_per
        )
        return ConfiguredRouter(
            router=router, origin="saf.toml", mode=self.mode, comment=self.comment
        )


class Transform(_Table):
    """What is done with a service's messages before they are sent; see docs/transforms.md."""

    service: Name
    """The service that the messages are sent to; it may be a router."""
    function: str
    """The function, ``module:function``: it takes a DataFrame of messages and returns one."""
    deterministic: bool = True
    """Whether it always makes the same of a message. What another one has made is written at the
    source before it is sent."""
    comment: str | None = None
    """For people."""

    @pydantic.field_validator("function")
    @classmethod
    def _is_named(cls, function: str) -> str:
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise ValueError(f"{function!r} is not module:function")
        return function


P = TypeVar("P", Broker, Fleet)


class Forwarder(_Table):
    """How the forwarder works."""

    default_destination: str | None = None
    """The destination of messages that no route matches."""
    chunk_rows: Rows = 50_000
    """Messages per transaction at a destination."""
    chunk_bytes: Bytes = 32 * 1024 * 1024
    """Bytes per transaction at a destination, give or take one Arrow batch."""
    max_bytes: Bytes = DEFAULT_MAX_BYTES
    """Messages with a larger body become dead letters."""
    lease_seconds: Lease = 30.0
    """How long a forwarder that died keeps its shards, in seconds."""
    interval_seconds: Seconds = 1.0
    """With --loop: the longest pause while nothing is found, or after a problem, in seconds."""
    turn_seconds: Seconds = 2.0
    """How long deep backlogs go on at least before they stop for another that waits, in seconds."""
    max_connections: SourceConnections | None = None
    """The most connections that one run opens to a source; by default, what its tasks need."""
    max_sessions: Connections = 200
    """How many sources one run stays connected to; if there are more, it connects in turn."""
    attempts: Attempts = 3
    """Attempts per chunk while a destination does not answer, before the run gives up on it."""
    max_rejected: Rejections = 10
    """Messages that a destination rejects in a row before it gets no more, until an operator says
    `saf parked retry-now`."""
    use_spark: Literal["auto", "always"] = "auto"
    """Whether Spark does all work, or only what is more than little."""
    master: str = "local[*]"
    """Spark's master; under spark-submit, its own --master wins."""
    tasks: Connections | None = None
    """Parallel tasks; by default, as many as Spark has cores."""
    spark: dict[str, str] = Field(default_factory=dict)
    """More Spark settings, by their full names."""


class Purge(_Table):
    """When the old messages of a log are deleted, a slot at a time; see `saf.log.ring`."""

    retention_seconds: Age = 7.0 * DAY
    """How long a message is kept at least, forwarded or not, in seconds."""
    rotate_after_seconds: Seconds = float(DAY)
    """The age of its oldest message at which a slot is left for the next one, in seconds."""
    archive: Annotated[str, AfterValidator(_archive)] | None = None
    """Where the messages of each slot are kept before they are deleted: a folder, as Parquet, or a
    table such as `delta:/srv/lake/archive`."""


class Dispatch(_Table):
    """How endpoints that are stored in brokers are dispatched; see `saf.dispatch.stored`."""

    networks: tuple[Network, ...] = ()
    """Networks that such an endpoint may be in, besides the public internet."""


def _is_host(text: str) -> str:
    """such as `saf.example.com`"""
    if not HOST.fullmatch(text):
        raise ValueError(f"a host such as saf.example.com, without scheme and port: {text!r}")
    return text.lower()


Host = Annotated[str, AfterValidator(_is_host)]


class Ui(_Table):
    """How `saf ui` shows brokers, and to whom; see docs/ui.md."""

    token: SecretStr | None = None
    """Whoever knows it may look at everything; as `${NAME}`."""
    operate_token: SecretStr | None = None
    """Whoever knows it may also act; as `${NAME}`."""
    user_header: str | None = Field(default=None, min_length=1)
    """The header in which a reverse proxy names the user that it has logged in."""
    proxies: tuple[Network, ...] = ("127.0.0.0/8", "::1/128")
    """Networks of the reverse proxies that are believed what they say in headers."""
    hosts: tuple[Host, ...] = ()
    """With `user_header`: the names by which browsers, or the proxy, may ask for it, besides
    localhost and addresses."""
    operators: tuple[str, ...] = ()
    """The users of the reverse proxy who may also act; "*" for all."""
    session_seconds: Seconds = 8 * 3600.0
    """How long a login by token lasts, in seconds."""
    bodies: bool = False
    """Whether the bodies of messages may be seen."""
    redact_headers: tuple[str, ...] = REDACTED
    """Patterns (``*``, ``?``) for the names of headers whose values are hidden."""
    redact_paths: tuple[str, ...] = ()
    """JSON paths, such as `$.card.number` or `$..password`, of what is hidden in JSON bodies."""
    trace_url: str | None = None
    """Where traces are shown, with `{trace_id}` in it: messages that have a trace link to it."""

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
    """The bounds: how long anything is waited for; see `saf.database.bounds`."""

    network_seconds: float = Field(default=Bounds.network_seconds, ge=1, le=LONGEST_BOUND)
    lock_seconds: float = Field(default=Bounds.lock_seconds, gt=0, le=LONGEST_BOUND)
    statement_seconds: float = Field(default=Bounds.statement_seconds, gt=0, le=LONGEST_BOUND)
    chunk_seconds: float = Field(default=Bounds.chunk_seconds, gt=0, le=LONGEST_BOUND)
    long_seconds: float = Field(default=Bounds.long_seconds, gt=0, le=LONGEST_BOUND)


class _Sources(BaseSettings):
    """Where settings come from."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file."""
        return env_settings, init_settings


class Settings(_Sources):
    """Everything in saf.toml."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="SAF_", env_nested_delimiter="__"
    )

    bounds: Waits = Waits()
    brokers: dict[Name, Broker] = Field(default_factory=dict)
    fleets: dict[Name, Fleet] = Field(default_factory=dict)
    destinations: dict[Name, AnyDestination] = Field(default_factory=dict)
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
        for one in given if isinstance(given, list) else ():
            if isinstance(one, dict) and "local" in one:
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
        cls, there: dict[str, DestinationSettings], info: pydantic.ValidationInfo
    ) -> dict[str, DestinationSettings]:
        return {name: one.bounded(_bounds(info)) for name, one in there.items()}

    @pydantic.model_validator(mode="after")
    def _has_sources_with_names_of_their_own(self) -> Settings:
        if not self.brokers and not self.fleets:
            raise ValueError("no [brokers.NAME] and no [fleets.NAME]: nothing to forward")
        for name in self.fleets:
            if "/" in name:
                raise ValueError(f"fleets.{name}: a fleet's name holds no '/'")
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
        for number, one in enumerate(self.transforms):
            if one.service in seen:
                raise ValueError(
                    f"transforms.{number} is for {one.service!r}, as is "
                    f"transforms.{seen[one.service]}: a service has one transform"
                )
            seen[one.service] = number
        return self

    @pydantic.model_validator(mode="after")
    def _endpoints_have_an_inbox(self) -> Settings:
        brokers = [name for name, one in self.destinations.items() if one.broker() is not None]
        for name, endpoint in self.endpoints.items():
            if endpoint.broker is None and len(brokers) != 1:
                raise ValueError(
                    f"endpoints.{name}: whose inbox has its messages? Say broker = "
                    f"{' or '.join(map(repr, brokers)) or 'a destination that is a broker'}"
                )
            if endpoint.broker is not None and endpoint.broker not in brokers:
                raise ValueError(
                    f"endpoints.{name}.broker is {endpoint.broker!r}, which is not a destination "
                    f"with an inbox{did_you_mean(endpoint.broker, brokers)}"
                )
        return self

    def inbox_of(self, endpoint: Endpoint) -> Dsn:
        """The database whose inbox has the messages of an endpoint."""
        places = (
            (self.destinations[endpoint.broker],) if endpoint.broker else self.destinations.values()
        )
        return next(dsn for one in places if (dsn := one.broker()) is not None)

    @property
    def declared(self) -> Declared:
        """The routes, topics and routers of the file, for every source broker."""
        return Declared(
            routes=tuple(route.as_configured() for route in self.routes),
            topics=frozenset(self.topics),
            routers=tuple(one.as_configured(name) for name, one in self.routers.items()),
        )


class _OnlySigning(_Sources):
    """The table [signing] alone."""

    model_config = SettingsConfigDict(
        extra="ignore", frozen=True, env_prefix="SAF_", env_nested_delimiter="__"
    )

    signing: Signing = Signing()


def _bounds(info: pydantic.ValidationInfo) -> Bounds:
    return Bounds(**info.data.get("bounds", Waits()).model_dump())


def load(path: Path | None = None, *, delivers: bool = True) -> Settings:
    """Read and check a saf.toml: by default $SAF_CONFIG, or the one in the current folder.

    ``delivers``: whether it must name a destination; who only reads logs, or sends, needs none.

    Raises:
        ConfigurationError: it names the file, the setting and the value at fault.
    """
    return _anew(lambda: _read(_file(path), delivers=delivers))


def load_signer(path: Path | None = None) -> Signer:
    """Make the signer that ``[signing]`` of a saf.toml describes, which needs no other table.

    Raises:
        ConfigurationError: it names the file, the setting and the value at fault; no secret.
        MissingExtra: Ed25519 needs a package that is not installed.
    """
    others = {"keys", "redirected_from"}
    return _anew(lambda: _read_signing(_file(path), Signing.signer, others))


def load_keys(path: Path | None = None) -> Keys:
    """Read the keys of ``[signing.keys.NAME]`` of a saf.toml, which needs no other table.

    Raises:
        ConfigurationError: it names the file, the setting and the value at fault; no secret.
        MissingExtra: Ed25519 needs a package that is not installed.
    """
    others = {"key_id", "algorithm", "secret", "secret_file"}
    return _anew(lambda: _read_signing(_file(path), Signing.known, others))


def _file(path: Path | None) -> Path:
    return path or Path(os.environ.get("SAF_CONFIG") or DEFAULT_FILE)


def _anew(read: Callable[[], S]) -> S:
    """Read something; raise an error anew, without the frames below.

    Their variables hold passwords, and some tools log those.
    """
    try:
        return read()
    except MissingExtra as error:
        raise MissingExtra(error.extra, error.purpose) from None
    except ConfigurationError as error:
        raise ConfigurationError(str(error)) from None


def with_options(table: T, **options: object) -> T:
    """Return a table of settings with the options that a command line has given; None: not given.

    Raises:
        ConfigurationError: it names the setting and the value at fault.
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
            f"cannot read {path}: {error.strerror}. Say --config FILE or set SAF_CONFIG"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8 text") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from None


def _read(path: Path, *, delivers: bool) -> Settings:
    tables = _tables(path)
    # who reads all of it does not sign: the secrets of [signing] need not be there
    signing = {name: tables[name] for name in ("signing",) if name in tables}
    rest = {name: table for name, table in tables.items() if name not in signing}
    if delivers and not tables.get("destinations"):
        raise ConfigurationError(
            f"{path}: [destinations.NAME] is missing, to which messages are delivered"
        )
    return _checked(path, tables, lambda: Settings(**_expand(rest, ()), **signing))


def _read_signing(path: Path, make: Callable[[Signing], S], others: Collection[str]) -> S:
    """Make something of the table, without the settings that are for the ``others``."""
    tables = _tables(path)
    table = tables.get("signing", {})
    if isinstance(table, dict):
        table = {name: one for name, one in table.items() if name not in others}
    where = ("signing",)
    only = _checked(path, tables, lambda: _OnlySigning(signing=_expand(table, where)))
    try:
        return make(only.signing)
    except MissingExtra:
        raise
    except UsageError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _checked(path: Path, tables: Mapping[str, Any], make: Callable[[], S]) -> S:
    """Make settings of tables; the error says which of them is wrong."""
    try:
        return make()
    except pydantic.ValidationError as error:
        problems = [_explain(problem, tables) for problem in error.errors()]
        raise ConfigurationError(f"{path}: " + "; ".join(problems)) from None
    except SettingsError as error:
        # about an environment variable; only the error's cause says its value
        raise ConfigurationError(f"{path}: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _expand(value: Any, where: tuple[str, ...]) -> Any:
    """Return ``value`` with every ``${NAME}`` replaced from the environment."""
    if isinstance(value, dict):
        return {key: _expand(item, (*where, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise ConfigurationError(
                f"{'.'.join(where)} needs the environment variable {name}, which is not set"
            )
        return os.environ[name]

    def replaced(text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", replacement, text)

    if where[-1] != "dsn" or value.startswith("${"):
        return replaced(value)
    value = without_driver(value)
    refuse_unescaped(value)
    try:
        parts = conninfo_to_dict(value)
    except (psycopg.ProgrammingError, ValueError):  # a password's % is no UTF-8, say
        return value  # it is refused later as a dsn, without what the environment holds
    return make_conninfo("", **{name: replaced(str(part)) for name, part in parts.items()})


def _explain(problem: Any, tables: Mapping[str, Any] = MappingProxyType({})) -> str:
    where = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        *table, name = where
        known = [one for one in _known(table, tables) if one != name]  # a variable said the kind
        return f"unknown setting {'.'.join(where)}{did_you_mean(name, known)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"].startswith(("int", "float", "literal", "bool")) and where[-1] != "dsn":
        message += f", and not {problem['input']!r}"[:LONGEST]
    return f"{'.'.join(where)}: {message}" if where else message


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
    return list((models[table[0]] if table else Settings).model_fields)


def did_you_mean(name: str, known: Any) -> str:
    """Name the nearest of the known names in words; an empty text if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
