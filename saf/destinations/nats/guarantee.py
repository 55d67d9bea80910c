"""Promise of the settings of a NATS server and its stream: what a crash may take back.

A batch is stored all or nothing, so a loss takes the marks back with the messages. It is noticed at
the next contact, and `saf rebase` sends the lost messages again. There is one exception: a power
failure in the middle of a batch, at a server without replicas.
"""

from __future__ import annotations

from saf.destinations.nats.server import Link
from saf.destinations.settings import Guarantee

ENOUGH = 3
"""Servers needed so that one of them may be down."""


def guarantee(link: Link) -> Guarantee:
    """Return the server's promise with its current settings."""
    config = link.look()
    settings, info = link.settings, link.connection.info
    server = f"NATS {info['version']}, {settings.server}, stream {settings.stream}"
    quality = settings.quality.replace("_", " ")
    if config is None:
        return Guarantee(server=f"{server}, which is made at the first message", promise=quality)
    findings: list[tuple[str, str]] = []
    replicas = int(config.get("num_replicas", 1))
    if config.get("storage") == "memory":
        findings.append(("it keeps messages in memory, so a restart loses them", "storage = file"))
    if replicas == 1:
        findings.append(
            (
                "a loss of power may lose messages acknowledged since the server last synced its "
                "files, and keep a part of the batch that it was storing, which is then stored "
                "twice",
                "replicas = 3 in a cluster; or sync_interval: always, for acknowledged messages",
            )
        )
    elif replicas < ENOUGH:
        findings.append(("two servers work only together", "replicas = 3"))
    if not config.get("allow_rollup_hdrs"):
        findings.append(("its marks pile up", "allow_rollup_hdrs"))
    if not config.get("allow_direct"):
        findings.append(("saf reconcile cannot read it back", "allow_direct"))
    kept = (
        "one server has each message; a crash of its process loses nothing that was acknowledged"
        if replicas == 1
        else f"{replicas} servers have each message, most of them before it is acknowledged"
    )
    return Guarantee(
        server=server,
        promise=f"{quality}; {kept}; a loss is detected, and saf rebase repeats the messages",
        more=tuple(findings),
    )
