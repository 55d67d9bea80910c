"""The kind ``rabbitmq``: queues of a RabbitMQ server, filled through an exchange, at least once.

    [destinations.events]
    kind = "rabbitmq"
    server = "amqps://rabbit-1.example.com,rabbit-2.example.com/shop"
    username = "saf"
    password = "${RABBITMQ_PASSWORD}"
    exchange = "orders"
    topic = "orders.{service}"              # routing key orders.billing

`saf.destinations.rabbitmq.queues` describes how a chunk is stored. The client, pika, is the extra
``rabbitmq``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import Address, parse
from saf.destinations.queues import QueueSettings
from saf.destinations.settings import Guarantee, within

PORTS = {"amqp": 5672, "amqps": 5671}
"""Default port of each scheme."""
SECURE = "amqps"
NAMED = "RabbitMQ server, such as amqp://host:5672 or amqps://host:5671"
LONGEST = 255
"""Longest name of an exchange, in bytes."""


def valid_address(text: str) -> str:
    """Return an address.

    Raises:
        ValueError: the address is invalid.
    """
    parse(text, PORTS, SECURE, NAMED)
    return text


def _exchange(text: str) -> str:
    if len(text.encode()) > LONGEST or not text.isprintable():
        raise ValueError(f"an exchange has a name of printable characters, up to {LONGEST} bytes")
    return text


class Rabbitmq(QueueSettings):
    """Settings of queues of a RabbitMQ server, reached through an exchange."""

    capabilities: ClassVar[Capabilities] = Capabilities(takes_dialogs=False)

    client: ClassVar[str | None] = "pika"
    turn_on_tls: ClassVar[str] = "TLS: use amqps:// instead of amqp://"
    stores: ClassVar[tuple[str, str]] = ("queues", "Queues")

    kind: Literal["rabbitmq"] = "rabbitmq"
    server: Annotated[str, AfterValidator(valid_address)]
    """`amqp://host:5672/vhost`, or several hosts of a cluster: `amqp://host,host`; with TLS,
    `amqps://…`."""
    username: str = "guest"
    """User name."""
    password: SecretStr | None = None
    """The user's password. Default: that of the user `guest`."""
    exchange: Annotated[str, AfterValidator(_exchange)] = ""
    """Exchange. Default: the server's own, which sends a message to the queue named like its
    topic."""
    step_rows: Annotated[int, within(1, 100_000)] = 5_000
    """Most messages in flight before the first of them is confirmed."""

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

    def identity(self, name: str) -> UUID:  # noqa: ARG002 - its server keeps no identity
        """Return an identity computed from the address: the server can keep none.

        One exchange may be several destinations, whose messages have different routing keys.
        """
        return uuid5(NAMESPACE_URL, f"{self.server}#{self.exchange}#{self.topic}")

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if messages must not be stored there; see `DestinationSettings.problems`."""
        self.guarantee(name)
        yield from ()

    def guarantee(self, name: str) -> Guarantee:
        """Return the server's promise; see `DestinationSettings.guarantee`."""
        with self.connected(name) as channel:
            version = channel.version
        exchange = f"exchange {self.exchange!r}" if self.exchange else "its own exchange"
        return Guarantee(
            server=f"RabbitMQ {version}, {self.server}, {exchange}",
            promise=f"{self.quality.replace('_', ' ')}; a durable queue confirms a message when it "
            "is on its server's disk, a quorum queue when it is on most of its servers'; what no "
            "queue takes is a dead letter",
            more=(
                (
                    "after a lost answer, messages are stored again",
                    "a consumer that knows each message-id which it has had; or kind = "
                    '"rabbitmq_stream"',
                ),
            ),
        )
