"""The kind ``kafka``: topics of a Kafka cluster, exactly once.

    [destinations.events]
    kind = "kafka"
    brokers = "kafka-1.example.com:9093,kafka-2.example.com:9093"
    security_protocol = "SASL_SSL"
    sasl_mechanism = "SCRAM-SHA-512"
    username = "saf"
    password = "${KAFKA_PASSWORD}"
    topic = "orders.{service}"              # topic orders.billing

`saf.destinations.kafka.transactions` describes how a chunk is stored,
`saf.destinations.kafka.server` how marks are kept, and which process owns a shard. The client is
the extra ``kafka``.

With ``format = "avro"``, ``"protobuf"`` or ``"json-schema"``, bodies are encoded with the schemas
of a schema registry (`saf.destinations.kafka.encoding`). That needs the extra ``kafka-schemas``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, cast
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, BeforeValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import hosts_of, without_login
from saf.destinations.queues import Format, QueueSettings
from saf.destinations.settings import client_needed, within

if TYPE_CHECKING:
    from saf.destinations.kafka.encoding import Encoding

PORT = 9092
NO_BROKERS = "is not a list of brokers, such as host:9092,host:9092"
CANNOT = re.compile(r"[^a-zA-Z0-9._-]")


def brokers_of(text: str) -> list[str]:
    """Parse a list of brokers; return each with its port.

    >>> brokers_of("k1,k2:9093,[::1]:9094")
    ['k1:9092', 'k2:9093', '[::1]:9094']

    Raises:
        ValueError: the list is invalid.
    """
    if "://" in without_login(text):
        raise ValueError(f"{text!r}: use host:9092, and set TLS or SASL by security_protocol = …")
    return [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for host, port in hosts_of(text, text, PORT, NO_BROKERS)
    ]


def topic_name(topic: str) -> str:
    """Return a topic as a valid name in Kafka: forbidden characters become ``_``.

    >>> topic_name("orders.//example.com/grüezi")
    'orders.__example.com_gr_ezi'
    """
    return CANNOT.sub("_", topic)


def _brokers(text: str) -> str:
    brokers_of(text)
    return text


def _marks_topic(text: str) -> str:
    if topic_name(text) != text:
        raise ValueError(
            f"{text!r} is not a topic's name: names have letters, digits, '.', '_', '-'"
        )
    return text


Encoded = Literal["avro", "protobuf", "json-schema"]
"""Formats in which a body is encoded with a schema of the registry."""
ENCODED: tuple[Encoded, ...] = ("avro", "protobuf", "json-schema")


def _registry(url: str) -> str:
    """Reject text that is not the address of a schema registry.

    >>> _registry("https://registry.example.com:8081")
    'https://registry.example.com:8081'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not the address of a schema registry, such as https://host:8081")
    if parts.username or parts.password:
        raise ValueError(
            "contains a login: use schema_registry_username and schema_registry_password"
        )
    return url


def _subject(text: str) -> str:
    """Reject an invalid template of subjects.

    >>> _subject("{topic}-value"), _subject("{topic}-{message_type}")
    ('{topic}-value', '{topic}-{message_type}')
    """
    try:
        parts = [*Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"{text!r} is not a template: {error}") from None
    for _, name, form, conversion in parts:
        if name is not None and (name not in ("topic", "message_type") or form or conversion):
            raise ValueError(f"{'{' + name + '}'!r} is neither {{topic}} nor {{message_type}}")
    if not text:
        raise ValueError("is empty")
    return text


def _mechanism(value: object) -> object:
    if value == "GSSAPI":
        raise ValueError(
            "GSSAPI cannot be used: the client's package is made without Kerberos; use "
            "SCRAM-SHA-512, OAUTHBEARER, or a client's certificate with security_protocol = 'SSL'"
        )
    return value


Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
BY_PASSWORD = ("username", "password")
BY_TOKEN = (
    "sasl_oauthbearer_token_endpoint_url",
    "sasl_oauthbearer_client_id",
    "sasl_oauthbearer_client_secret",
    "sasl_oauthbearer_scope",
    "sasl_oauthbearer_extensions",
    "https_ca_file",
)
"""Settings for a login by token; the first three are required."""


