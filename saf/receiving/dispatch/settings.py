"""Settings of an endpoint: a table ``[endpoints.NAME]`` of saf.toml.

    [endpoints.billing]
    url = "https://billing.example.com/hooks"
    subscription = "billing"             # by default, the endpoint's name

Settings that may contain a secret are `pydantic.SecretStr`. A URL is shown without its query. A
wrong or unknown setting raises `pydantic.ValidationError`. Nothing here connects to an endpoint or
reads a file.

*A rate* limits the messages per time to an endpoint, for all sending processes together. `Bucket`
keeps the endpoint's rate, and `Apart` keeps the rate of each key.

*A template* makes a body in the endpoint's own form from a message:

    template = '{"text": {{data.note}}, "order": {{key}}, "lines": {{data.lines}}}'

``{{…}}`` stands for a value of the message:

    id, key, type, time, service    the message's own; service is the sender's
    header.NAME                     one of its headers
    data                            its body: the value if it is JSON, otherwise its text
    data.lines.0.price              a part of that value

`filled` writes a value as the content type demands, so that the value cannot be misread: as JSON in
JSON, percent-encoded in a form, and unchanged in any other text. A number from the body keeps its
digits. If the message lacks a value that the template names, `filled` raises `UnreadableBody`.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote_plus, urlsplit

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from saf.destinations.addresses import reading_url
from saf.destinations.settings import Rate, within
from saf.errors import UnreadableBody, UsageError
from saf.message import CONTENT_TYPE, STRICT, as_json
from saf.received import Received
from saf.setaside import parking
from saf.signing.webhook import key_of

DAY = 86400

WEBHOOK_SECONDS = (5, 300, 1800, 7200, 18_000, 36_000, 36_000)
"""The schedule of webhooks: waits after each failed attempt, in seconds."""

PLACE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
NAMES = ("id", "key", "type", "time", "service", "data")
ROOTS = ("data.", "header.")

JSON, FORM = "application/json", "application/x-www-form-urlencoded"


def _is_url(text: str) -> str:
    """such as `https://example.com/hooks`"""
    with reading_url(text):
        parts = urlsplit(text)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as name resolution does it
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("it is not a URL such as https://billing.example.com/hooks")
    if parts.username or parts.password:
        raise ValueError("a URL must not contain user and password: set them separately")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a URL has printable ASCII characters only: encode the others")
    return text


def _is_network(text: str) -> str:
    """such as `10.1.0.0/16`"""
    ipaddress.ip_network(text)
    return text


def check(template: str) -> str:
    """Return a template if it names known values only.

    >>> check('{"order": {{key}}}')
    '{"order": {{key}}}'

    Raises:
        ValueError: the template names an unknown value.
    """
    for name in PLACE.findall(template):
        if name not in NAMES and not name.startswith(ROOTS):
            known = ", ".join((*NAMES, "data.NAME", "header.NAME"))
            raise ValueError(f"{{{{{name}}}}} is not one of {known}")
    return template


Url = Annotated[str, AfterValidator(_is_url)]
Seconds = Annotated[float, within(0.01, 3600)]
Network = Annotated[str, AfterValidator(_is_network)]


class Endpoint(BaseModel):
    """An endpoint that gets the messages of a subscription, and the way to send them."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: Url = Field(repr=False)
    """URL to send the messages to, by POST."""
    broker: str | None = None
    """Destination whose inbox has the messages; by default, the destination of kind postgresql."""
    subscription: str | None = None
    """Subscription whose messages are sent; by default, it has the endpoint's name."""
    mode: Literal["binary", "structured", "batch", "plain", "xmlrpc", "soap"] = "binary"
    """Form of a request: CloudEvents in headers, as JSON or several, the plain body, or a call."""
    batch_messages: Annotated[int, within(1, 10_000)] | None = None
    """With mode "batch": maximum number of messages in a request; by default, 100."""
    batch_of: Literal["keys", "key"] | None = None
    """With mode "batch": one message each of several keys (the default), or several of one key."""
    template: Annotated[str, AfterValidator(check)] | None = None
    """Body in the endpoint's own form, with {{key}}, {{data.total}} …: see dispatch.md."""
    template_type: str | None = Field(default=None, min_length=1)
    """Content type of the template's body; by default, application/json."""
    method: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.:/]{1,200}$")
    """With mode "xmlrpc": method to call."""
    wsdl: Path | None = None
    """With mode "soap": file that describes the service."""
    operation: str | None = Field(default=None, min_length=1)
    """With mode "soap": operation to call."""
    source: str | None = Field(default=None, min_length=1)
    """The attribute ``source`` of CloudEvents; by default, /saf/ and the sender's service."""
    secrets: tuple[pydantic.SecretStr, ...] = ()
    """Secrets of Standard Webhooks (whsec_…); requests get a signature by each secret."""
    bearer: pydantic.SecretStr | None = None
    """Token for the header Authorization."""
    user: str | None = None
    """With password: user for the header Authorization, in HTTP's basic scheme."""
    password: pydantic.SecretStr | None = None
    """See user."""
    token_url: Url | None = Field(default=None, repr=False)
    """URL of OAuth 2 tokens for client credentials, instead of bearer."""
    client_id: str | None = None
    """With OAuth 2: id of this client."""
    client_secret: pydantic.SecretStr | None = None
    """With OAuth 2: secret of this client."""
    scope: str | None = None
    """With OAuth 2: scope of the token."""
    proxy: Url | None = Field(default=None, repr=False)
    """Proxy, e.g. http://proxy.example.com:3128; the environment's proxy is not used."""
    proxy_user: str | None = None
    """With proxy_password: user for the proxy."""
    proxy_password: pydantic.SecretStr | None = None
    """See proxy_user."""
    http2: bool = False
    """Use HTTP/2 if the endpoint offers it by TLS."""
    reply: bool = False
    """Send the body of an answer back to the service that the message came from."""
    reply_type: str | None = Field(default=None, min_length=1)
    """Message type of replies, if the answer has no header ce-type."""
    one_reply: tuple[str, ...] = ()
    """Contracts of dialogs that end with the reply."""
    ca_file: Path | None = None
    """Certificates (PEM) of the endpoint's authorities; by default, the system's."""
    client_certificate: Path | None = None
    """Client certificate (PEM), which includes its key unless client_key is set."""
    client_key: Path | None = None
    """Key (PEM) of the client certificate."""
    public_only: bool = False
    """Refuse addresses that are not on the public internet."""
    networks: tuple[Network, ...] = ()
    """With public_only: networks that are allowed all the same, e.g. "10.1.0.0/16"."""
    max_in_flight: Annotated[int, within(1, 10_000)] = 100
    """Maximum number of requests that one process has in flight; at most one per key."""
    rate: Rate | None = None
    """Rate limit of all processes together: "100/s", "30/min" or "500/h"."""
    rate_per_key: Rate | None = None
    """Rate limit for each key; its messages are kept the corresponding time apart."""
    timeout_seconds: Seconds = 15.0
    """Time limit for a request, from connecting to the last byte of the answer, in seconds."""
    connect_seconds: Seconds = 5.0
    """Time limit for connecting, in seconds."""
    attempts: Annotated[int, within(1, 1000)] = 10
    """Number of failed attempts after which a message becomes a dead letter."""
    schedule: Literal["doubling", "webhook"] = "doubling"
    """Waits after failures: 4, 8, … 64 s, or 5 s, 5 min, 30 min, 2 h, 5 h, 10 h."""
    follow_redirects: bool = False
    """Follow 307 and 308: to the same host, and never away from TLS."""
    client_errors: Literal["reject", "wait"] = "reject"
    """Treatment of messages answered with 4xx, except 408, 410, 425 and 429."""
    breaker_failures: Annotated[int, within(1, 1000)] = 5
    """Number of failures in a row after which the endpoint counts as down."""
    disable_after_seconds: Annotated[float, within(1, 366 * DAY)] = 5.0 * DAY
    """Time down after which an endpoint is disabled, until an operator resumes it."""

    @pydantic.field_validator("secrets")
    @classmethod
    def _are_secrets(cls, values: tuple[pydantic.SecretStr, ...]) -> tuple[pydantic.SecretStr, ...]:
        for secret in values:
            try:
                key_of(secret.get_secret_value())
            except UsageError as error:
                raise ValueError(str(error)) from None
        return values

    @pydantic.model_validator(mode="after")
    def _is_one_caller(self) -> Endpoint:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password belong together")
        oauth = (self.token_url, self.client_id, self.client_secret)
        if None in oauth and any(value is not None for value in (*oauth, self.scope)):
            raise ValueError("token_url, client_id and client_secret belong together")
        if sum(value is not None for value in (self.user, self.bearer, self.token_url)) > 1:
            raise ValueError("set only one of user and password, bearer, token_url")
        if self.client_key is not None and self.client_certificate is None:
            raise ValueError("client_key without client_certificate")
        if (self.proxy_user is None) != (self.proxy_password is None):
            raise ValueError("proxy_user and proxy_password belong together")
        if self.proxy_user is not None and self.proxy is None:
            raise ValueError("proxy_user without proxy")
        if self.http2 and urlsplit(self.url).scheme != "https":
            raise ValueError("http2 with http: HTTP/2 is agreed on by TLS, so the URL is https://…")
        if self.proxy is not None and self.public_only:
            raise ValueError("public_only with proxy: the proxy decides where it connects to")
        return self

    @pydantic.model_validator(mode="after")
    def _is_one_form(self) -> Endpoint:
        if (self.mode == "xmlrpc") != (self.method is not None):
            raise ValueError('mode = "xmlrpc" and method belong together')
        soap = (self.wsdl is not None, self.operation is not None)
        if any(value != (self.mode == "soap") for value in soap):
            raise ValueError('mode = "soap", wsdl and operation belong together')
        if self.mode != "batch" and (self.batch_messages or self.batch_of):
            raise ValueError('batch_messages and batch_of without mode = "batch"')
        if self.mode == "batch" and self.reply:
            raise ValueError('mode = "batch" and reply: one answer would reply to several messages')
        if self.batch_of == "key" and self.rate_per_key is not None:
            raise ValueError('batch_of = "key" and rate_per_key: its messages would go at once')
        if self.template is not None and self.mode not in ("binary", "plain"):
            raise ValueError('template without mode = "binary" or "plain"')
        if self.template is None and self.template_type is not None:
            raise ValueError("template_type without template")
        if not self.reply and (self.reply_type is not None or self.one_reply):
            raise ValueError("reply_type and one_reply without reply = true")
        return self

    @property
    def keys(self) -> list[bytes]:
        """Keys that sign requests."""
        return [key_of(secret.get_secret_value()) for secret in self.secrets]

    @property
    def messages(self) -> int:
        """Maximum number of messages in a request."""
        return (self.batch_messages or 100) if self.mode == "batch" else 1

    @property
    def shown(self) -> str:
        """The URL without its query, which may contain a secret."""
        return without_query(self.url)

    def wait_seconds(self, failures: int) -> float:
        """Return the seconds to wait after ``failures`` failures in a row.

        >>> one = Endpoint(url="http://billing.example.com")
        >>> [one.wait_seconds(failures) for failures in (0, 1, 2, 9)]
        [4, 4, 8, 64]
        >>> one = Endpoint(url="http://billing.example.com", schedule="webhook")
        >>> [one.wait_seconds(failures) for failures in (0, 1, 2, 9)]
        [5, 5, 300, 36000]
        """
        attempt = max(1, failures)
        if self.schedule == "webhook":
            return WEBHOOK_SECONDS[min(attempt, len(WEBHOOK_SECONDS)) - 1]
        return parking.wait_seconds(attempt)


