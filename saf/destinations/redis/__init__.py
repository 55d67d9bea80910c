"""The kind ``redis``: Streams of a Redis or Valkey server, exactly once.

    [destinations.events]
    kind = "redis"
    server = "rediss://redis.example.com:6379/0"
    username = "saf"
    password = "${REDIS_PASSWORD}"
    topic = "orders.{service}"              # stream {saf}:orders.billing

`saf.destinations.redis.streams` describes how a chunk is stored, `saf.destinations.redis.keys` the
keys. The client is the extra ``redis``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import pydantic
from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities, Destination
from saf.destinations.linked import check_certificates
from saf.destinations.queues import QueueSettings, client_needed
from saf.destinations.reading import Reading
from saf.destinations.redis.address import Address, parse
from saf.destinations.settings import Guarantee, within

if TYPE_CHECKING:
    from saf.destinations.redis.server import Link


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

    kind: Literal["redis"] = "redis"
    server: Annotated[str, AfterValidator(_address)]
    """`redis://host:6379/0`; with TLS, `rediss://…`; `unix:///path?db=0`;
    `redis+sentinel://host,host/name/0` or `redis+cluster://host,host`, both also with `rediss`."""
    username: str | None = None
    """User of the server's ACL. Default: its user `default`."""
    password: SecretStr | None = None
    """The user's password."""
    ca_file: Path | None = None
    """With TLS: CA certificates that verify the server's. Default: the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""
    hash_tag: Annotated[str, AfterValidator(_tag)] = "saf"
    """Hash tag that all keys have in braces, so that a cluster keeps them together."""
    replicas: Annotated[int, within(0, 100)] = 0
    """Replicas that must have a chunk before it counts as stored."""
    step_rows: Annotated[int, within(1, 100_000)] = 2_000
    """Messages to store at a time; the server does nothing else while it stores them."""

    @pydantic.model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        condition = "TLS: use rediss:// instead of redis://"
        check_certificates(self, None if self.address.tls else condition)
        return self

    @property
    def address(self) -> Address:
        """Address of the server."""
        return parse(self.server)

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the streams as a destination; see `DestinationSettings.open`."""
        with client_needed(name, "redis"):
            from saf.destinations.redis.streams import Streams  # needs Arrow, which drivers lack
        return Streams(name, self)

    @classmethod
    def preload(cls) -> None:
        """Import the modules that `open` imports; without the client, this kind is not used."""
        try:
            import redis  # noqa: F401 - imported for its effect
        except ImportError:
            return
        import saf.destinations.redis.streams  # noqa: F401 - imported for its effect

    @contextmanager
    def _connected(self, name: str) -> Iterator[Link]:
        with client_needed(name, "redis"):
            from saf.destinations.redis.server import connected
        with connected(name, self) as link:
            yield link

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """Open the streams for reading; see `DestinationSettings.reading`.

        Raises:
            CannotReadBack: some entries are gone.
        """
        with client_needed(name, "redis"):
            from saf.destinations.redis.reading import read
        return read(name, self)

    def guarantee(self, name: str) -> Guarantee:
        """Return the promise of the server's settings; see `DestinationSettings.guarantee`."""
        with self._connected(name) as link:
            from saf.destinations.redis.guarantee import guarantee

            return guarantee(link)
