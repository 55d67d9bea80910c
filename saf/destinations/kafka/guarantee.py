"""Promise of a Kafka cluster's settings: what a crash or a failover may take back.

A transaction is acknowledged by all in-sync replicas (``acks=all``), so their least number decides.
Brokers do not sync their files.

Messages and marks are in different partitions. Lost marks are noticed at the next contact. If only
a topic loses messages, only `saf reconcile` finds them.
"""

from __future__ import annotations

from saf.destinations.kafka.server import Link
from saf.destinations.settings import Guarantee

STATE = "__transaction_state"
ENOUGH = 3
"""Brokers needed so that one of them may be down."""


def guarantee(link: Link) -> Guarantee:
    """Return the cluster's promise with its current settings."""
    settings = link.settings
    topics = link.topics()
    server = link.says()
    quality = settings.quality.replace("_", " ")
    if not link.look():
        server += f", topic {settings.marks_topic}, which is made at the first message"
        return Guarantee(server=server, promise=f"{quality}, with acks=all")
    link.read()
    used = sorted({topic for group in link.marks.topics.values() for topic in group} & {*topics})
    findings: list[tuple[str, str]] = []
    fewest = 1 << 10
    for topic in [settings.marks_topic, *used, STATE]:
        if topic not in topics:
            continue
        replicas = min(len(partition.replicas) for partition in topics[topic].partitions.values())
        config = link.config(topic)
        if config is None:
            findings.append(
                (
                    f"how topic {topic} is kept is not known, because this user may not ask",
                    f"kafka-acls.sh --add --operation DescribeConfigs --topic {topic}",
                )
            )
            continue
        least = min(int(config.get("min.insync.replicas") or 1), replicas)
        if topic != STATE:
            fewest = min(fewest, least)
        if replicas < ENOUGH or least < ENOUGH - 1:
            findings.append(
                (
                    f"topic {topic} has {_brokers(replicas)}, and {least} must have a message "
                    "before it is acknowledged: the loss of that disk, or of power, loses messages",
                    _cure(topic),
                )
            )
        if config.get("unclean.leader.election.enable") == "true":
            findings.append(
                (
                    f"a failover of topic {topic} may lose acknowledged messages",
                    f"unclean.leader.election.enable = false for topic {topic}",
                )
            )
        if topic in used and config.get("cleanup.policy") != "delete":
            findings.append(
                (
                    f"topic {topic} forgets all but the last message of a key",
                    f"cleanup.policy = delete for topic {topic}",
                )
            )
    kept = (
        "a crash of a broker's process loses nothing that was acknowledged (acks=all)"
        if fewest == 1
        else f"{_brokers(fewest)} at least have each acknowledged message (acks=all)"
    )
    return Guarantee(
        server=server,
        promise=f"{quality}, for who reads with isolation.level=read_committed; {kept}; lost marks "
        "are noticed, and saf rebase sends again; lost messages alone are found by saf reconcile",
        more=tuple(findings),
    )


def _cure(topic: str) -> str:
    if topic == STATE:
        return "transaction.state.log.replication.factor = 3 and …min.isr = 2 before it is made"
    return f"3 replicas, and min.insync.replicas = 2, for topic {topic}"


def _brokers(count: int) -> str:
    return f"{count} broker{'' if count == 1 else 's'}"