class StoredEndpoint(Endpoint):
    """An endpoint stored in a broker, where it may be changed or removed at any time."""


Endpoints = Mapping[str, Endpoint]
"""Endpoints by name."""


def without_query(url: str) -> str:
    """Return a URL without its query, which may contain a secret.

    >>> without_query("https://login.example.com/token?key=abc")
    'https://login.example.com/token'
    """
    return urlsplit(url)._replace(query="", fragment="").geturl()


# Each process takes a part of the rate equal to its part of the shards. A rate is kept on average:
# capacity unused in one second may be used in the next second, but not later. A key is sent by one
# process, so its messages are simply kept a fixed time apart.


@dataclass(kw_only=True)
class Bucket:
    """Tokens for messages that may be sent now; it fills with time.

    >>> bucket = Bucket(per_second=2.0)
    >>> [bucket.take(now=at) for at in (10.0, 10.0, 10.0, 10.25, 10.5)]
    [0.0, 0.0, 0.5, 0.25, 0.0]
    """

    per_second: float
    """Tokens added per second, and the bucket's capacity, which is at least one."""
    share: float = 1.0
    """This process's part of the rate."""
    _tokens: float = 1.0
    _at: float | None = None

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        speed = self.per_second * self.share
        if speed <= 0:
            return 1.0
        most = max(1.0, speed)
        if self._at is None:
            self._tokens = most
        else:
            self._tokens = min(most, self._tokens + (now - self._at) * speed)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / speed


