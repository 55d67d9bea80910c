"""The kind ``rabbitmq``: a queue of a RabbitMQ server.

    [sources.payments]
    kind = "rabbitmq"
    server = "amqps://rabbit-1.example.com,rabbit-2.example.com/shop"
    username = "saf"
    password = "${RABBITMQ_PASSWORD}"
    topic = "payments"                       # the queue
    service = "billing"

`saf.destinations.rabbitmq` describes the addresses. A queue has no places: a message is there until
it is acknowledged. So messages are acknowledged after the commit that stores them, and a window of
ids recognises those that come again (`saf.sources.window`). `saf.sources.rabbitmq.queue` reads the
queue. The client is the extra ``rabbitmq``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, SecretStr, model_validator

from saf.destinations.rabbitmq import Rabbitmq as Destination
from saf.destinations.rabbitmq import valid_address
from saf.destinations.settings import within
from saf.sources.settings import SourceSettings, WindowBounds

CHUNKS_IN_FLIGHT = 2
"""Chunks that may be delivered and not acknowledged: one is stored while the next one is read."""


class Rabbitmq(SourceSettings):
    """Settings of a queue of a RabbitMQ server."""

    reads: ClassVar[tuple[str, str]] = ("queue", "Queue")
    client: ClassVar[str | None] = "rabbitmq"

    kind: Literal["rabbitmq"] = "rabbitmq"
    server: Annotated[str, AfterValidator(valid_address)]
    """`amqp://host:5672/vhost`, or several hosts of a cluster: `amqp://host,host`; with TLS,
    `amqps://…`."""
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
    start: Literal["earliest"] = "earliest"
    """A queue has no places, so all of it is read."""
    chunk_rows: Annotated[int, within(1, 65_535)] = 10_000
    """Messages to read at a time, and to store in one transaction."""
    window_messages: Annotated[int, within(0, 10_000_000)] = 100_000
    """Messages whose ids are kept, to recognise one that is delivered again. 0: none, so messages
    are stored at least once."""
    window_seconds: Annotated[float, within(1, 1e9)] = 7 * 86_400.0
    """Time to keep the id of a message, in seconds."""

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        least = CHUNKS_IN_FLIGHT * self.chunk_rows
        if 0 < self.window_messages < least:
            raise ValueError(
                f"window_messages = {self.window_messages:,} is less than two chunks, which may be "
                f"delivered again together: set at least {least:,}, or a smaller chunk_rows"
            )
        self.as_destination()
        return self

    @property
    def window(self) -> WindowBounds:
        """Bounds of the window of ids; see `SourceSettings.window`."""
        return WindowBounds(messages=self.window_messages, seconds=self.window_seconds)

    def as_destination(self) -> Destination:
        """Return the settings of a destination at the same server, whose connection is used."""
        shared = ("server", "username", "password", "ca_file", "certificate_file", "key_file")
        return Destination(**self.given(shared)).bounded(self.bounds)
