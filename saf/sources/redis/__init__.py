"""The kind ``redis``: a stream of a Redis or Valkey server.

    [sources.payments]
    kind = "redis"
    server = "rediss://redis.example.com:6379/0"
    username = "saf"
    password = "${REDIS_PASSWORD}"
    topic = "payments"                       # the key of the stream
    service = "billing"

`saf.destinations.redis` describes the addresses. A stream is one partition. A position is the two
parts of an entry's id. The user needs the commands HELLO, PING, INFO, XINFO, XRANGE, MULTI and
EXEC.

The field ``body`` of an entry is the message's body, and the other fields are its headers. An entry
without such a field becomes a JSON object of all its fields. `saf.sources.redis.stream` reads the
stream. The client is the extra ``redis``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, SecretStr, model_validator

from saf.destinations.redis import Redis as Destination
from saf.destinations.redis import parse
from saf.sources.settings import SourceSettings


def _address(text: str) -> str:
    parse(text)
    return text


class Redis(SourceSettings):
    """Settings of a stream of a Redis server."""

    reads: ClassVar[tuple[str, str]] = ("stream", "Stream")
    client: ClassVar[str | None] = "redis"

    kind: Literal["redis"] = "redis"
    server: Annotated[str, AfterValidator(_address)]
    """`redis://host:6379/0`, or another address that destinations of this kind take."""
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
    body_field: str = "body"
    """Field of an entry that contains the message's body."""

    @model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        self.as_destination()
        return self

    def as_destination(self) -> Destination:
        """Return the settings of a destination at the same server, whose connection is used."""
        shared = ("server", "username", "password", "ca_file", "certificate_file", "key_file")
        return Destination(**self.given(shared)).bounded(self.bounds)
