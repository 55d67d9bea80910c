"""Hosts: a connection to the first host of an address that answers.

A host whose process has stopped still lets its system accept connections. So the next one is tried
also if a host says nothing in time after it was connected to.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class OfTls(Protocol):
    """Settings that say how a server's certificate is checked, and which one is the client's."""

    ca_file: Path | None
    certificate_file: Path | None
    key_file: Path | None


def first_of(hosts: Sequence[tuple[str, int]], open_host: Callable[[str, int], None]) -> None:
    """Open a connection to the first host for which this raises no `OSError`.

    ``open_host`` gives up what it has opened when it raises. The last host's error is raised.
    """
    *others, last = hosts
    for host in others:
        try:
            return open_host(*host)
        except OSError:
            continue
    return open_host(*last)


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect; nothing is waited for longer than so many seconds."""
    one = socket.create_connection((host, port), timeout=seconds)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    return one


def context_of(settings: OfTls) -> ssl.SSLContext:
    """Return how TLS is spoken."""
    context = ssl.create_default_context(cafile=settings.ca_file)
    if settings.certificate_file is not None:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    return context
