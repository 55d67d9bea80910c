"""A host whose process is stopped, as others see it: its system accepts, and nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_host() -> Iterator[int]:
    """Give the port of such a host."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield int(one.getsockname()[1])