@dataclass(kw_only=True)
class Apart:
    """Minimum time between the messages of a key.

    >>> apart = Apart(seconds=2.0)
    >>> apart.sent("a", now=10.0)
    >>> apart.wait("a", now=10.5), apart.wait("b", now=10.5), apart.wait("a", now=12.0)
    (1.5, 0.0, 0.0)
    """

    seconds: float
    _sent: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Time of each key's last message, in this order; keys that may send again are removed."""

    def wait(self, key: str, now: float) -> float:
        """Return the seconds until the next message of a key may be sent."""
        return max(0.0, self._sent.get(key, now - self.seconds) + self.seconds - now)

    def sent(self, key: str, now: float) -> None:
        """Note that a message of a key is being sent."""
        self._sent.pop(key, None)
        self._sent[key] = now
        while next(iter(self._sent.values())) <= now - self.seconds:
            self._sent.popitem(last=False)


def filled(template: str, content_type: str, message: Received) -> bytes:
    """Return the body that a template makes from a message.

    Raises:
        UnreadableBody: the message lacks a value that the template names.
    """
    values = _values(message)
    write = _writer(content_type)

    def value(found: re.Match[str]) -> str:
        try:
            return write(values(found[1]))
        except (LookupError, TypeError, ValueError, RecursionError):
            reason = f"it has no {{{{{found[1]}}}}}, which the endpoint's template names"
            declared = message.headers.get(CONTENT_TYPE)
            raise UnreadableBody(message.message_id, declared, reason) from None

    return PLACE.sub(value, template).encode("utf-8", errors="replace")


def part(value: Any, path: str) -> Any:
    """Return the part of a JSON value at a path of names and indexes.

    >>> part({"lines": [{"price": 7}]}, "lines.0.price")
    7
    """
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _values(message: Received) -> Callable[[str], Any]:
    def data() -> Any:
        body = message.body
        try:
            return STRICT.decode(body.decode(json.detect_encoding(body)))
        except (ValueError, RecursionError):
            return body.decode()

    own: Mapping[str, Callable[[], Any]] = {
        "id": lambda: str(message.message_id),
        "key": lambda: message.key,
        "type": lambda: message.message_type,
        "time": message.created_at.isoformat,
        "service": lambda: message.from_service,
        "data": data,
    }

    def of(name: str) -> Any:
        if name in own:
            return own[name]()
        root, _, path = name.partition(".")
        return message.headers[path] if root == "header" else part(data(), path)

    return of


def _writer(content_type: str) -> Callable[[Any], str]:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON or kind.endswith("+json"):
        return as_json
    return (lambda value: quote_plus(_text(value))) if kind == FORM else _text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else as_json(value)
