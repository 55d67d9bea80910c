"""The kind ``rabbitmq_stream``: streams of a RabbitMQ server from 3.10 on, exactly once.

    [destinations.events]
    kind = "rabbitmq_stream"
    server = "rabbitmq-stream+tls://rabbit-1.example.com,rabbit-2.example.com/shop"
    username = "saf"
    password = "${RABBITMQ_PASSWORD}"
    topic = "orders.{service}"              # stream orders.billing

`saf.destinations.rabbitmq_stream.streams` describes how a chunk is stored, and why each message is
stored once. The server needs its plugin ``rabbitmq_stream``.

saf implements the stream protocol itself, because rstream 1.1 makes a drain too slow: its producer
takes 51 µs of the processor's time per message, 19,500 messages a second, of which its encoder of
AMQP 1.0 takes most; bytes written by Arrow take 4 µs. Its producer also has one publisher per
stream, and the promise of exactly once needs one per shard and lane.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import Address, parse
from saf.destinations.queues import QueueSettings
from saf.destinations.settings import within

PORTS = {"rabbitmq-stream": 5552, "rabbitmq-stream+tls": 5551}
"""Default port of each scheme."""
SECURE = "rabbitmq-stream+tls"
NAMED = (
    "RabbitMQ server's streams, such as rabbitmq-stream://host:5552 or "
    "rabbitmq-stream+tls://host:5551"
)
LONGEST = 200
"""Longest prefix of marks' streams, in bytes; a source's id follows it."""


def valid_address(text: str) -> str:
    """Return an address.

    Raises:
        ValueError: the address is invalid.
    """
    parse(text, PORTS, SECURE, NAMED)
    return text


def _marks(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text.encode()) > LONGEST:
        raise ValueError(f"a stream of marks has a name of printable characters, up to {LONGEST}")
    return text


class RabbitmqStream(QueueSettings):
    """Settings of streams of a RabbitMQ server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, reads_back=True, takes_dialogs=False
    )

    turn_on_tls: ClassVar[str] = "TLS: use rabbitmq-stream+tls:// instead of rabbitmq-stream://"
    stores: ClassVar[tuple[str, str]] = ("streams", "Streams")

    kind: Literal["rabbitmq_stream"] = "rabbitmq_stream"
    server: Annotated[str, AfterValidator(valid_address)]
    """`rabbitmq-stream://host:5552/vhost`, or several hosts of a cluster:
    `rabbitmq-stream://host,host`; with TLS, `rabbitmq-stream+tls://…`."""
    username: str = "guest"
    """User name."""
    password: SecretStr | None = None
    """The user's password. Default: that of the user `guest`."""
    marks: Annotated[str, AfterValidator(_marks)] = "saf-marks"
    """Prefix of the names of the streams that contain marks."""
    replicas: Annotated[int, within(1, 100)] | None = None
    """Servers of a cluster that keep a new stream. Default: the server's setting."""
    step_rows: Annotated[int, within(1, 10_000)] = 5_000
    """Messages to send before waiting for the confirmation of those sent earlier."""

    @property
    def address(self) -> Address:
        """Address of the server."""
        return parse(self.server, PORTS, SECURE, NAMED)

    @property
    def secret(self) -> str:
        """The password; that of RabbitMQ's built-in user is the user's name."""
        if self.password is not None:
            return self.password.get_secret_value()
        return "guest" if self.username == "guest" else ""