class Kafka(QueueSettings):
    """Settings of topics of a Kafka cluster."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_dialogs=False
    )

    client: ClassVar[str | None] = "confluent_kafka"
    turn_on_tls: ClassVar[str] = "security_protocol = 'SSL' or 'SASL_SSL'"
    stores: ClassVar[tuple[str, str]] = ("transactions", "Transactions")

    kind: Literal["kafka"] = "kafka"
    brokers: Annotated[str, AfterValidator(_brokers)]
    """Some brokers of the cluster, which know the rest: `host:9092,host:9092`."""
    marks_topic: Annotated[str, AfterValidator(_marks_topic)] = "saf.marks"
    """Topic of the marks; it is created if it does not exist."""
    partitions: Annotated[int, within(1, 10_000)] | None = None
    """Partitions of a topic of messages that saf creates. Default: the cluster's setting."""
    replicas: Annotated[int, within(1, 100)] | None = None
    """Brokers that keep a topic that saf creates. Default: the cluster's setting."""
    format: Literal[Format, Encoded] = "saf"  # type: ignore[assignment] # more than other queues
    """Names of headers: `saf-id` and so on, or as CloudEvents: `cloudevents` in binary mode,
    `cloudevents-structured` with the whole event as the body. With `avro`, `protobuf` and
    `json-schema`, names as with `saf`, and bodies encoded with a schema of the schema registry."""
    schema_registry: Annotated[str, AfterValidator(_registry)] | None = None
    """With these formats: the address of the schema registry, e.g. `https://host:8081`."""
    schema_registry_username: str | None = None
    """The registry's user."""
    schema_registry_password: SecretStr | None = None
    """The registry's password."""
    schema_registry_ca_file: Path | None = None
    """CA certificates that verify the registry's. Default: those of the package certifi."""
    subject: Annotated[str, AfterValidator(_subject)] = "{topic}-value"
    """Template of the subject whose newest schema encodes a body, with `{topic}` and
    `{message_type}`."""
    step_rows: Annotated[int, within(1, 1_000_000)] = 50_000
    """Most messages per transaction."""
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    """Compression of messages."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """As in Kafka's own settings."""
    sasl_mechanism: Annotated[Mechanism, BeforeValidator(_mechanism)] | None = None
    """With SASL: the mechanism of the login."""
    username: str | None = None
    """With `PLAIN` and `SCRAM-…`: the user."""
    password: SecretStr | None = None
    """With `PLAIN` and `SCRAM-…`: the user's password."""
    sasl_oauthbearer_token_endpoint_url: SecretStr | None = None
    """With `OAUTHBEARER`: the endpoint that issues tokens for the client's credentials. It is not
    shown, because it may contain a secret."""
    sasl_oauthbearer_client_id: str | None = None
    """With `OAUTHBEARER`: the client."""
    sasl_oauthbearer_client_secret: SecretStr | None = None
    """With `OAUTHBEARER`: the client's secret."""
    sasl_oauthbearer_scope: str | None = None
    """With `OAUTHBEARER`: the scope of the token."""
    sasl_oauthbearer_extensions: str | None = None
    """With `OAUTHBEARER`: extensions for the brokers, e.g. `logicalCluster=lkc-1,…`."""
    https_ca_file: Path | None = None
    """With `OAUTHBEARER`: CA certificates that verify the endpoint's. Default: the system's."""
    key_password: SecretStr | None = None
    """With TLS: the password of that key, if it has one."""

    @pydantic.model_validator(mode="after")
    def _has_what_its_protocol_needs(self) -> Self:
        self._check_login()
        if self.key_password and not self.key_file:
            raise ValueError("key_password needs key_file")
        return self

    @pydantic.model_validator(mode="after")
    def _has_its_registry(self) -> Self:
        given = [
            name
            for name in self.model_fields_set
            if name == "subject" or name.startswith("schema_registry")
        ]
        if not self.encodes and given:
            raise ValueError(f"{min(given)} needs format = {', '.join(map(repr, ENCODED))}")
        if self.encodes and self.schema_registry is None:
            raise ValueError(f"format = {self.format!r} needs schema_registry")
        if (self.schema_registry_username is None) != (self.schema_registry_password is None):
            raise ValueError("schema_registry_username and schema_registry_password go together")
        return self

    @property
    def encodes(self) -> bool:
        """True if bodies are encoded with a schema of the registry."""
        return self.format in ENCODED

    def encoding(self, name: str) -> Encoding:
        """Return what encodes the bodies of the destination of this name; the caller closes it.

        Raises:
            Refused: the extra is not installed here.
        """
        with client_needed(f"destination {name!r}", "kafka-schemas"):
            module = import_module(f"{__name__}.encoding")
        return cast("Encoding", module.Encoding(name, self))

    def problems(self, name: str) -> Iterator[tuple[str, str]]:
        """Raise if the cluster or the registry cannot be used; see `QueueSettings.problems`."""
        yield from super().problems(name)
        if self.encodes:
            with closing(self.encoding(name)) as encoding:
                encoding.look()

    @property
    def headers_as(self) -> Format:
        """Names of headers; see `QueueSettings.headers_as`."""
        return "saf" if self.encodes else cast("Format", self.format)

    @property
    def uses_tls(self) -> bool:
        """Return True if the protocol is one with TLS."""
        return self.security_protocol.endswith("SSL")

    def _check_login(self) -> None:
        by_token = self.sasl_mechanism == "OAUTHBEARER"
        configured = [
            name for name in ("sasl_mechanism", *BY_PASSWORD, *BY_TOKEN) if getattr(self, name)
        ]
        if not self.security_protocol.startswith("SASL"):
            if configured:
                raise ValueError(
                    f"{configured[0]} needs security_protocol = 'SASL_SSL' or 'SASL_PLAINTEXT'"
                )
            return
        if self.sasl_mechanism is None:
            raise ValueError("SASL needs sasl_mechanism, username and password")
        required, useless = (BY_TOKEN[:3], BY_PASSWORD) if by_token else (BY_PASSWORD, BY_TOKEN)
        if missing := [name for name in required if name not in configured]:
            raise ValueError(f"{self.sasl_mechanism} needs {' and '.join(missing)}")
        if wrong := [name for name in useless if name in configured]:
            raise ValueError(f"{self.sasl_mechanism} has no use for {wrong[0]}")
