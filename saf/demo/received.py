"""Messages that the demo reads from a queue, and free ports for the queue's server."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping

from saf.demo.proof import Received

OURS = ("saf-id", "saf-from", "saf-service", "saf-key", "saf-type")
"""Headers that become columns of a message, in the order of `Received`."""


def received_of(number: int, said: Mapping[str, str], body: bytes) -> Received:
    """Return a message in the proof's form, from its headers and its body."""
    headers = {name: value for name, value in said.items() if not name.startswith("saf-")}
    message_id, from_service, to_service, key, message_type = (said.get(name) for name in OURS)
    return (
        *(number, message_id, from_service, to_service, key, message_type),
        *(json.dumps(headers), body),
    )


def free_port() -> int:
    """Return an unused port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
