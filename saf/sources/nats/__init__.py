"""The kind ``nats``: a JetStream stream of a NATS server from 2.11 on.

    [sources.payments]
    kind = "nats"
    server = "tls://nats-1.example.com:4222,nats-2.example.com:4222"
    username = "saf"
    password = "${NATS_PASSWORD}"
    stream = "ORDERS"
    topic = "orders.*"                       # subjects of that stream
    service = "billing"

`saf.destinations.nats` describes the addresses. A stream is one partition. A position is a sequence
of the stream. The messages that saf's own destination keeps there as marks are skipped.

With wildcards in the topic, a message of another writer has a header ``Nats-Subject``.
`saf.sources.nats.stream` reads the stream. The client is the extra ``nats``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, SecretStr, model_validator

from saf.destinations.nats import Nats as Destination
from saf.destinations.nats import parse, stream_name
from saf.sources.settings import SourceSettings

WORD = re.compile(r"[^\x00-\x20\x7f.*>]+|[*]")
LOGIN = (
    *("username", "password", "token", "nkey_file", "creds_file"),
    *("ca_file", "certificate_file", "key_file"),
)
"""Settings that mean the same as those of a destination."""


def _address(text: str) -> str:
    parse(text)
    return text


def subjects(text: str) -> str:
    """Return a pattern of subjects.

    >>> subjects("orders.*.>"), subjects(">")
    ('orders.*.>', '>')

    Raises:
        ValueError: it is not a pattern.
    """
    *words, last = text.split(".")
    if not all(map(WORD.fullmatch, words)) or not (last == ">" or WORD.fullmatch(last)):
        raise ValueError(f"{text!r} is not a pattern of subjects, such as orders.billing, orders.*")
    return text


class Nats(SourceSettings):
    """Settings of a JetStream stream of a NATS server."""

    reads: ClassVar[tuple[str, str]] = ("stream", "Stream")
    client: ClassVar[str | None] = "nats"

    kind: Literal["nats"] = "nats"
    server: Annotated[str, AfterValidator(_address)]
    """`nats://host:4222`, or several hosts of a cluster: `nats://host,host`; `tls://…` with TLS."""
    stream: Annotated[str, AfterValidator(stream_name)] = "SAF"
    """Name of the stream. The topic is the subject of its messages, or a pattern with `*` and
    `>`."""
    username: str | None = None
    """User name."""
    password: SecretStr | None = None
    """The user's password."""
    token: SecretStr | None = None
    """Token, instead of a user."""
    nkey_file: Path | None = None
    """File with the seed of an nkey, instead of a user."""
    creds_file: Path | None = None
    """File of credentials, with a JWT and the seed of an nkey, instead of a user."""
    ca_file: Path | None = None
    """With TLS: CA certificates that verify the server's. Default: the system's."""
    certificate_file: Path | None = None
    """With TLS: the client's certificate."""
    key_file: Path | None = None
    """With TLS: the key of the client's certificate."""

    @model_validator(mode="after")
    def _has_what_its_server_needs(self) -> Self:
        subjects(self.topic)
        self.as_destination()
        return self

    def as_destination(self) -> Destination:
        """Return the settings of a destination at the same stream, whose connection is used."""
        shared = ("server", "stream", *LOGIN)
        return Destination(**self.given(shared)).bounded(self.bounds)
