"""The kind ``nats``: a JetStream stream of a NATS server from 2.12 on, exactly once.

    [destinations.events]
    kind = "nats"
    server = "tls://nats-1.example.com:4222,nats-2.example.com:4222"
    username = "saf"
    password = "${NATS_PASSWORD}"
    stream = "ORDERS"
    topic = "orders.{service}"              # subject orders.billing

The address is a URL without a login. It names one server, or the servers of a cluster:

    nats://host:4222            one server
    nats://host,host:4223       a cluster: the first host that answers
    tls://host                  one server, with TLS

`saf.destinations.nats.batches` describes how a chunk is stored, `saf.destinations.nats.server` the
subjects of marks. The client is nats-py (`saf.destinations.nats.connection`). A message costs it
21 µs of the processor's time; bytes written by Arrow would take 6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import quote

import pydantic
from pydantic import AfterValidator, SecretStr

from saf.destinations import Capabilities
from saf.destinations.addresses import hosts_of, without_login
from saf.destinations.queues import QueueSettings, Topic
from saf.destinations.settings import within

PORT = 4222
"""Default port of a server."""
CANNOT = re.compile(r"[\x00-\x20\x7f%*>]|^\.+|\.+$|\.{2,}")
"""Forbidden in a subject: controls, spaces, wildcards, and dots without a word between them."""
LARGEST = 31 << 20
"""Largest message: a stream accepts a little less than 32 MiB, including headers."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of one server, or of the servers of a cluster."""

    hosts: tuple[tuple[str, int], ...]
    tls: bool


def parse(text: str) -> Address:
    """Parse an address.

    >>> parse("tls://n1,[::1]:7000")
    Address(hosts=(('n1', 4222), ('::1', 7000)), tls=True)

    Raises:
        ValueError: the address is invalid.
    """
    scheme, _, places = without_login(text).partition("://")
    if scheme not in ("nats", "tls") or not places:
        raise ValueError(f"{text!r} is not an address of a NATS server, such as nats://host:4222")
    return Address(hosts=hosts_of(text, places, PORT), tls=scheme == "tls")


def subject_of(topic: str) -> str:
    """Return a topic as a subject; forbidden characters are encoded as in URLs.

    >>> subject_of("orders.a topic"), subject_of("a..b"), subject_of("100%.grüezi")
    ('orders.a%20topic', 'a%2E%2Eb', '100%25.grüezi')
    """
    return CANNOT.sub(lambda match: "".join(map(_encoded, match[0])), topic)


def _encoded(character: str) -> str:
    return "%2E" if character == "." else quote(character, safe="")


def pattern(template: str) -> str:
    """Return the pattern of the subjects that a template of topics can make, for a new stream.

    >>> pattern("orders.{service}"), pattern("orders.eu.all")
    ('orders.>', 'orders.eu.all')

    Raises:
        ValueError: the template begins with a placeholder, which could be any subject.
    """
    literal, name, _, _ = next(iter(Formatter().parse(template)))
    parts = literal.split(".")
    if name is None:
        return subject_of(template)
    words = parts[:-1]
    if not words or not words[0]:
        raise ValueError(
            f"{template!r} could be any subject: begin it with a word, as in orders.{{service}}"
        )
    return f"{subject_of('.'.join(words))}.>"


def _address(text: str) -> str:
    parse(text)
    return text


def stream_name(text: str) -> str:
    """Return a stream's name.

    Raises:
        ValueError: no stream may have it.
    """
    if not text or not text.isprintable() or set(text) & set(" .*>/\\"):
        raise ValueError("a stream's name has no spaces, and none of . * > / \\")
    return text


def _topic(text: str) -> str:
    pattern(text)
    return text


class Nats(QueueSettings):
    """Settings of a JetStream stream of a NATS server."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        exactly_once=True, fences=True, reads_back=True, takes_dialogs=False, largest_body=LARGEST
    )

    client: ClassVar[str] = "nats"
    turn_on_tls: ClassVar[str] = "TLS: use tls:// instead of nats://"
    stores: ClassVar[tuple[str, str]] = ("batches", "Batches")

    kind: Literal["nats"] = "nats"
    server: Annotated[str, AfterValidator(_address)]
    """`nats://host:4222`, or several hosts of a cluster: `nats://host,host`; `tls://…` with TLS."""
    stream: Annotated[str, AfterValidator(stream_name)] = "SAF"
    """Name of the stream; it is created if it does not exist."""
    topic: Annotated[Topic, AfterValidator(_topic)] = "saf.{service}"
    """Template of the subject that messages are stored under; it begins with a literal word.
    It may contain `{service}`, `{message_type}`, `{source}` and `{shard}`."""
    replicas: Annotated[int, within(1, 5)] = 1
    """Servers of a cluster that keep a new stream."""
    step_rows: Annotated[int, within(1, 1_000)] = 1_000
    """Messages to store at a time; marks count too, up to 1,000 in total."""
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

    @pydantic.model_validator(mode="after")
    def _has_one_login(self) -> Self:
        logins = [
            name
            for name in ("username", "token", "nkey_file", "creds_file")
            if getattr(self, name) is not None
        ]
        if len(logins) > 1:
            raise ValueError(f"{' and '.join(logins)} are several logins: set one")
        return self

    @property
    def address(self) -> Address:
        """Address of the server."""
        return parse(self.server)
