"""Hosts: connect to the first host of an address that answers.

The system of a host accepts connections even while the server process is stopped. So the next host
is also tried if one accepts a connection and then does not answer in time.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class OfTls(Protocol):
    """TLS settings: how to check the server's certificate, and the client's own certificate."""

    ca_file: Path | None
    certificate_file: Path | None
    key_file: Path | None


def first_of(hosts: Sequence[tuple[str, int]], open_host: Callable[[str, int], None]) -> None:
    """Call ``open_host`` for each host until a call raises no `OSError`.

    If ``open_host`` raises, it must close its connection first. The last host's error is raised.
    """
    *rest, last = hosts
    for host in rest:
        try:
            return open_host(*host)
        except OSError:
            continue
    return open_host(*last)


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect; no operation waits longer than ``seconds``."""
    connection = socket.create_connection((host, port), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    return connection


def context_of(settings: OfTls) -> ssl.SSLContext:
    """Return the TLS context for these settings."""
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    return context
