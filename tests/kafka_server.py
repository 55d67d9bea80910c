"""A Kafka broker for tests: on ports and in a folder of its own, killed for real.

Its jars come from Maven, once, into a folder that outlives the tests (`make kafka`). One broker
serves many tests: each has topics of its own, by a prefix (`KafkaQueue`).
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined] # it is public

from saf.database.bounds import Bounds
from saf.destinations.kafka import Kafka
from saf.destinations.kafka.client import Voices, settings_of
from saf_demo import servers
from saf_demo.servers import free_port
from tests.certificates import certificate
from tests.killable import Killable, Restartable
from tests.lossy import Lossy
from tests.needed import installed
from tests.waits import until

BOUNDS = Bounds(statement_seconds=20, chunk_seconds=20)
PASSWORD = "hunter2-canary"
LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
TOKEN_LOGIN = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
LARGEST = 80 << 20
ENDS = b"\x00\x1a\x00\x01"
"""How a request begins that ends a transaction: its number, and the version that the client has."""


@dataclass(kw_only=True)
class KafkaServer(Killable):
    """One broker. What it holds is in its folder, so that it can be started again."""

    folder: Path
    port: int = 0
    sasl: int = 0
    tls: int = 0
    certificate: tuple[Path, Path] | None = None

    @property
    def address(self) -> str:
        """Where it is, as saf.toml says it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if not self.port:
            self.port, self.sasl, self.tls = free_port(), free_port(), free_port()
            self.certificate = certificate(self.folder)
        with installed():
            command = servers.kafka(self.folder, self.port, self._settings())
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self.answers, seconds=120)

    def _settings(self) -> dict[str, str]:
        assert self.certificate is not None
        keys = self.folder / "keys.pem"
        public, key = self.certificate
        keys.write_text(key.read_text() + public.read_text())
        return {
            "listeners": f"SASL://127.0.0.1:{self.sasl},TLS://localhost:{self.tls}",
            "listener.security.protocol.map": "SASL:SASL_PLAINTEXT,TLS:SSL",
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN,OAUTHBEARER",
            # takes a token that nobody has signed, and looks at its claims
            "listener.name.sasl.oauthbearer.sasl.jaas.config": (
                f'{TOKEN_LOGIN} required unsecuredValidatorRequiredScope="kafka" '
                'unsecuredLoginStringClaim_sub="broker";'
            ),
            "listener.name.sasl.plain.sasl.jaas.config": (
                f'{LOGIN} required user_saf="{PASSWORD}" user_nobody="{PASSWORD}";'
            ),
            "listener.name.tls.ssl.keystore.type": "PEM",
            "listener.name.tls.ssl.keystore.location": str(keys),
            "listener.name.tls.ssl.truststore.type": "PEM",
            "listener.name.tls.ssl.truststore.location": str(public),
            "listener.name.tls.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:CN=localhost;User:robot",
            "message.max.bytes": str(LARGEST),
            # one that was killed may be back so soon
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
        }

    def settings(self, **given: Any) -> Kafka:
        """It as a destination."""
        return Kafka(**{"brokers": self.address, **given}).bounded(BOUNDS)

    def client(self) -> dict[str, Any]:
        """What a client of it is given."""
        return settings_of(self.settings(), Voices())

    def admin(self) -> AdminClient:
        """Somebody who may do everything."""
        return AdminClient(self.client())

    def answers(self) -> bool:
        """Whether it answers, and has read its data."""
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            said = self.admin().list_topics(timeout=1)
        except KafkaException:
            return False
        return bool(said.brokers)


@dataclass(kw_only=True)
class KafkaQueue(Restartable):
    """Topics of one test, whose names begin alike."""

    server: KafkaServer
    prefix: str = field(default_factory=lambda: f"t{uuid4().hex[:8]}")

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def marks(self) -> str:
        return f"{self.prefix}.marks"

    def settings(self, **given: Any) -> Kafka:
        """These topics as a destination."""
        mine = {"topic": f"{self.prefix}.{{service}}", "marks_topic": self.marks}
        return self.server.settings(**{**mine, **given})

    def start(self) -> None:
        self.server.start()

    def kill(self) -> None:
        self.server.kill()

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    def topics(self) -> list[str]:
        """The topics, without that of the marks."""
        there = self.server.admin().list_topics(timeout=30).topics
        return sorted(
            topic for topic in there if topic.startswith(self.prefix) and topic != self.marks
        )

    def empty(self) -> None:
        """Let it lose everything."""
        admin = self.server.admin()
        there = admin.list_topics(timeout=30).topics
        if mine := [topic for topic in there if topic.startswith(self.prefix)]:
            for deleted in admin.delete_topics(mine).values():
                deleted.result()
            until(lambda: not self.topics())

    def messages(self, *topics: str) -> list[Message]:
        """The committed messages of topics, in the order in which they were stored."""
        consumer = Consumer(
            self.server.client()
            | {
                "group.id": "test", "enable.auto.commit": False, "enable.partition.eof": True,
                "isolation.level": "read_committed", "fetch.wait.max.ms": 20,
            }
        )  # fmt: skip
        try:
            known = consumer.list_topics(timeout=30).topics
            places = [
                TopicPartition(topic, number, 0)
                for topic in topics
                if topic in known
                for number in known[topic].partitions
            ]
            found: list[Message] = []
            consumer.assign(places)
            waiting = len(places)
            while waiting:
                for one in consumer.consume(10_000, 0.01):
                    if (error := one.error()) is None:
                        found.append(one)
                    else:
                        assert error.code() == KafkaError._PARTITION_EOF, error.str()
                        waiting -= 1
        finally:
            consumer.close()
        return sorted(found, key=lambda one: one.timestamp()[1])

    def entries(self, topic: str = "billing") -> Sequence[Mapping[str, str]]:
        """The headers of a topic's messages, and the ``body``, in their order."""
        return [
            headers(one) | {"body": (one.value() or b"").decode()}
            for one in self.messages(f"{self.prefix}.{topic}")
        ]


def headers(message: Message) -> dict[str, str]:
    """The headers of a message."""
    return {str(one[0]): _text(one[1]) for one in message.headers() or ()}


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode()


class LossyKafka(Lossy):
    """Tells clients that the broker is where the proxy is."""

    def __init__(self, port: int) -> None:
        self._there = port
        super().__init__(port)

    def answer(self, data: bytes) -> bytes:
        """What the broker says, with this port in place of its own."""
        here, there = (struct.pack(">i", port) for port in (self.port, self._there))
        return data.replace(b"127.0.0.1" + there, b"127.0.0.1" + here)


def make(server: KafkaServer, topic: str, partitions: int = 2, **settings: str) -> None:
    """Create a topic unless it exists."""
    admin = server.admin()
    if topic not in admin.list_topics(timeout=30).topics:
        for answer in admin.create_topics(
            [NewTopic(topic, partitions, 1, config=settings)]
        ).values():
            answer.result()


@contextmanager
def kafka_server(folder: Path) -> Iterator[KafkaServer]:
    """A broker, which ends with its context."""
    folder.mkdir(parents=True, exist_ok=True)
    server = KafkaServer(folder=folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
