"""Link to a Redis server: a destination's connection, and the state that saf keeps at the server.

The state is the destination's identity and the marks of sources. `saf.destinations.redis.script`
describes their keys, and writes the marks.

An error of the server is recognised by its code, the first word of its answer. If a later attempt
may succeed, it is `Unavailable`: no answer, no memory, no disk, a failover. If an operator must fix
something, it is `Refused`: the login, a right, a replica, a policy that evicts keys.

`Link.guarantee` returns the promise of the server's settings: which messages a crash or a failover
may take back. A loss always takes the marks back with the messages. It is noticed at the next
contact, and `saf rebase` sends the lost messages again; but a consumer may have read them before.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, UUID, uuid5

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import (
    ClusterCrossSlotError,
    MovedError,
    RedisClusterException,
    RedisError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from saf.destinations.marks import ABSENT, Known, Place, known_of
from saf.destinations.redis import script
from saf.destinations.redis.script import DENIED, NO_STREAM
from saf.destinations.settings import Guarantee, unusable
from saf.errors import Refused, SafError, Unavailable

if TYPE_CHECKING:
    from saf.destinations.redis import Redis

OLDEST = (7, 0)
"""Oldest supported version; since then, a stream reports how many entries it has lost."""

TO_MEND = {
    "NOAUTH": "name its user and password in saf.toml",
    "WRONGPASS": "fix username and password in saf.toml",
    "NOPERM": "let its user do what docs/destinations.md lists, by ACL SETUSER",
    "MOVED": "use redis+cluster:// in saf.toml: the server is a node of a cluster",
    DENIED: "let its user do what docs/destinations.md lists, by ACL SETUSER",
    NO_STREAM: "rename that key, or choose another topic or hash_tag in saf.toml",
}
"""The operator's action for an error, by its code."""

KEPT = {
    "always": "a crash of the process or of the machine loses nothing that was acknowledged",
    "everysec": "a crash loses messages acknowledged in the last second or two",
    "no": "a crash of the machine loses messages acknowledged since the system last wrote, "
    "often half a minute",
    None: "what a crash of the machine loses is not known, because this user may not ask",
}
"""Loss with an append-only file, by appendfsync; None: appendfsync is unknown."""
NOT_KEPT = "a crash, or any restart, loses messages acknowledged since the last snapshot"
"""Loss without an append-only file."""


