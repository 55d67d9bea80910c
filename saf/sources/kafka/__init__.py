"""The kind ``kafka``: a topic of a Kafka cluster.

    [sources.payments]
    kind = "kafka"
    brokers = "kafka-1.example.com:9092,kafka-2.example.com:9092"
    topic = "payments"
    service = "billing"

A position is the offset of the next record. Only committed records are read. Nothing is written at
the cluster: offsets are not committed there, and no group is joined. The user needs Describe and
Read on the topic. A record's key is the message's key, unless the settings name a header.
`saf.sources.kafka.topic` reads the topic. The client is the extra ``kafka``. With
``schema_registry``, `saf.sources.kafka.bodies` decodes bodies, with the extra ``kafka-schemas``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, SecretStr, model_validator

from saf.destinations.kafka import Kafka as Destination
from saf.destinations.kafka import Mechanism, brokers_of
from saf.sources.settings import SourceSettings


def _brokers(text: str) -> str:
    brokers_of(text)
    return text


def _mechanism(value: object) -> object:
    if value == "GSSAPI":
        raise ValueError("GSSAPI cannot be used: the client's package is made without Kerberos")
    return value


LOGIN = (
    *("security_protocol", "sasl_mechanism", "username", "password", "https_ca_file"),
    *("sasl_oauthbearer_token_endpoint_url", "sasl_oauthbearer_client_id"),
    *("sasl_oauthbearer_client_secret", "sasl_oauthbearer_scope", "sasl_oauthbearer_extensions"),
    *("ca_file", "certificate_file", "key_file", "key_password"),
)
"""Settings that mean the same as those of a destination."""
REGISTRY = tuple(f"schema_registry{name}" for name in ("", "_username", "_password", "_ca_file"))


class Kafka(SourceSettings):
    """Settings of a topic of a Kafka cluster."""

    reads: ClassVar[tuple[str, str]] = ("topic", "Topic")
    client: ClassVar[str | None] = "kafka"

    kind: Literal["kafka"] = "kafka"
    brokers: Annotated[str, AfterValidator(_brokers)]
    """Some brokers of the cluster, which know the rest: `host:9092,host:9092`."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """As in Kafka's own settings."""
    sasl_mechanism: Annotated[Mechanism, BeforeValidator(_mechanism)] | None = None
    """With SASL: the mechanism of the login."""
    username: str | None = None
    """With `PLAIN` and `SCRAM-…`: the user."""
    password: SecretStr | None = None
    """With `PLAIN` and `SCRAM-…`: the user's password."""
    sasl_oauthbearer_token_endpoint_url: SecretStr | None = None
    """With `OAUTHBEARER`: the endpoint that issues tokens for the client's credentials."""
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
    ca_file: Path | None = None
    """With TLS: CA certificates that verify the brokers'. Default: the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""
    key_password: SecretStr | None = None
    """With TLS: the password of that key, if it has one."""

    schema_registry: str | None = None
    """Address of the schema registry that bodies are encoded with, in Avro, Protobuf or JSON
    Schema; they are decoded to JSON. Default: bodies stay as they are."""
    schema_registry_username: str | None = None
    """The registry's user."""
    schema_registry_password: SecretStr | None = None
    """The registry's password."""
    schema_registry_ca_file: Path | None = None
    """CA certificates that verify the registry's. Default: those of the package certifi."""

    @model_validator(mode="after")
    def _has_what_its_protocol_needs(self) -> Self:
        self.as_destination()
        return self

    def as_destination(self) -> Destination:
        """Return the settings of a destination at the same cluster, whose clients are used."""
        shared = self.given(("brokers", *LOGIN, *REGISTRY))
        if any(name in shared for name in REGISTRY):
            shared["format"] = "avro"  # a destination has a registry only if it encodes
        return Destination(**shared).bounded(self.bounds)
