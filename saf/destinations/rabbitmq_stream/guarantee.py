"""Promise of a RabbitMQ server's streams: which messages a crash may take back.

A server confirms a message when most of the servers that keep its stream have written it, and never
syncs its files. So the number of servers that lose power together decides.
"""

from __future__ import annotations

from saf.destinations.rabbitmq_stream.server import Link
from saf.destinations.settings import Guarantee

ENOUGH = 3
"""Servers needed so that one of them may be down."""


def guarantee(link: Link) -> Guarantee:
    """Return the server's promise with its current settings."""
    link.look()
    settings = link.settings
    server = f"RabbitMQ {link.connection.server['version']}, {settings.server}"
    quality = settings.quality.replace("_", " ")
    replicas = link.connection.replicas([settings.marks]).get(settings.marks)
    if replicas is None:
        server = f"{server}, whose streams are made at the first message"
        return Guarantee(server=server, promise=quality)
    findings: list[tuple[str, str]] = []
    if replicas == 1:
        findings.append(
            (
                "a loss of power may lose messages that the system had not written yet, in each "
                "stream separately; saf reconcile finds missing messages",
                "a cluster of three servers, each with power of its own",
            )
        )
    elif replicas < ENOUGH:
        findings.append(("two servers work only together", "a cluster of three servers"))
    kept = (
        "one server has each message; a crash of its process loses nothing that was acknowledged"
        if replicas == 1
        else f"{replicas} servers have each message, most of them before it is acknowledged"
    )
    return Guarantee(
        server=server,
        promise=f"{quality}; {kept}; the loss of a server's marks is detected, and saf rebase "
        "sends missing messages again",
        more=tuple(findings),
    )
