"""The kind ``rabbitmq_stream``: a stream of a RabbitMQ server from 3.10 on.

    [sources.payments]
    kind = "rabbitmq_stream"
    server = "rabbitmq-stream+tls://rabbit-1.example.com,rabbit-2.example.com/shop"
    username = "saf"
    password = "${RABBITMQ_PASSWORD}"
    topic = "payments"                       # the stream
    service = "billing"

`saf.destinations.rabbitmq_stream` describes the addresses. In a cluster, the address names all
servers that keep the stream, because the stream's leader is read. A stream is one partition. A
position is the offset of the next message. `saf.sources.rabbitmq_stream.stream` reads the stream.
saf implements the protocol itself, so no client is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, SecretStr, model_validator

from saf.destinations.rabbitmq_stream import RabbitmqStream as Destination
from saf.destinations.rabbitmq_stream import valid_address
from saf.sources.settings import SourceSettings


class RabbitmqStream(SourceSettings):
    """Settings of a stream of a RabbitMQ server."""

    reads: ClassVar[tuple[str, str]] = ("stream", "Stream")

    kind: Literal["rabbitmq_stream"] = "rabbitmq_stream"
    server: Annotated[str, AfterValidator(valid_address)]
    """`rabbitmq-stream://host:5552/vhost`, or all hosts of a cluster:
    `rabbitmq-stream://host,host`; with TLS, `rabbitmq-stream+tls://…`."""
    username: str = "guest"
    """User name."""
    password: SecretStr | None = None
    """The user's password. Default: that of the user `guest`."""
    ca_file: Path | None = None
    """With TLS: CA certificates that verify the server's. Default: the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""

    @model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        self.as_destination()
        return self

    def as_destination(self) -> Destination:
        """Return the settings of a destination at the same server, whose connection is used."""
        shared = ("server", "username", "password", "ca_file", "certificate_file", "key_file")
        return Destination(**self.given(shared)).bounded(self.bounds)
