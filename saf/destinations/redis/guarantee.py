"""Promise of a Redis server's settings: which messages a crash or a failover may take back.

A loss always takes the marks back with the messages. It is noticed at the next contact, and `saf
rebase` sends the lost messages again; but a consumer may have read them before.
"""

from __future__ import annotations

from saf.destinations.redis.server import Link
from saf.destinations.settings import Guarantee

KEPT = {
    "always": "a crash of the process or of the machine loses nothing that was acknowledged",
    "everysec": "a crash loses messages acknowledged in the last second or two",
    "no": "a crash of the machine loses messages acknowledged since the system last wrote, "
    "often half a minute",
    None: "what a crash of the machine loses is not known, because this user may not ask",
}
NOT_KEPT = "a crash, or any restart, loses messages acknowledged since the last snapshot"


def guarantee(link: Link) -> Guarantee:
    """Return the server's promise with its current settings."""
    info = link.info()
    file = bool(info["aof_enabled"])
    sync = link.config("appendfsync") if file else None
    replicas = int(info["connected_slaves"])
    required = link.settings.replicas
    findings: list[tuple[str, str]] = []
    if not file:
        findings.append((NOT_KEPT, "appendonly yes and appendfsync always in redis.conf"))
    elif sync is None:
        findings.append((KEPT[sync], "ACL SETUSER with +config|get, for appendfsync"))
    elif sync != "always":
        findings.append((KEPT[sync], "appendfsync always in redis.conf"))
    if replicas and not required:
        findings.append(
            (
                f"a failover to one of {_replicas(replicas)} may lose acknowledged messages, "
                "because writes do not wait for it",
                f"replicas = {replicas} in this destination of saf.toml, and min-replicas-to-write",
            )
        )
    if required > replicas:
        findings.append(
            (
                f"it has {replicas} of {_replicas(required)} that saf waits for: messages wait",
                "start them, or lower replicas in saf.toml",
            )
        )
    failover = "no replica is waited for"
    if required:
        failover = f"a chunk counts as stored when {_replicas(required)} have it"
    kept = KEPT.get(sync, KEPT[None]) if file else NOT_KEPT
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info["redis_version"]
    return Guarantee(
        server=f"{name} {version}, {info['redis_mode']}, {link.settings.server}",
        promise=f"{link.settings.quality.replace('_', ' ')}; {kept}; {failover}; a loss is "
        "detected, and saf rebase sends the lost messages again",
        more=tuple(findings),
    )


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"
