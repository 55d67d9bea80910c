"""Server addresses: URLs of one server or of a cluster, and connections to their hosts.

    SCHEME://host:port/vhost          one server; without a path, the virtual host ``/``
    SCHEME://host,host:port           a cluster: the first host that answers

An address that contains a login is rejected, because settings contain the login separately. Kinds
whose URLs have another form use `without_login` and `hosts_of`.

The operating system of a host accepts connections even while the server process is stopped. So
`first_of` also tries the next host if a host accepts a connection and then does not answer in time.
If no host answers, the last host's error is raised.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from saf.destinations.settings import SecuredSettings


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address of a server, or of the servers of a cluster."""

    hosts: tuple[tuple[str, int], ...]
    virtual_host: str
    tls: bool


def parse(text: str, ports: Mapping[str, int], secure: str, named: str) -> Address:
    """Parse an address.

    >>> parse("amqps://n1,[::1]:7000/a%2Fb", {"amqp": 5672, "amqps": 5671}, "amqps", "server")
    Address(hosts=(('n1', 5671), ('::1', 7000)), virtual_host='a/b', tls=True)

    Args:
        text: the address.
        ports: the default port of each scheme.
        secure: the scheme with TLS.
        named: how an error describes a valid address.

    Raises:
        ValueError: the address is invalid.
    """
    scheme, _, rest = without_login(text).partition("://")
    if scheme not in ports or not rest:
        raise ValueError(f"{text!r} is not an address of a {named}")
    places, slash, path = rest.partition("/")
    if "/" in path or "?" in path or (slash and not path):
        raise ValueError(f"{text!r}: a virtual host is one name, with %2F for a slash in it")
    hosts = hosts_of(text, places, ports[scheme])
    return Address(hosts=hosts, virtual_host=unquote(path) or "/", tls=scheme == secure)


def without_login(text: str) -> str:
    """Return an address.

    Raises:
        ValueError: it may contain a login, which is not quoted.
    """
    if "@" in text:
        raise ValueError("give a login by username = … and password = …, not in the address")
    return text


def hosts_of(
    text: str, places: str, port: int, wrong: str = "lacks a host, or has something after it"
) -> tuple[tuple[str, int], ...]:
    """Return the hosts of an address, each with its port.

    >>> hosts_of("k1,[::1]:7000", "k1,[::1]:7000", 9092)
    (('k1', 9092), ('::1', 7000))

    Args:
        text: the address.
        places: the part of it that names hosts.
        port: the default port.
        wrong: how an error describes an invalid list of hosts.

    Raises:
        ValueError: the list is invalid.
    """
    hosts = []
    for place in places.split(","):
        url = urlsplit(f"//{place.strip()}")
        try:
            host, url_port = url.hostname, url.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if not host or url.query or url.path.strip("/"):
            raise ValueError(f"{text!r} {wrong}")
        hosts.append((named_host(text, host), url_port or port))
    return tuple(hosts)


@contextmanager
def reading_url(text: str) -> Iterator[None]:
    """Read a URL in this block; an error quotes nothing of a URL that may contain a login.

    Raises:
        ValueError: it is not a URL.
    """
    try:
        yield
    except ValueError as error:
        why = "" if "@" in text else f": {error}"
        raise ValueError(f"it is not a URL{why}") from None


def named_host(text: str, host: str) -> str:
    """Return ``host``, which is part of the address ``text``.

    >>> named_host("nats://db..example", "db..example")
    Traceback (most recent call last):
    ...
    ValueError: 'nats://db..example': 'db..example' cannot be the name of a host

    Raises:
        ValueError: no resolver would accept it as a host name.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(f"{text!r}: {host!r} cannot be the name of a host") from None
    return host


def first_of(
    hosts: Sequence[tuple[str, int]],
    open_host: Callable[[str, int], None],
    errors: tuple[type[Exception], ...] = (OSError,),
) -> None:
    """Call ``open_host`` for each host until a call raises none of ``errors``.

    If ``open_host`` raises, it must close its connection first. The last host's error is raised.
    """
    *rest, last = hosts
    for host in rest:
        try:
            return open_host(*host)
        except errors:
            continue
    return open_host(*last)


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect; no operation waits longer than ``seconds``."""
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    return connection


def context_of(settings: SecuredSettings) -> ssl.SSLContext:
    """Return the TLS context for these settings."""
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    return context
