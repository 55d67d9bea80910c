"""The kind ``redis``: Streams of a Redis or Valkey server, exactly once.

    [destinations.events]
    kind = "redis"
    server = "rediss://redis.example.com:6379/0"
    username = "saf"
    password = "${REDIS_PASSWORD}"
    topic = "orders.{service}"              # stream {saf}:orders.billing

The address is a URL without a login:

    redis://host:6379/0                        one server
    rediss://host:6379/0                       one server, with TLS
    unix:///run/redis.sock?db=0                a server on this machine
    redis+sentinel://host:26379,host/name/0    the server that the sentinels call the master
    redis+cluster://host:6379,host             a cluster, whose nodes know each other

`saf.destinations.redis.streams` describes how a chunk is stored, `saf.destinations.redis.script`
the keys. The client is the extra ``redis``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import hosts_of, without_login
from saf.destinations.queues import QueueSettings
from saf.destinations.settings import within

PORTS = {"": 6379, "cluster": 6379, "sentinel": 26379}
"""Default port, by the part of the scheme after ``+``."""
NO_HOST = "lacks a host, or has something after it that is not a database"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a server."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    """Socket on this machine; otherwise empty."""
    found_by: str = ""
    """How to find the host: ``sentinel``, ``cluster``, or empty if the address names it."""
    master: str = ""
    """The master's name at the sentinels."""
    database: int = 0
    tls: bool = False


def parse(text: str) -> Address:
    """Parse an address.

    >>> parse("rediss://r1/2")
    Address(hosts=(('r1', 6379),), path='', found_by='', master='', database=2, tls=True)
    >>> parse("redis+sentinel://s1:7000,[::1]/mymaster").hosts
    (('s1', 7000), ('::1', 26379))
    >>> parse("unix:///run/redis.sock?db=1").database
    1

    Raises:
        ValueError: the address is invalid.
    """
    scheme, _, rest = without_login(text).partition("://")
    if scheme == "unix":
        url = urlsplit(text)
        (number,) = parse_qs(url.query).get("db", ["0"])
        return Address(path=unquote(url.path), database=_number(text, number))
    protocol, _, found_by = scheme.partition("+")
    if protocol not in ("redis", "rediss") or found_by not in PORTS or scheme.endswith("+"):
        raise ValueError(
            f"{text!r} is not an address of a Redis server, such as redis://host:6379/0, "
            "rediss://…, unix:///path, redis+sentinel://host/name, redis+cluster://host"
        )
    places, _, path = rest.partition("/")
    hosts = hosts_of(text, places, PORTS[found_by], NO_HOST)
    parts = path.split("/") if path else []
    master = parts.pop(0) if found_by == "sentinel" and parts else ""
    if found_by == "sentinel" and not master:
        raise ValueError(f"{text!r} lacks the name of its master: redis+sentinel://host/name")
    if len(hosts) > 1 and not found_by:
        raise ValueError(f"{text!r} has several hosts, but names neither sentinel nor cluster")
    database = _number(text, parts.pop(0) if parts else "0")
    if parts or (database and found_by == "cluster"):
        raise ValueError(f"{text!r} has too much after its host")
    return Address(
        hosts=hosts, found_by=found_by, master=master, database=database, tls=protocol == "rediss"
    )


def _number(text: str, database: str) -> int:
    if not database.isdecimal():
        raise ValueError(f"{text!r}: database {database!r} is not a number")
    return int(database)


def _address(text: str) -> str:
    parse(text)
    return text


def _tag(text: str) -> str:
    if not text or set(text) & set("{}") or not text.isprintable():
        raise ValueError("a hash tag is some printable characters, without { and }")
    return text


class Redis(QueueSettings):
    """Settings of streams of a Redis server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_dialogs=False
    )

    client: ClassVar[str | None] = "redis"
    turn_on_tls: ClassVar[str] = "TLS: use rediss:// instead of redis://"
    stores: ClassVar[tuple[str, str]] = ("streams", "Streams")

    kind: Literal["redis"] = "redis"
    server: Annotated[str, AfterValidator(_address)]
    """`redis://host:6379/0`; with TLS, `rediss://…`; `unix:///path?db=0`;
    `redis+sentinel://host,host/name/0` or `redis+cluster://host,host`, both also with `rediss`."""
    username: str | None = None
    """User of the server's ACL. Default: its user `default`."""
    password: SecretStr | None = None
    """The user's password."""
    hash_tag: Annotated[str, AfterValidator(_tag)] = "saf"
    """Hash tag that all keys have in braces, so that a cluster keeps them together."""
    replicas: Annotated[int, within(0, 100)] = 0
    """Replicas that must have a chunk before it counts as stored."""
    step_rows: Annotated[int, within(1, 100_000)] = 2_000
    """Messages to store at a time; the server does nothing else while it stores them."""

    @property
    def address(self) -> Address:
        """Address of the server."""
        return parse(self.server)