class Link:
    """A destination's client, connected to its server."""

    def __init__(self, name: str, settings: Redis) -> None:
        self.what = f"destination {name!r}"
        self.settings = settings
        self.client = _client(settings)
        self.client.ping()

    def identity(self) -> UUID:
        """Return the destination's identity, or its future one; write nothing.

        A server without an identity gets one computed from its address. So a server that has lost
        everything is not taken for a new one: it is the same one, without its acknowledged data.
        """
        value = self.client.get(script.identity(self.settings.hash_tag))
        if value is not None:
            return UUID(value.decode())
        return uuid5(NAMESPACE_URL, f"{self.settings.server}#{self.settings.hash_tag}")

    def make_identity(self) -> UUID:
        """Return the identity, after storing it; it stays when the server's data is moved."""
        identity = self.identity()
        self.client.set(script.identity(self.settings.hash_tag), str(identity), nx=True)
        return self.identity()

    def read(self, source: UUID, places: Sequence[Place]) -> list[str]:
        """Return the values of places' fields."""
        values = self.client.hmget(
            script.marks(self.settings.hash_tag, source), [script.field(place) for place in places]
        )
        return [ABSENT if value is None else value.decode() for value in values]

    def known(self, source: UUID) -> Known:
        """Return all marks of a source."""
        marks = self.client.hgetall(script.marks(self.settings.hash_tag, source))
        return known_of(self.identity(), script.texts(marks))

    def info(self) -> dict[str, Any]:
        """Return the server's INFO."""
        return dict(self.client.info())

    def config(self, name: str) -> str | None:
        """Return a setting of the server; None if it is not set, or this user may not ask."""
        try:
            answer = self.client.config_get(name)
        except redis.ResponseError:
            return None
        return next((_text(value) for value in answer.values()), None)

    def look(self) -> Mapping[str, Any]:
        """Raise if messages must not be stored here; return the server's INFO.

        Raises:
            Refused: the server is too old, a replica, or evicts keys.
        """
        info = self.info()
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise unusable(self.what, f"its version is {version}", "upgrade it to 7.0 or newer")
        if info["role"] != "master":
            raise unusable(
                self.what, "it is a replica", "name the master, or sentinels, in saf.toml"
            )
        if (policy := info.get("maxmemory_policy")) != "noeviction":
            raise unusable(
                self.what,
                f"maxmemory-policy is {policy}, so it may throw away messages and marks",
                "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
            )
        return info

    def close(self) -> None:
        """Close the connections."""
        with suppress(RedisError, OSError):
            self.client.close()

    def guarantee(self) -> Guarantee:
        """Return the server's promise with its current settings."""
        info = self.info()
        file = bool(info["aof_enabled"])
        sync = self.config("appendfsync") if file else None
        replicas = int(info["connected_slaves"])
        required = self.settings.replicas
        findings: list[tuple[str, str]] = []
        if not file:
            findings.append((NOT_KEPT, "appendonly yes and appendfsync always in redis.conf"))
        elif sync is None:
            findings.append((KEPT[sync], "ACL SETUSER with +config|get, for appendfsync"))
        elif sync != "always":
            findings.append((KEPT[sync], "appendfsync always in redis.conf"))
        if replicas and not required:
            findings.append(
                (
                    f"a failover to one of {_replicas(replicas)} may lose acknowledged messages, "
                    "because writes do not wait for it",
                    f"replicas = {replicas} in this destination of saf.toml, and "
                    "min-replicas-to-write",
                )
            )
        if required > replicas:
            findings.append(
                (
                    f"it has {replicas} of {_replicas(required)} that saf waits for: messages wait",
                    "start them, or lower replicas in saf.toml",
                )
            )
        failover = "no replica is waited for"
        if required:
            failover = f"a chunk counts as stored when {_replicas(required)} have it"
        kept = KEPT.get(sync, KEPT[None]) if file else NOT_KEPT
        name = "Valkey" if "valkey_version" in info else "Redis"
        version = info.get("valkey_version") or info["redis_version"]
        return Guarantee(
            server=f"{name} {version}, {info['redis_mode']}, {self.settings.server}",
            promise=f"{self.settings.quality.replace('_', ' ')}; {kept}; {failover}; a loss is "
            "detected, and saf rebase sends the lost messages again",
            more=tuple(findings),
        )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _client(settings: Redis) -> Any:
    """Return a client of the server that stores: the address's, the master, or a cluster's node."""
    address, bounds = settings.address, settings.bounds
    options: dict[str, Any] = {
        "username": settings.username,
        "password": settings.password and settings.password.get_secret_value(),
        "socket_connect_timeout": bounds.network_seconds,
        "socket_timeout": bounds.statement_seconds,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if not address.path:
        vanished = int(bounds.network_seconds * 1000)
        options |= {
            "socket_keepalive": True,
            "socket_keepalive_options": {socket.TCP_USER_TIMEOUT: vanished},
        }
    if address.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": _path(settings.ca_file),
            "ssl_certfile": _path(settings.certificate_file),
            "ssl_keyfile": _path(settings.key_file),
        }
    if address.path:
        return redis.Redis(unix_socket_path=address.path, db=address.database, **options)
    if address.found_by == "sentinel":
        # sentinels have their own logins, or none
        sentinel_options = {
            name: value for name, value in options.items() if name not in ("username", "password")
        }
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call] # untyped
            address.hosts, sentinel_kwargs=sentinel_options, db=address.database, **options
        )
        return sentinel.master_for(address.master)
    if address.found_by == "cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]  # type: ignore[no-untyped-call]
        cluster: Any = RedisCluster(startup_nodes=nodes, **options)
        try:
            node = cluster.get_node_from_key(script.identity(settings.hash_tag))
        finally:
            cluster.close()
        if node is None:
            raise redis.ConnectionError("no node of the cluster has the slot of its keys")
        return redis.Redis(host=node.host, port=node.port, **options)
    ((host, port),) = address.hosts
    return redis.Redis(host=host, port=port, db=address.database, **options)


def _path(file: object) -> str | None:
    return None if file is None else str(file)


@contextmanager
def errors(what: str, settings: Redis) -> Iterator[None]:
    """Translate the client's errors."""
    try:
        yield
    except (RedisError, RedisClusterException, OSError) as error:
        raise translated(what, settings, error) from None


def translated(what: str, settings: Redis, error: Exception) -> SafError:
    """Return saf's error for an error of the client."""
    error = _refusal(error)
    text = settings.redact(str(error)) or type(error).__name__
    code = text.split(" ")[0]
    if isinstance(error, redis.AuthenticationError):
        code = code if code in TO_MEND else "WRONGPASS"
    elif isinstance(error, redis.exceptions.NoPermissionError):
        code = "NOPERM"
    elif isinstance(error, (MovedError, ClusterCrossSlotError)):  # without their codes
        # in a cluster, the slot has moved: a new connection finds it
        code = "" if settings.address.found_by == "cluster" else "MOVED"
    if code in ("NOAUTH", "WRONGPASS", "NOPERM"):
        return Refused(what, text, TO_MEND[code])
    if code in TO_MEND:
        reason = text.removeprefix(f"{NO_STREAM} ").removeprefix(f"{DENIED} ")
        return unusable(what, reason, TO_MEND[code])
    unavailable = Unavailable(what, f"{settings.server}: {text}")
    unavailable.hangs = isinstance(error, redis.TimeoutError)
    return unavailable


def _refusal(error: Exception) -> Exception:
    """Return a node's own error if a client of a cluster has wrapped it in another one."""
    inner: BaseException | None = error
    while isinstance(inner, RedisClusterException):
        inner = inner.__cause__ or inner.__context__
        if isinstance(inner, redis.exceptions.NoPermissionError):
            return inner
    return error.__cause__ if isinstance(error.__cause__, RedisError) else error


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"
