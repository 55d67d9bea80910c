"""The kind ``rabbitmq``: queues of a RabbitMQ server, by an exchange, at least once.

    [destinations.events]
    kind = "rabbitmq"
    server = "amqps://rabbit-1.example.com,rabbit-2.example.com/shop"
    username = "saf"
    password = "${RABBITMQ_PASSWORD}"
    exchange = "orders"
    topic = "orders.{service}"              # routing key orders.billing

`saf.destinations.rabbitmq.queues` tells how a chunk is stored. The client, pika, is the extra
``rabbitmq``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from uuid import NAMESPACE_URL, UUID, uuid5

import pydantic
from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities, Destination
from saf.destinations.addresses import Address, parse
from saf.destinations.linked import check_certificates
from saf.destinations.queues import QueueSettings, client_needed
from saf.destinations.settings import Guarantee, within

PORTS = {"amqp": 5672, "amqps": 5671}
"""The port by default, by the scheme."""
SECURE = "amqps"
NAMED = "RabbitMQ server, such as amqp://host:5672 or amqps://host:5671"
LONGEST = 255
"""The longest name of an exchange, in bytes."""


def _address(text: str) -> str:
    parse(text, PORTS, SECURE, NAMED)
    return text


def _exchange(text: str) -> str:
    if len(text.encode()) > LONGEST or not text.isprintable():
        raise ValueError(f"an exchange has a name of printable characters, up to {LONGEST} bytes")
    return text


class Rabbitmq(QueueSettings):
    """Queues of a RabbitMQ server, reached by an exchange."""

    capabilities: ClassVar[Capabilities] = Capabilities(takes_dialogs=False)

    kind: Literal["rabbitmq"] = "rabbitmq"
    server: Annotated[str, AfterValidator(_address)]
    """`amqp://host:5672/vhost`, or several hosts of a cluster: `amqp://host,host`; `amqps://…` with
    TLS."""
    username: str = "guest"
    """The user."""
    password: SecretStr | None = None
    """The user's password; by default, that of the user `guest`."""
    ca_file: Path | None = None
    """With TLS: certificates that the server's is checked with; by default, the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""
    exchange: Annotated[str, AfterValidator(_exchange)] = ""
    """The exchange; by default, the server's own, which gives a message to the queue that has its
    topic's name."""
    step_rows: Annotated[int, within(1, 100_000)] = 5_000
    """Messages that are sent before the first of them is confirmed."""

    @pydantic.model_validator(mode="after")
    def _has_what_tls_needs(self) -> Self:
        needed = "TLS: use amqps:// instead of amqp://"
        check_certificates(self, None if self.address.tls else needed)
        return self

    @property
    def address(self) -> Address:
        """Where the server is."""
        return parse(self.server, PORTS, SECURE, NAMED)

    @property
    def secret(self) -> str:
        """The password; RabbitMQ's own user has its name for one."""
        if self.password is not None:
            return self.password.get_secret_value()
        return "guest" if self.username == "guest" else ""

    def open(self, name: str, *, keep: bool = False) -> Destination:  # noqa: ARG002 - nothing to keep
        """Return the queues as a destination; see `DestinationSettings.open`."""
        with client_needed(name, "rabbitmq"):
            from saf.destinations.rabbitmq.queues import Queues  # needs Arrow; a driver has none
        return Queues(name, self)

    @classmethod
    def preload(cls) -> None:
        """Import what `open` imports; without the client, nobody uses this kind."""
        try:
            import pika  # noqa: F401 - to have it imported
        except ImportError:
            return
        import saf.destinations.rabbitmq.queues  # noqa: F401 - to have it imported

    def identity(self, name: str) -> UUID:  # noqa: ARG002 - its server keeps none
        """Return what follows from the address: nothing is kept at the server that could say it.

        An exchange may be several destinations, whose messages have other routing keys.
        """
        return uuid5(NAMESPACE_URL, f"{self.server}#{self.exchange}#{self.topic}")

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise what the server would be refused for; see `DestinationSettings.problems`."""
        self.guarantee(name)
        yield from ()

    def guarantee(self, name: str) -> Guarantee:
        """Return what the server gives; see `DestinationSettings.guarantee`."""
        with client_needed(name, "rabbitmq"):
            from saf.destinations.rabbitmq.server import connected

        with connected(name, self) as channel:
            version = channel.version
        where = f"exchange {self.exchange!r}" if self.exchange else "its own exchange"
        return Guarantee(
            server=f"RabbitMQ {version}, {self.server}, {where}",
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
